#!/usr/bin/env python3
"""Measures trained weights at every depth, in float and in the engine's INT8 and INT4 rounding.

    python3 evaluate.py --weights .data/run/weights --out .data/run/eval.json --tables .data/run/eval.md

Accuracy per task family and difficulty over loops 1 … 16 (true answer, and for staircase families the intermediate answer),
held-out lengths and names apart, held-out bits per byte on stories and prose. Story checks and strangers' prompts need
text generation: talk.py.
"""
import argparse
import json
import math
import random
import time

import torch
import torch.nn.functional as F

import data
import model
import store
import stories
import tasks
from tokenizer import ASSISTANT, USER
from world import HELD_NAMES

LOOPS = (1, 2, 3, 4, 6, 8, 12, 16)
CORE_STEPS = (3, 4, 5, 6)             # difficulties whose mean is a family's number
MODES = ("none", "int8", "int4")
ALONE = ("walk", 8)                   # a difficulty that is judged by itself: asked as often as a family's mean


def task_cells(builder, families, count, chain_count, longest_walk, r):
    """{(family, k): [(ids up to the answer, [expected ids], answers per step or None)]}"""
    cells = {}

    def add(key, family, k, n, names=tasks.CHAIN_NAMES):
        rows = []
        while len(rows) < n:
            ids, supervised, _ = builder.row(family, max(k, 3), r, 1, k, names, length=400)
            position, _, answers = supervised[0]
            rows.append((ids[:position + 1], answers[-1:], answers))
        cells[key] = rows
    serial_count = count
    for family in families:
        count = serial_count if family in tasks.SERIAL else chain_count
        longest = {"nest": 6, "hand": 8, "variables": 8}.get(family, longest_walk)
        for k in range(1, longest + 1):
            share = len(CORE_STEPS) if (family, k) == ALONE else 1 if k in CORE_STEPS else 1 / 4
            add((family, k), family, k, max(4, int(count * share)))
    if "hand" in families:
        for k in (1, 2, 3):
            add(("hand, held-out names", k), "hand", k, max(4, -(-chain_count * len(CORE_STEPS) // 3)), HELD_NAMES)
    return cells


def text_cells(builder, count, r):
    """`count` questions of each kind about stories and sums: trained with the true answer at every depth."""
    cells = {}
    for name in ("story questions", "story tracking"):
        rows = []
        while len(rows) < count:
            if name == "story tracking":
                text, questions, _ = stories.track(r)
            else:
                _, _, _, text, questions = stories.tell(r)
            question, answer = questions[0]
            rows.append(([USER] + builder.text(text + " " + question) + [ASSISTANT], builder.text(answer), None))
        cells[(name, 0)] = rows
    for digits in (1, 2, 3, 4):
        rows = []
        for _ in range(count // 4):
            question, answer, _ = tasks.addition(r, digits)
            rows.append(([USER] + builder.text(question) + [ASSISTANT], builder.text(answer), None))
        cells[("addition", digits)] = rows
    return cells


@torch.no_grad()
def cell_accuracy(network, rows, device, chunk):
    """(true-answer accuracy, intermediate-answer accuracy or None) per depth; answers of several tokens must match whole."""
    right, staged = [0] * len(LOOPS), [0] * len(LOOPS)
    rows = sorted(rows, key=lambda row: len(row[0]))     # less padding
    for at in range(0, len(rows), chunk):
        part = rows[at:at + chunk]
        full = [ids + answer[:-1] for ids, answer, _ in part]
        x = torch.zeros(len(part), max(map(len, full)), dtype=torch.long)
        for i, ids in enumerate(full):
            x[i, :len(ids)] = torch.tensor(ids)
        where = [(i, len(ids) - 1 + j, answer[j]) for i, (ids, answer, _) in enumerate(part) for j in range(len(answer))]
        row, position, target = (torch.tensor(c, device=device) for c in zip(*where))
        states = network.states(x.to(device), LOOPS[-1], set(LOOPS))
        for d, t in enumerate(LOOPS):
            z = network.logits(network.hidden(states[t])[row, position]).argmax(-1)
            wrong = torch.zeros(len(part), device=device).index_add_(0, row, (z != target).float())
            right[d] += int((wrong == 0).sum())
            if part[0][2] is not None:
                middle = torch.tensor([a[min(t, len(a)) - 1] for _, _, a in part], device=device)
                staged[d] += int((z == middle).sum())
    n = len(rows)
    return [round(100 * v / n, 2) for v in right], ([round(100 * v / n, 2) for v in staged] if rows[0][2] else None)


@torch.no_grad()
def bits_per_byte(network, ids, byte_counts, device, windows, length=512, chunk=32):
    windows = min(windows, len(ids) // length)
    x = torch.from_numpy(ids[:windows * length].astype("int64")).view(windows, length).to(device)
    total, size = [0.0] * len(LOOPS), float(byte_counts.to(device)[x[:, 1:]].sum())
    for at in range(0, windows, chunk):
        part = x[at:at + chunk]
        states = network.states(part, LOOPS[-1], set(LOOPS))
        for d, t in enumerate(LOOPS):
            z = network.logits(network.hidden(states[t])[:, :-1])
            total[d] += float(F.cross_entropy(z.flatten(0, 1), part[:, 1:].flatten(), reduction="sum"))
    return [round(v / math.log(2) / size, 5) for v in total]


def family_means(accuracy):
    """{family: mean accuracy over difficulties 3 … 6 per depth}, other rows' means over what there is."""
    out = {}
    for family in dict.fromkeys(name for name, _ in accuracy):
        cells = [v for (n, k), v in accuracy.items() if n == family and (k in CORE_STEPS or family not in tasks.FAMILIES)]
        if cells:
            out[family] = [round(sum(c) / len(c), 2) for c in zip(*cells)]
    return out


def table(title, rows):
    head = f"| {title} | " + " | ".join(map(str, LOOPS)) + " |\n|---|" + "--:|" * len(LOOPS) + "\n"
    return head + "".join(f"| {name} | " + " | ".join(f"{v:.4f}" if v < 10 and "bits" in title else f"{v:.1f}" for v in values) + " |\n"
                          for name, values in rows) + "\n"


def tables(result):
    out = ""
    for mode in result["modes"]:
        m = result["modes"][mode]
        label = {"none": "F32", "int8": "INT8 (W8A8)", "int4": "INT4 (W4A8, groups of 32)"}[mode]
        out += f"### {label}\n\n" + table("accuracy %, mean of k 3-6 \\ loops", m["means"].items())
        if mode == "int8":
            out += table("accuracy % by difficulty \\ loops", m["accuracy"].items())
            out += table("answer after min(loops, k) steps, % \\ loops", m["staircase"].items())
        out += table("held-out bits per byte \\ loops", m["bits"].items())
    return out


def evaluate(params, config, builder, families, count, chain_count, longest, windows, modes, device, save, chunk=1024, seed=777):
    r = random.Random(seed)
    cells = {**task_cells(builder, families, count, chain_count, longest, r),
             **text_cells(builder, max(4, count * len(CORE_STEPS)), r)}
    ids = []
    while len(ids) < windows * 512 + 512:
        ids += builder.text(stories.tell(r)[3]) + [0]
    held = {"stories": torch.tensor(ids, dtype=torch.int16).numpy(), "prose": builder.held_prose}
    word_bytes = torch.tensor([len(builder.tokenizer.decode([i]).encode("utf-8")) if i > 7 else 0 for i in range(config.vocab)])
    rope, result = model.rope_table(config, device), {"loops": LOOPS, "questions_per_core_cell": count, "modes": {}}
    for mode in modes:
        start = time.time()
        # Integer sums below 2^24 are exact in TF32 as well; the float model gets true F32.
        torch.backends.cuda.matmul.allow_tf32 = mode != "none"
        weights = {k: v.detach() for k, v in params.items()} if mode == "none" else model.quantised(params, mode)
        network = model.Network(config, weights, rope, mode != "none", mode != "none")
        accuracy, staircase = {}, {}
        for key, rows in cells.items():
            accuracy[key], stair = cell_accuracy(network, rows, device, chunk)
            if stair:
                staircase[key] = stair
        bits = {name: bits_per_byte(network, held[name], word_bytes, device, windows) for name in held}
        result["modes"][mode] = {"means": family_means(accuracy), "bits": bits,
                                 "accuracy": {f"{n}, k = {k}" if k else n: v for (n, k), v in accuracy.items()},
                                 "staircase": {f"{n}, k = {k}": v for (n, k), v in staircase.items()}}
        print(f"{mode}: {time.time() - start:.0f} s", flush=True)
        for name, values in list(result["modes"][mode]["means"].items()) + list(bits.items()):
            print(f"   {name:24s}", values, flush=True)
        save(result)


def load_builder(tokenizer, corpus):
    builder = data.Builder(tokenizer, corpus)
    held = data.split_prose(corpus)[1]
    builder.held_prose = torch.tensor([t for s in held for t in builder.tokenizer.encode(s) + [0]], dtype=torch.int16).numpy()
    return builder


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--weights", default=".data/run/weights", help="trained weights, an INT8 artifact, or an INT4 artifact (--modes int4)")
    p.add_argument("--corpus", default=".data/corpus")
    p.add_argument("--tokenizer", default=".data/tokenizer.json")
    p.add_argument("--families", default="walk,turn,logic")
    p.add_argument("--modes", default=",".join(MODES))
    p.add_argument("--count", type=int, default=2048, help="questions per difficulty 3 … 6")
    p.add_argument("--chain-count", type=int, help="the same for the chain families; default: --count")
    p.add_argument("--longest", type=int, default=12, help="largest difficulty of walk, turn and logic (trained to 8)")
    p.add_argument("--windows", type=int, default=160, help="windows of 512 tokens for bits per byte")
    p.add_argument("--out", default=".data/run/eval.json")
    p.add_argument("--tables", help="also write the tables as Markdown")
    args = p.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    params, config = store.load(args.weights, device)
    builder = load_builder(args.tokenizer, args.corpus)

    def save(result):
        with open(args.out, "w") as f:
            json.dump(result, f, indent=1)
        if args.tables:
            with open(args.tables, "w") as f:
                f.write(tables(result))
    evaluate(params, config, builder, args.families.split(","), args.count, args.chain_count or args.count, args.longest,
             args.windows, args.modes.split(","), device, save)


if __name__ == "__main__":
    main()
