#!/usr/bin/env python3
"""evaluate.py's questions and held-out texts, asked of the C engine through tests/ask/ask_driver.c.

    python3 ask.py --write questions.txt
    build/release/tests/ask_driver config/demo-model cuda 0 1,2,3,4,6,8,12,16 0 <questions.txt >int8.txt     # of each artifact
    python3 ask.py --replies none=f32.txt int8=int8.txt int4=int4.txt --out ask.json

The F32 artifact comes from export.py --float. Replies of one artifact may lie in several files, and may be of a part of the
questions: what is compared at a depth are the questions that every artifact has answered there. The questions are mixed, so
that a part holds all of their kinds.
"""
import argparse
import json
import math
import random

import torch

import evaluate
import stories
import tasks


def cells_of(builder, families, count, chain_count, r):
    """{(family, k): rows} in evaluate.py's draws, of what counts towards a family's mean."""
    cells = evaluate.task_cells(builder, families, count, chain_count, 12, r)
    cells.update(evaluate.text_cells(builder, count * len(evaluate.CORE_STEPS), r))
    return {(f, k): rows for (f, k), rows in cells.items() if k in evaluate.CORE_STEPS or f not in tasks.FAMILIES}


def windows_of(builder, count, r, length=512):
    """{(text, ""): [ids]}: windows spread over the held-out prose, and as many of stories."""
    told = []
    while len(told) < count * length:
        told += builder.text(stories.tell(r)[3]) + [0]
    prose = builder.held_prose
    step = max(1, len(prose) // length // count)
    starts = range(0, len(prose) // length * length, step * length)
    return {("stories", ""): [told[i * length:(i + 1) * length] for i in range(count)],
            ("prose", ""): [prose[a:a + length].tolist() for a in starts][:count]}


def collect(builder, families, count, chain_count, windows, only=None, seed=777):
    """[(family or text, k, ids, expected answer or None)], mixed; a question's number is its place."""
    r = random.Random(seed)
    cells = cells_of(builder, families, count, chain_count, r)
    out = [(f, k, ids, answer) for (f, k), rows in cells.items() for ids, answer, _ in rows]
    out += [(name, k, ids, None) for (name, k), rows in windows_of(builder, windows, r).items() for ids in rows]
    out = [question for question in out if only in (None, question[0])]
    random.Random(seed).shuffle(out)
    return out


def read_replies(paths):
    """{depth: {number: reply}}"""
    out = {}
    for path in paths:
        with open(path) as f:
            depths = list(map(int, f.readline().split()))
            for line in f:
                number, *replies = line.split()
                if len(replies) == len(depths) and line.endswith("\n"):
                    for depth, reply in zip(depths, replies):
                        out.setdefault(depth, {})[int(number)] = reply
    return out


def mean_over_k(right, numbers, asked):
    """A family's accuracy in percent: the mean over its difficulties."""
    cells = {}
    for n in numbers:
        cells.setdefault(asked[n][1], []).append(n in right)
    return 100 * sum(sum(c) / len(c) for c in cells.values()) / len(cells)


def score(asked, modes, byte_counts):
    """{depth: {family: {"asked": n, mode: percent}, text: {"asked": windows, mode: bits per byte}}}"""
    result = {}
    for depth in sorted(set.intersection(*(set(m) for m in modes.values()))):
        common = set.intersection(*(set(m[depth]) for m in modes.values()))
        groups = {}
        for n in sorted(common):
            groups.setdefault(asked[n][0], []).append(n)
        result[depth] = {name: {"asked": len(numbers)} for name, numbers in groups.items()}
        for name, numbers in groups.items():
            size = sum(int(byte_counts[torch.tensor(asked[n][2][1:])].sum()) for n in numbers if asked[n][3] is None)
            for mode, replies in modes.items():
                said = replies[depth]
                if size:
                    value = sum(float(said[n]) for n in numbers) / math.log(2) / size
                else:
                    value = mean_over_k({n for n in numbers if said[n] == ",".join(map(str, asked[n][3]))}, numbers, asked)
                result[depth][name][mode] = round(value, 5)
    return result


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--corpus", default=".data/corpus")
    p.add_argument("--tokenizer", default="config/demo-model/tokenizer.json")
    p.add_argument("--families", default="walk,turn,logic,variables,nest,hand")
    p.add_argument("--count", type=int, default=2048, help="questions per difficulty 3 … 6")
    p.add_argument("--chain-count", type=int, help="the same for the chain families; default: --count")
    p.add_argument("--only", help="this family alone, in the same draws")
    p.add_argument("--windows", type=int, default=96, help="windows of 512 tokens of each text")
    p.add_argument("--write", help="file for the questions")
    p.add_argument("--replies", nargs="+", default=[], help="MODE=FILE[,FILE...]: what the driver answered")
    p.add_argument("--out", help="file for the figures of --replies")
    args = p.parse_args()
    builder = evaluate.load_builder(args.tokenizer, args.corpus)
    asked = collect(builder, args.families.split(","), args.count, args.chain_count or args.count, args.windows, args.only)
    if args.write:
        with open(args.write, "w") as f:
            for number, (_, _, ids, answer) in enumerate(asked):
                f.write(" ".join(map(str, [number, *ids] + (["|", *answer] if answer else []))) + "\n")
    if args.replies:
        byte_counts = torch.tensor([len(builder.tokenizer.decode([i]).encode("utf-8")) if i > 7 else 0
                                    for i in range(len(builder.tokenizer.vocabulary))])
        modes = {mode: read_replies(files.split(",")) for mode, files in (r.split("=") for r in args.replies)}
        result = score(asked, modes, byte_counts)
        for depth, groups in result.items():
            print(depth, "loops")
            for name, values in groups.items():
                print(f"   {name:24s}", values)
        if args.out:
            with open(args.out, "w") as f:
                json.dump(result, f)


if __name__ == "__main__":
    main()
