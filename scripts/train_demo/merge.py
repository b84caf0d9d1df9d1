#!/usr/bin/env python3
"""Averages two stages of one run, tensor by tensor; a tensor that the second folder lacks is taken from the first.

    python3 merge.py --first stage2/weights --second stage3/weights --share 0.45 --out .data/merged
"""
import argparse
import glob
import json
import os

import numpy as np
import torch

import store


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--first", required=True)
    p.add_argument("--second", required=True, help="may hold only some of the weight files")
    p.add_argument("--share", type=float, default=0.45, help="share of the second")
    p.add_argument("--out", default=".data/merged")
    args = p.parse_args()
    params, config, _ = store.load_shards(args.first)
    params = {k: v.detach() for k, v in params.items()}
    merged = 0
    for path in sorted(glob.glob(os.path.join(args.second, "weights*.npz"))):
        with np.load(path) as z:
            for name in z.files:
                params[name] = torch.lerp(params[name], torch.from_numpy(z[name]).float(), args.share)
                merged += 1
    with open(os.path.join(args.second, "settings.json")) as f:
        progress = json.load(f).get("progress", {})
    store.save_shards(params, config, args.out, {"progress": progress})
    print(f"{merged} of {len(params)} tensors averaged")


if __name__ == "__main__":
    main()
