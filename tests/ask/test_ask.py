#!/usr/bin/env python3
"""tests/ask/test_ask.py - ask_driver answers as the engine does: a depth on the way to deeper ones, questions that share a call
and a text in pieces give what tl_logits() gives of each alone; and what is no question is refused.

usage: test_ask.py [--bin build/release/tinyloop] [--drivers build/test/tests]      Ends with "N passed, N failed".
"""
import argparse
import json
import pathlib
import random
import subprocess
import sys
import tempfile

import numpy as np

LOOPS = (1, 2, 3, 4)
REFUSED = {
    "0 1 2 | 5 x\n": "x is not a token id",
    "7 3\n": "line 7 has 1 tokens, of them 0 of a prompt",
    "7 3 |\n": "line 7 has 1 tokens, of them 1 of a prompt",
    "0 1 300 | 3\n": "token 1 is 300, the vocabulary has ids 0 to 299",
    "0 1 -2 | 3\n": "token 1 is -2, the vocabulary has ids 0 to 299",
    "0" + " 1" * 3000 + " | 3\n": "a question has 3000 tokens, the limit is 2048",
}
passed = failed = 0


def check(good, what):
    global passed, failed
    passed, failed = passed + bool(good), failed + (not good)
    if not good:
        print(f"FAILED {what}")


def ask(driver, model, loops, text):
    return subprocess.run([driver, model, "cpu", "2", ",".join(map(str, loops)), "0"], input=text, capture_output=True, text=True,
                          timeout=60)


def expected(logits, ids, asked):
    """The answer to a question or text by the logits of its tokens."""
    z = np.array(logits, dtype=np.float64)
    if asked:
        return z[asked - 1:].argmax(-1).tolist()
    z = z[:-1] - z[:-1].max(-1, keepdims=True)
    return float((np.log(np.exp(z).sum(-1)) - z[np.arange(len(z)), ids[1:]]).sum())


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--bin", default="build/release/tinyloop")
    p.add_argument("--drivers", default="build/test/tests")
    args = p.parse_args()
    driver = args.drivers + "/ask_driver"
    with tempfile.TemporaryDirectory() as tmp:
        model = str(pathlib.Path(tmp, "tiny"))
        subprocess.run([args.bin, "synth", "--preset", "tiny", "--to", "int8", "--out", model], check=True, capture_output=True)
        r, questions = random.Random(5), []
        for n in (1, 30, 90, 200, 3, 64, 65, 250, 2):     # together more rows than a step of 256
            questions.append(([r.randrange(300) for _ in range(n)], [r.randrange(300) for _ in range(r.randrange(1, 5))]))
        questions += [([r.randrange(300) for _ in range(n)], None) for n in (2, 150, 300)]
        text = "".join(" ".join(map(str, [7 * i, *ids] + (["|", *answer] if answer else []))) + "\n"
                       for i, (ids, answer) in enumerate(questions))
        reply = ask(driver, model, LOOPS, text)
        lines = reply.stdout.splitlines()
        check(reply.returncode == 0 and lines[:1] == [" ".join(map(str, LOOPS))] and len(lines) == len(questions) + 1, reply)
        for i, ((ids, answer), line) in enumerate(zip(questions, lines[1:])):
            number, *said = line.split()
            fed = ids + (answer or [])[:-1]
            check(int(number) == 7 * i and len(said) == len(LOOPS), line)
            for loops, value in zip(LOOPS, said):
                alone = subprocess.run([args.drivers + "/vectors_driver", model, str(loops), "-", "0", *map(str, fed)],
                                       capture_output=True, text=True, timeout=60)
                want = expected(json.loads(alone.stdout)["logits"], fed, len(ids) if answer else 0)
                same = list(map(int, value.split(","))) == want if answer else abs(float(value) - want) < 1e-5 * len(fed)
                check(same, f"question {i} of {len(fed)} tokens at {loops} loops: {value}, expected {want}")
        for text, why in REFUSED.items():
            reply = ask(driver, model, LOOPS, "3 1 | 2\n" + text)
            check(reply.returncode == 1 and why in reply.stderr, (text[:40], reply.returncode, reply.stderr))
        for loops in ((2, 2), (0, 1), (1, 99)):
            reply = ask(driver, model, loops, "3 1 | 2\n")
            check(reply.returncode == 1 and "they must rise" in reply.stderr, (loops, reply.stderr))
    print(f"{passed} passed, {failed} failed")
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
