#!/usr/bin/env python3
"""Writes the trained weights as artifacts: INT8 in --out, INT4 in --out/int4, F32 where --float says.

    python3 export.py --weights .data/run/weights --out config/demo-model
"""
import argparse
import os

import numpy as np
import torch

import artifact
import model
import store


def tensors_of(params, mode):
    """Arrays of an artifact: quantised matrices, F32 norms."""
    out = {}
    for name, w in params.items():
        w = w.detach().float()
        quantiser = model.quantiser_of(name, w.shape, mode)
        if quantiser is None:
            out[name] = w.numpy()
        elif quantiser is model.as_int8:
            q, s = model.int8_weight(w)
            out[name], out[name + "_scale"] = q.numpy().astype(np.int8), s.numpy()
        else:
            q, g, s = (a.numpy() for a in model.int4_weight(w))
            q, g = q.astype(np.int8).view(np.uint8) & 15, g.astype(np.uint8)
            if g.shape[1] % 2:
                g = np.concatenate([g, np.zeros_like(g[:, :1])], 1)
            out[name + "_q4"] = q[:, 0::2] | (q[:, 1::2] << 4)
            out[name + "_gscale"] = g[:, 0::2] | (g[:, 1::2] << 4)
            out[name + "_scale"] = s
    return out


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--weights", default=".data/run/weights")
    p.add_argument("--tokenizer", default=".data/tokenizer.json")
    p.add_argument("--out", default="config/demo-model")
    p.add_argument("--float", help="folder of an F32 artifact, to compare with")
    args = p.parse_args()
    wanted = [("int8", args.out), ("int4", os.path.join(args.out, "int4"))] + ([("none", args.float)] if args.float else [])
    params, config, _ = store.load_shards(args.weights)
    with torch.no_grad():
        for mode, folder in wanted:
            artifact.write_folder(folder, config, mode, tensors_of(params, mode), args.tokenizer)
            size = os.path.getsize(os.path.join(folder, "model.safetensors"))
            print(f"{folder}: {mode}, {size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
