#!/usr/bin/env python3
"""Writes the trained weights as artifacts: INT8 in --out, INT4 in --out/int4, F32 where --float says.

    python3 export.py --weights .data/run/weights --out config/demo-model

INT4 is rounded by what the matrices are fed with over a sample of --windows texts of 512 tokens (rounding.py; needs the
corpus); --windows 0 rounds to the nearest step.
"""
import argparse
import os

import numpy as np
import torch

import artifact
import data
import model
import rounding
import store


def tensors_of(params, mode, rounded):
    """Arrays of an artifact: quantised matrices, F32 norms. rounded: INT4 matrices that are rounded already."""
    out = {}
    for name, w in params.items():
        w = w.detach().float().cpu()
        quantiser = model.quantiser_of(name, w.shape, mode)
        if quantiser is None:
            out[name] = w.numpy()
        elif quantiser is model.as_int8:
            q, s = model.int8_weight(w)
            out[name], out[name + "_scale"] = q.numpy().astype(np.int8), s.numpy()
        else:
            q, g, s = (a.cpu().numpy() for a in rounded.get(name) or model.int4_weight(w))
            out[name + "_q4"], out[name + "_gscale"] = artifact.pack_nibbles(q), artifact.pack_nibbles(g)
            out[name + "_scale"] = s
    return out


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--weights", default=".data/run/weights")
    p.add_argument("--tokenizer", default=".data/tokenizer.json")
    p.add_argument("--out", default="config/demo-model")
    p.add_argument("--float", help="folder of an F32 artifact, to compare with")
    p.add_argument("--corpus", default=".data/corpus")
    p.add_argument("--windows", type=int, default=32)
    args = p.parse_args()
    wanted = [("int8", args.out), ("int4", os.path.join(args.out, "int4"))] + ([("none", args.float)] if args.float else [])
    params, config, _ = store.load_shards(args.weights, "cuda" if torch.cuda.is_available() else "cpu")
    rounded = {}
    if args.windows:
        builder = data.Builder(args.tokenizer, args.corpus)
        ids = rounding.sample(builder, data.split_prose(args.corpus)[0], args.windows)
        rounded = rounding.calibrated(params, config, ids)
    with torch.no_grad():
        for mode, folder in wanted:
            artifact.write_folder(folder, config, mode, tensors_of(params, mode, rounded), args.tokenizer)
            size = os.path.getsize(os.path.join(folder, "model.safetensors"))
            print(f"{folder}: {mode}, {size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
