#!/usr/bin/env python3
"""Puts the measured figures into MODEL_CARD.md: replaces what stands between "<!-- NAME -->" and "<!-- /NAME -->".

    cd .data/run; python3 ../../scripts/train_demo/card.py --card ../../config/demo-model/MODEL_CARD.md \\
        --eval int8.json none.json int4.json --again hand.json --engine first.json second.json --part part.json \\
        --talk talk-int8.json talk-int4.json

The first --talk file gives the samples and the strangers' answers; --again takes a second, larger sample of chains
(evaluate.py --families hand --chain-count …). --engine takes what ask.py made of the C engine's INT8 and INT4 answers to the
questions of --eval and of --again: by them, against F32 there, the bars are judged, a family by both samples together. --part
is what ask.py made of the questions and texts that the C engine answered in F32 as well. The figures go into eval.json too,
whose other members stay.
"""
import argparse
import json
import os

import evaluate
import tasks

LABELS = {"none": "F32", "int8": "INT8", "int4": "INT4"}
AT = {loops: i for i, loops in enumerate(evaluate.LOOPS)}
CHAINS = ("variables", "nest", "hand")


def put(card, name, text):
    before, rest = card.split(f"<!-- {name} -->", 1)
    _, after = rest.split(f"<!-- /{name} -->", 1)
    return f"{before}<!-- {name} -->\n\n{text.strip()}\n\n<!-- /{name} -->{after}"


def worst_changes(modes, mode, kind):
    """{family or text: the worst change against F32 over all depths}"""
    worst = min if kind == "means" else max
    return {name: worst(q - f for q, f in zip(modes[mode][kind][name], values)) for name, values in modes["none"][kind].items()
            if name in modes[mode][kind]}


def together(samples, floats):
    """ask.py's files of INT8 and INT4 as one, with F32 from evaluate.py's means: {depth: {family: figures}}, weighed by questions."""
    out = {}
    for sample, means in zip(samples, floats):
        for depth, groups in ((int(depth), groups) for depth, groups in sample.items()):
            for name in (n for n in groups if n in means):
                new = {**groups[name], "none": means[name][AT[depth]]}
                old = out.setdefault(depth, {}).get(name, {"asked": 0})
                asked = old["asked"] + new["asked"]
                out[depth][name] = {"asked": asked, **{m: (old["asked"] * old.get(m, 0) + new["asked"] * new[m]) / asked
                                                       for m in LABELS}}
    return out


def engine_changes(engine, mode, names, worst):
    """{family or text: (the worst change against F32, at which depth)}"""
    return {name: worst((round(groups[name][mode] - groups[name]["none"], 5), depth) for depth, groups in engine.items() if name in groups)
            for name in names}


def engine_table(engine, part, families, texts, depth=8):
    def changes(figures, name, worst, form):
        found = [engine_changes(figures, m, [name], worst)[name] for m in ("int8", "int4")]
        return [format(change, form) + f" ({at})" for change, at in found]
    out = (f"| {depth} loops; worst change against F32, and at how many loops | asked | F32 | INT8 | INT4 | INT8 worst | INT4 worst | " +
           "F32 in C asked | INT8 worst | INT4 worst |\n|---|" + "--:|" * 9 + "\n")
    for name in families:
        at = engine[depth][name]
        out += "| " + " | ".join([f"{name}, %", f"{at['asked']:,}", *(f"{at[m]:.2f}" for m in LABELS), *changes(engine, name, min, "+z.2f"),
                                  f"{part[depth][name]['asked']:,}", *changes(part, name, min, "+z.2f")]) + " |\n"
    out += "\n| bits per byte, F32 in C | windows | F32 | INT8 | INT4 | INT8 worst | INT4 worst |\n|---|" + "--:|" * 6 + "\n"
    for name in texts:
        at = part[depth][name]
        out += "| " + " | ".join([name, str(at["asked"]), *(f"{at[m]:.4f}" for m in LABELS), *changes(part, name, max, "+z.4f")]) + " |\n"
    return out


def quantisation_table(modes, again):
    columns = [(LABELS[m], modes, m) for m in ("int8", "int4") if m in modes]
    columns += [(LABELS[m] + ", second sample", again, m) for m in again if m != "none"]
    out = "| against F32, worst over all depths | " + " | ".join(label for label, _, _ in columns) + " |\n"
    out += "|---|" + "--:|" * len(columns) + "\n"
    for kind, unit, form in (("means", "points", "+.2f"), ("bits", "bits per byte", "+.4f")):
        changes = [worst_changes(measured, m, kind) for _, measured, m in columns]
        for name in modes["none"][kind]:
            out += f"| {name}, {unit} | " + " | ".join(format(c[name], form) if name in c else "" for c in changes) + " |\n"
    return out


def rise(values):
    """The most by which a deeper value lies above a shallower one."""
    return max(deep - shallow for i, shallow in enumerate(values) for deep in values[i + 1:])


def bars(modes, engine, part, talks):
    """Every bar, what was measured, and whether that meets it."""
    rounded, rows = ("int8", "int4"), []
    told = {m: next(iter(talks[m]["stories"].values())) for m in rounded}

    def mean(m, family, loops):
        return modes[m]["means"][family][AT[loops]]

    def cell(m, family, k, loops=8):
        return modes[m]["accuracy"][f"{family}, k = {k}"][AT[loops]]

    def bar(text, measured, met):
        rows.append((text, measured, {True: "met", False: "**not met**"}.get(met, met)))

    def both(text, figure, form, unit, meets):
        values = [figure(m) for m in rounded]
        bar(text, " and ".join(format(v, form) for v in values) + unit, all(map(meets, values)))
    both("walk, k 3-6: at least 85 % at 8 loops", lambda m: mean(m, "walk", 8), ".1f", " %", lambda v: v >= 85)
    both("walk, k 3-6: at most 25 % at 1 loop", lambda m: mean(m, "walk", 1), ".1f", " %", lambda v: v <= 25)
    gains = {f: min(mean(m, f, 8) - mean(m, f, 1) for m in rounded) for f in ("turn", "logic", *CHAINS)}
    bar("a further family gains 40 points from 1 to 8 loops", ", ".join(f"{f} {g:+.1f}" for f, g in gains.items()),
        max(gains.values()) >= 40)
    both("16 loops lose at most 3 points against 8, worst family",
         lambda m: min([mean(m, f, 16) - mean(m, f, 8) for f in modes[m]["means"]] + [cell(m, "walk", 8, 16) - cell(m, "walk", 8)]),
         "+.2f", "", lambda v: v >= -3)
    both("aim: walk, k = 8, at 90 %", lambda m: cell(m, "walk", 8), ".1f", " %", lambda v: v >= 90)
    hops = {k: [min(cell(m, f, k) for m in rounded) for f in CHAINS] for k in (2, 3, 4, 5)}
    reached = max([k for k, shares in hops.items() if min(shares) >= 90], default=1)
    bar("aim: chains (variables, nest, hand) of two and more hops",
        "; ".join(f"{k} hops " + ", ".join(f"{v:.0f}" for v in shares) + " %" for k, shares in hops.items()),
        f"met to {reached} hops")
    rises = {t: max(rise(modes[m]["bits"][t]) for m in modes) for t in modes["none"]["bits"]}
    bar("bits per byte rise with loops by at most 0.005 (worst of F32, INT8, INT4)",
        ", ".join(f"{t} {v:+.4f}" for t, v in rises.items()), max(rises.values()) <= 0.005)
    for mode, points, bits in (("int8", 0.3, 0.003), ("int4", 1, 0.006)):
        lost = {f: v for f, (v, _) in engine_changes(engine, mode, modes["none"]["means"], min).items()}
        over = [f for f, v in lost.items() if v < -points - 1e-9]
        least = min((f for f in lost if f not in over), key=lost.get)
        said = [f"{f} {lost[f]:+.2f}" for f in over]
        said.append(f"worst of the others {lost[least]:+.2f} ({least})" if over else f"worst {lost[least]:+.2f} ({least})")
        bar(f"{LABELS[mode]} (C engine) against F32 at every depth, points of a family's mean: at most {points}", "; ".join(said),
            not over)
        more = {t: v for t, (v, _) in engine_changes(part, mode, modes["none"]["bits"], max).items()}
        bar(f"{LABELS[mode]} (C engine) against F32 at every depth, bits per byte: at most {bits}",
            ", ".join(f"{t} {v:+.4f}" for t, v in more.items()), max(more.values()) <= bits)
    both("story sentences that parse: at least 95 %", lambda m: told[m]["parsed %"], ".2f", " %", lambda v: v >= 95)
    both("contradictions: at most 2 % of sentences", lambda m: told[m]["contradictions %"], ".2f", " %", lambda v: v <= 2)
    both("plots: at least 20", lambda m: len(told[m]["plots"]), "d", "", lambda v: v >= 20)
    return ("| bar | measured (INT8 and INT4, at 8 loops unless said) | |\n|---|---|---|\n" +
            "".join("| " + " | ".join(row) + " |\n" for row in rows))


def story_table(talks):
    rows = ("| rounding | loops | stories | sentences | parsed % | off plot % | contradictions % | distinct 4-grams | plots |\n|---|" +
            "--:|" * 8 + "\n")
    for mode, talk in talks.items():
        for loops, s in talk["stories"].items():
            rows += (f"| {LABELS[mode]} | {loops} | {s['stories']} | {s['sentences']} | {s['parsed %']:.2f} | {s['off plot %']:.2f} | "
                     f"{s['contradictions %']:.2f} | {s['distinct 4-grams']} | {len(s['plots'])} |\n")
    return rows


def read(path):
    with open(path) as f:
        return json.load(f)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--eval", nargs="+", required=True, help="files of evaluate.py; their modes (F32, INT8 and INT4) are put together")
    p.add_argument("--again", help="a file of evaluate.py whose chain families are a second sample")
    p.add_argument("--engine", nargs="+", required=True, help="files of ask.py, INT8 and INT4: the questions of --eval, and of --again")
    p.add_argument("--part", required=True, help="a file of ask.py with F32 as well, of some of the questions")
    p.add_argument("--talk", nargs="+", required=True, help="files of talk.py, one of INT8 and one of INT4")
    p.add_argument("--card", default="config/demo-model/MODEL_CARD.md")
    args = p.parse_args()
    parts = [read(path) for path in args.eval]
    modes = {m: figures for part in parts for m, figures in part["modes"].items()}
    again = {m: {"means": {f: v for f, v in figures["means"].items() if f.split(",")[0] in tasks.FAMILIES}, "bits": {}}
             for m, figures in read(args.again)["modes"].items()} if args.again else {}
    talks = {talk["mode"]: talk for talk in map(read, args.talk)}
    first = next(iter(talks.values()))
    with open(args.card) as f:
        card = f.read()
    samples = [read(path) for path in args.engine]
    part = {int(depth): groups for depth, groups in read(args.part).items()}
    engine = together(samples, [m["none"]["means"] for m in (modes, again) if m])
    card = put(card, "bars", bars(modes, engine, part, talks))
    card = put(card, "tables", evaluate.tables({"modes": modes}))
    card = put(card, "quantisation", quantisation_table(modes, again))
    card = put(card, "engine", engine_table(engine, part, modes["none"]["means"], modes["none"]["bits"]))
    walk = first["walk"]
    card = put(card, "walk", f"`{walk['prompt']}`\n\n| loops | " + " | ".join(walk["answers"]) + " |\n|---|" +
               "--:|" * len(walk["answers"]) + "\n| answer | " + " | ".join(walk["answers"].values()) + " |")
    card = put(card, "stories", story_table(talks))
    told = next(iter(first["stories"].values()))["samples"]
    card = put(card, "samples", "\n".join(f"{i}. *{s['prompt']}* {s['story']}" for i, s in enumerate(told, 1)))
    card = put(card, "strangers", "\n".join(f"- *{s['prompt']}* {s['answer']}" for s in first["strangers"]))
    with open(args.card, "w") as f:
        f.write(card)
    path = os.path.join(os.path.dirname(args.card), "eval.json")
    figures = read(path) if os.path.exists(path) else {}
    figures.update({k: v for k, v in parts[0].items() if k != "modes"}, modes=modes, engine={"samples": samples, "with_f32": part},
                   second_sample={m: v["means"] for m, v in again.items()},
                   stories={m: {loops: {k: v for k, v in s.items() if k != "samples"} for loops, s in talk["stories"].items()}
                            for m, talk in talks.items()})
    with open(path, "w") as f:
        json.dump(figures, f, separators=(",", ":"))


if __name__ == "__main__":
    main()
