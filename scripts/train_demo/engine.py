#!/usr/bin/env python3
"""The story check, asked of the C engine: a running daemon per artifact. (Questions: ask.py.)

    python3 engine.py --port 8081 --stories 400 --out told.json
"""
import argparse
import concurrent.futures
import json
import random
import urllib.request

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

    def tell(self, prompts, loops, temperature, seed):
        def one(job):
            number, prompt = job
            reply = self.post("chat/completions", {"messages": [{"role": "user", "content": prompt}], "max_tokens": 170,
                                                   "loops": loops, "temperature": temperature, "seed": seed + number})
            return reply["choices"][0]["message"]["content"]
        with concurrent.futures.ThreadPoolExecutor(TOGETHER) as pool:
            return list(pool.map(one, enumerate(prompts)))


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
    p.add_argument("--loops", type=int, default=8)
    p.add_argument("--stories", type=int, default=400)
    p.add_argument("--temperature", type=float, default=0.7)
    p.add_argument("--seed", type=int, default=31)
    p.add_argument("--out", required=True)
    args = p.parse_args()
    told = told_stories(Engine(args.port, args.model), args.stories, args.loops, args.temperature, args.seed)
    with open(args.out, "w") as f:
        json.dump(told, f, indent=1)


if __name__ == "__main__":
    main()
