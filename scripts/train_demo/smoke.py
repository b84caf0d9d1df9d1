#!/usr/bin/env python3
"""About a minute of the whole pipeline on a CPU: generate, train a toy model, check, export, run the reference. Needs
python3-torch 1.13 or newer with a fast BLAS (Debian: libopenblas0), no downloads, no corpus.

    python3 smoke.py [--tokenizer config/demo-model/tokenizer.json] [--seconds 40]
"""
import argparse
import json
import math
import os
import random
import subprocess
import sys
import tempfile

import numpy as np
import torch

import data
import model
import reference
import rounding
import store
import stories
import train
from tokenizer import ASSISTANT, END, SYSTEM, USER, Tokenizer

HERE = os.path.dirname(os.path.abspath(__file__))


def run(script, *args):
    subprocess.run([sys.executable, os.path.join(HERE, script), *map(str, args)], check=True)


def check_generator(r):
    """Whatever the teller tells, the checker must parse, and changed words must be noticed."""
    noticed = 0
    for _ in range(200):
        _, roles, _, text, _ = stories.tell(r)
        result = stories.check(text)
        assert result["parsed"] == result["sentences"] and not result["off_plot"] and not result["contradictions"], result
        other = "Ann" if roles["h"] != "Ann" else "Leo"
        split = stories.sentences(text)
        changed = [i for i, s in enumerate(split) if i and roles["h"] in s.split()]
        if changed:
            split[changed[-1]] = split[changed[-1]].replace(roles["h"], other)
            noticed += stories.check(" ".join(split))["contradictions"] > 0
    assert noticed > 80, noticed


def check_roles(r, tokenizer_path):
    """The loss on role words against a count by hand, for logits that are all alike."""
    builder, roles = data.Builder(tokenizer_path, "none"), train.Roles(tokenizer_path, 4096, "cpu")
    told = builder.text(stories.tell_about(r, "person", "Sam")[3])
    ids = [END, USER] + builder.text("Tell me a story about Sam.") + [ASSISTANT] + told + [END]
    expected, known, turn = 0.0, set(), END
    for at, after in zip(ids, ids[1:]):
        if at <= SYSTEM:
            known, turn = set(), at
        known.add(int(roles.canonical[at]))
        word = int(roles.canonical[after])
        if word and turn != USER:
            taken = [w for w in known if w and roles.kind[w] == roles.kind[word]]
            expected += (train.KEPT_WEIGHT * math.log(4096) if word in known
                         else -train.TAKEN_WEIGHT * math.log(1 - len(taken) / 4096))
    x = torch.tensor([ids, ids])
    loss = roles.loss(torch.zeros(2, len(ids) - 1, 4096), x[:, :-1], x[:, 1:], torch.tensor([True, False]))
    assert expected > 0 and abs(float(loss) - expected) < 1e-3 * expected, (float(loss), expected)


def check_rounding(weights, artifact, tokenizer_path):
    """On texts that the rounding has not seen, the INT4 artifact's matrices must be off by less than nearest rounding is, and
    reading the artifact must give values that INT4 has."""
    builder, (params, config) = data.Builder(tokenizer_path, "none"), store.load(weights)
    ids = rounding.sample(builder, data.split_prose("none")[0], 8, 128, seed=9)
    products, stored, better = rounding.input_products(params, config, ids), store.load(artifact)[0], 0
    for name, h in products.items():
        w, s = params[name].detach().double(), stored[name]
        assert torch.equal(s.integers, s.integers.round()) and s.integers.abs().max() <= 7 * 15, name
        calibrated, nearest = (((r.double() - w) @ h * (r - w)).sum() for r in (s.integers * s.scale[:, None],
                                                                                 model.as_int4(params[name].detach())))
        better += bool(calibrated < nearest)
    assert better > 0.9 * len(products), (better, len(products))


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--tokenizer", default=os.path.join(HERE, "../../config/demo-model/tokenizer.json"))
    p.add_argument("--seconds", type=int, default=40)
    args = p.parse_args()
    check_generator(random.Random(1))
    check_roles(random.Random(2), args.tokenizer)
    with tempfile.TemporaryDirectory() as tmp:
        common = ("--tokenizer", args.tokenizer, "--corpus", os.path.join(tmp, "none"))
        size = ("--tiny", "--scale", 0.004, "--text-rows", 2, "--text-length", 64, "--task-rows", 6, "--row", 96, "--processes", 1, "--log-every", 5,
                "--families", "walk:1,nest:1")
        first = args.seconds * 2 // 3
        run("train.py", "--out", tmp, *common, *size, "--seconds", first, "--end", 0.6, "--qat", 2)
        run("train.py", "--out", tmp, *common, *size, "--seconds", args.seconds - first, "--begin", 0.6, "--qat", 0.6,
            "--resume", os.path.join(tmp, "checkpoint.pt"))
        history = [json.loads(line) for line in open(os.path.join(tmp, "log.jsonl"))]
        assert len(history) >= 2 and history[-1]["text"] < history[0]["text"], history
        weights = os.path.join(tmp, "weights")
        run("evaluate.py", "--weights", weights, *common, "--count", 2, "--windows", 1, "--families", "walk", "--modes", "int8",
            "--out", os.path.join(tmp, "eval.json"))
        run("export.py", "--weights", weights, "--tokenizer", args.tokenizer, "--corpus", os.path.join(tmp, "none"), "--windows", 8,
            "--out", os.path.join(tmp, "model"))
        check_rounding(weights, os.path.join(tmp, "model/int4"), args.tokenizer)
        ids = [1] + Tokenizer(args.tokenizer).encode("Start with 4. Add 3. Keep the last digit.") + [2]
        for folder in ("model", "model/int4"):
            wide, narrow = (reference.Reference(os.path.join(tmp, folder), k).logits(ids, 3) for k in (np.float64, np.float32))
            gap = float(np.sqrt(((wide - narrow) ** 2).mean()) / wide.std())
            print(f"{folder}: float64 against float32 {gap:.1e} of the logits' spread")
            assert np.isfinite(wide).all() and gap < 0.05
    print("smoke passed")


if __name__ == "__main__":
    main()
