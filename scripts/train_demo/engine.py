#!/usr/bin/env python3
"""The evaluation's questions and the story check, asked of the C engine: a running daemon per artifact.

    python3 engine.py --port 8081 --count 64 --loops 1,8 --out int8.json      # accuracy of each family at each depth
    python3 engine.py --port 8081 --stories 400 --out told.json               # stories, checked

Run it for the INT8, the INT4 and the F32 artifact (export.py --float) and compare: the questions are the same each time.
"""
import argparse
import concurrent.futures
import json
import random
import urllib.request

import data
import evaluate
import talk

TOGETHER = 64                         # requests under way


class Engine:
    def __init__(self, port, model):
        self.url, self.model = f"http://127.0.0.1:{port}/v1/", model

    def post(self, path, body):
        request = urllib.request.Request(self.url + path, json.dumps({"model": self.model, **body}).encode(),
                                         {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=600) as reply:
            return json.load(reply)

    def answers(self, prompts, lengths, loops):
        """Greedy tokens after prompts of token ids, as many as `lengths` says."""
        def one(job):
            ids, n = job
            reply = self.post("completions", {"prompt": ids, "max_tokens": n, "ignore_eos": True, "temperature": 0, "loops": loops,
                                              "return_tokens": True})
            return reply["choices"][0]["tokens"]
        with concurrent.futures.ThreadPoolExecutor(TOGETHER) as pool:
            return list(pool.map(one, zip(prompts, lengths)))

    def tell(self, prompts, loops, temperature, seed):
        def one(job):
            number, prompt = job
            reply = self.post("chat/completions", {"messages": [{"role": "user", "content": prompt}], "max_tokens": 170,
                                                   "loops": loops, "temperature": temperature, "seed": seed + number})
            return reply["choices"][0]["message"]["content"]
        with concurrent.futures.ThreadPoolExecutor(TOGETHER) as pool:
            return list(pool.map(one, enumerate(prompts)))


def accuracies(engine, builder, families, count, depths, seed):
    """{depth: {family: [right, asked]}}"""
    r, out = random.Random(seed), {}
    cells = {key: rows for key, rows in evaluate.task_cells(builder, families, count, count, evaluate.CORE_STEPS[-1], r).items()
             if key[1] in evaluate.CORE_STEPS or key[0] not in families}
    cells.update(evaluate.text_cells(builder, count * len(evaluate.CORE_STEPS), r))
    for loops in depths:
        score = out[loops] = {}
        for (family, _), rows in cells.items():
            said = engine.answers([row[0] for row in rows], [len(row[1]) for row in rows], loops)
            right, asked = score.get(family, (0, 0))
            score[family] = (right + sum(s == row[1] for s, row in zip(said, rows)), asked + len(rows))
        print(loops, {f: f"{100 * right / asked:.2f} % of {asked}" for f, (right, asked) in score.items()}, flush=True)
    return out


def told_stories(engine, count, loops, temperature, seed):
    prompts = talk.story_prompts(count, random.Random(seed))
    told = engine.tell(prompts, loops, temperature, 1000 * seed)
    total, plots, bad = talk.check_stories(told)
    total.update(talk.shares(total), stories=count, plots=plots, bad=bad)
    print({k: v for k, v in total.items() if k != "bad"}, flush=True)
    return {**total, "told": [{"prompt": p, "story": s} for p, s in zip(prompts, told)]}


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--port", type=int, default=8080)
    p.add_argument("--model", default="demo-model", help="its name in requests")
    p.add_argument("--corpus", default=".data/corpus")
    p.add_argument("--tokenizer", default="config/demo-model/tokenizer.json")
    p.add_argument("--families", default="walk,turn,logic,variables,nest,hand")
    p.add_argument("--count", type=int, default=0, help="questions per difficulty 3 … 6")
    p.add_argument("--loops", default="8", help="depths of the questions; stories are told at the first")
    p.add_argument("--stories", type=int, default=0)
    p.add_argument("--temperature", type=float, default=0.7)
    p.add_argument("--seed", type=int, default=31)
    p.add_argument("--out", required=True)
    args = p.parse_args()
    engine, depths, result = Engine(args.port, args.model), list(map(int, args.loops.split(","))), {}
    if args.count:
        builder = data.Builder(args.tokenizer, args.corpus)
        result["accuracy"] = accuracies(engine, builder, args.families.split(","), args.count, depths, args.seed)
    if args.stories:
        result["stories"] = told_stories(engine, args.stories, depths[0], args.temperature, args.seed)
    with open(args.out, "w") as f:
        json.dump(result, f, indent=1)


if __name__ == "__main__":
    main()
