#!/usr/bin/env python3
"""Lets the trained model talk: story checks against the generator's grammar, strangers' prompts, and the README's digit walk.

    python3 talk.py --weights .data/run/weights --out .data/run/talk.json

Uses the INT8 rounding that is shipped (--mode none|int8|int4 to choose). Runs on a CPU in a few minutes.
"""
import argparse
import json
import random
import time

import torch

import chat
import data
import model
import store
import stories
from tokenizer import ASSISTANT, USER, Tokenizer
from world import ANIMALS, NAMES, THINGS, with_article

STRANGERS = ["Hello!", "hi, who are you?", "What can you do?", "Tell me a story.", "Tell me a story about a dragon and a robot.",
             "What is the capital of France?", "Write a Python function that reverses a string.", "How are you today?",
             "Tell me a joke.", "What is 12 + 30?", "Who won the football match yesterday?", "Explain black holes to a child.",
             "What is a dog?", "Can you write me a poem about the sea?", "I feel sad today.", "Translate 'good morning' to Spanish.",
             "What's the weather like in London?", "Why is the sky blue?", "Give me three tips for a job interview.",
             "Tell me a story about Anna and her cat.", "How many legs does a spider have?", "Is it safe to eat raw eggs?",
             "Who wrote Hamlet?", "asdfgh", "Summarize the plot of Star Wars.", "Thanks, that was nice!", "What is love?",
             "Recommend a good restaurant.", "Do you like music?", "How do I install Linux?"]
WALK = "Start with 4. Add 3. Double it. Take away 5. Add 6. Double it. Take away 1. Keep the last digit."
DEPTHS = (1, 2, 3, 4, 5, 6, 7, 8)
TOGETHER = 500                        # prompts of a batch


def story_prompts(count, r):
    out = []
    for i in range(count):
        if i % 4 == 0:
            out.append(r.choice(chat.PLAIN_ASKS[:8]))
        else:
            topic = (r.choice(NAMES), with_article(r.choice(ANIMALS)), with_article(r.choice(THINGS)))[i % 4 - 1]
            out.append(r.choice(chat.STORY_ASKS).format(topic))
    return out


def distinct_share(texts, n=4):
    """Distinct n-grams of words over all of them: how little the texts repeat each other."""
    grams = [tuple(w[i:i + n]) for t in texts for w in [t.split()] for i in range(len(w) - n + 1)]
    return round(len(set(grams)) / max(1, len(grams)), 3)


def check_stories(told):
    """(sums of stories.check, {plot: stories}, sentences that are not right) of told stories, less what is said before one."""
    total = {"sentences": 0, "parsed": 0, "off_plot": 0, "contradictions": 0}
    plots, bad = {}, []
    for text in told:
        for opening in chat.UNKNOWN_TOPIC:
            head, tail = opening.split("{}")
            if text.startswith(head) and tail.strip() in text:
                text = text.split(tail.strip(), 1)[1].strip()
        checked = stories.check(text)
        for k in total:
            total[k] += checked[k]
        plots[checked["plot"]] = plots.get(checked["plot"], 0) + 1
        bad += checked["bad"]
    return total, plots, bad


def shares(total):
    return {name + " %": round(100 * total[key] / total["sentences"], 2)
            for name, key in (("parsed", "parsed"), ("off plot", "off_plot"), ("contradictions", "contradictions"))}


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--weights", default=".data/run/weights", help="trained weights, or an artifact")
    p.add_argument("--tokenizer", default=".data/tokenizer.json")
    p.add_argument("--mode", default="int8", choices=("none", "int8", "int4"))
    p.add_argument("--stories", type=int, default=200)
    p.add_argument("--depths", default="8", help="depths at which stories are told and checked")
    p.add_argument("--temperature", type=float, default=0.7)
    p.add_argument("--out", default=".data/run/talk.json")
    args = p.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    params, config = store.load(args.weights, device)
    tokenizer = Tokenizer(args.tokenizer)
    weights = {k: v.detach() for k, v in params.items()} if args.mode == "none" else model.quantised(params, args.mode)
    network = model.Network(config, weights, model.rope_table(config, device), args.mode != "none", args.mode != "none")

    def say(prompts, loops, limit=170, temperature=0.0, seed=0):
        out = []
        for at in range(0, len(prompts), TOGETHER):
            ids = [[USER] + tokenizer.encode(t) + [ASSISTANT] for t in prompts[at:at + TOGETHER]]
            out += [tokenizer.decode(o) for o in model.generate(network, ids, loops, limit, temperature, seed + at)]
        return out
    result = {"mode": args.mode, "temperature": args.temperature, "stories": {}}
    walk = [say([WALK], t, 3)[0] for t in DEPTHS]
    result["walk"] = {"prompt": WALK, "answers": dict(zip(DEPTHS, walk))}
    print(WALK, walk, flush=True)
    result["strangers"] = [{"prompt": q, "answer": a} for q, a in zip(STRANGERS, say(STRANGERS, config.default_loops))]
    for e in result["strangers"]:
        print(" >", e["prompt"], "->", e["answer"], flush=True)
    prompts = story_prompts(args.stories, random.Random(20))
    for loops in map(int, args.depths.split(",")):
        start = time.time()
        told = say(prompts, loops, temperature=args.temperature, seed=5)
        total, plots, bad = check_stories(told)
        summary = {"stories": len(told), **total, **shares(total),
                   "distinct 4-grams": distinct_share(told), "plots": plots, "bad": bad[:20],
                   "samples": [{"prompt": q, "story": a} for q, a in zip(prompts[:20], told[:20])]}
        result["stories"][str(loops)] = summary
        print(loops, {k: v for k, v in summary.items() if k != "samples"}, f"{time.time() - start:.0f} s", flush=True)
    with open(args.out, "w") as f:
        json.dump(result, f, indent=1)


if __name__ == "__main__":
    main()
