#!/usr/bin/env python3
"""Puts the measured tables into MODEL_CARD.md: replaces what stands between "<!-- NAME -->" and "<!-- /NAME -->".

    python3 card.py --eval .data/run/int8.json .data/run/none.json .data/run/int4.json --talk .data/run/talk.json --card config/demo-model/MODEL_CARD.md
"""
import argparse
import json

import evaluate


def put(card, name, text):
    before, rest = card.split(f"<!-- {name} -->", 1)
    _, after = rest.split(f"<!-- /{name} -->", 1)
    return f"{before}<!-- {name} -->\n\n{text.strip()}\n\n<!-- /{name} -->{after}"


def quantisation_table(modes):
    """Worst change against F32 over all depths, per family mean and text, of the roundings that were measured."""
    floats, rounded = modes["none"], [m for m in ("int8", "int4") if m in modes]
    out = "| against F32, worst over all depths | " + " | ".join(map(str.upper, rounded)) + " |\n|---|" + "--:|" * len(rounded) + "\n"
    for kind, worst, unit, form in (("means", min, "points", "+.2f"), ("bits", max, "bits per byte", "+.4f")):
        for name, values in floats[kind].items():
            changes = [worst(q - f for q, f in zip(modes[m][kind][name], values)) for m in rounded]
            out += f"| {name}, {unit} | " + " | ".join(format(c, form) for c in changes) + " |\n"
    return out


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--eval", nargs="+", default=[".data/run/eval.json"], help="files of evaluate.py; their modes are put together")
    p.add_argument("--talk", default=".data/run/talk.json")
    p.add_argument("--card", default="config/demo-model/MODEL_CARD.md")
    args = p.parse_args()
    measured = {"modes": {}}
    for path in args.eval:
        with open(path) as f:
            part = json.load(f)
        measured = {**part, "modes": {**measured["modes"], **part["modes"]}}
    with open(args.talk) as f:
        talk = json.load(f)
    with open(args.card) as f:
        card = f.read()
    card = put(card, "tables", evaluate.tables(measured))
    card = put(card, "quantisation", quantisation_table(measured["modes"]))
    walk = talk["walk"]
    card = put(card, "walk", f"`{walk['prompt']}`\n\n| loops | " + " | ".join(walk["answers"]) + " |\n|---|" +
               "--:|" * len(walk["answers"]) + "\n| answer | " + " | ".join(walk["answers"].values()) + " |")
    rows = "| loops | stories | sentences | parsed % | off plot % | contradictions % | distinct 4-grams | plots |\n" + "|--:" * 8 + "|\n"
    for loops, s in talk["stories"].items():
        rows += (f"| {loops} | {s['stories']} | {s['sentences']} | {s['parsed %']} | {s['off plot %']} | {s['contradictions %']} | "
                 f"{s['distinct 4-grams']} | {len(s['plots'])} |\n")
    card = put(card, "stories", rows)
    deepest = list(talk["stories"].values())[0]
    card = put(card, "samples", "\n".join(f"{i}. *{s['prompt']}* {s['story']}" for i, s in enumerate(deepest["samples"], 1)))
    card = put(card, "strangers", "\n".join(f"- *{s['prompt']}* {s['answer']}" for s in talk["strangers"]))
    with open(args.card, "w") as f:
        f.write(card)


if __name__ == "__main__":
    main()
