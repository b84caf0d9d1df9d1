#!/usr/bin/env python3
"""tests/quantize/test_calibrate.py - `tinyloop quantize --calibrate` changes the rounding and nothing else.

  1. Every structure that there is a tiny preset of, converted to F32 with and without calibrating: other weights, the same
     logits. A scale that is not undone at the other end would show at once.
  2. A model with one channel far larger than the rest, as trained models have them: INT8 comes much closer to F32.
  3. INT4, whose rounding makes errors good, comes closer to F32 than plain INT4, and is the same every time.
  4. What is refused, and that no copy is left behind.

usage: test_calibrate.py [--bin build/release/tinyloop]      Ends with "N passed, N failed".
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "http"), str(ROOT / "tests" / "vectors")]
import artifacts  # noqa: E402
import reference  # noqa: E402
import tinymodel  # noqa: E402

PRESETS = ("tiny", "tiny-plain", "tiny-diag", "tiny-parcae", "tiny-ouro", "tiny-huginn", "tiny-retrofit-llama", "tiny-retrofit-olmo",
           "tiny-nanbeige", "tiny-llama", "tiny-qwen2", "tiny-qwen3")
TOKENS = [5, 9, 200, 33, 71, 71, 4, 250, 18, 99, 140, 7]
TEXT = "The small dog ran to the old house, and nobody was in. " * 12


class Tally:
    passed = failed = 0

    def __call__(self, good, what):
        self.passed, self.failed = self.passed + bool(good), self.failed + (not good)
        if not good:
            print(f"FAILED {what}")


def call(*command):
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=120)


def logits(program, model):
    done = call(program, "logits", "--model", model, "--tokens", ",".join(map(str, TOKENS)), "--rows", len(TOKENS), "--json")
    if done.returncode:
        raise RuntimeError(done.stderr)
    return np.array(json.loads(done.stdout)["rows"])


def quantize(program, model, out, kind, *options):
    done = call(program, "quantize", "--model", model, "--to", kind, "--out", out, "--quiet", *options)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return out


def error(got, want):
    return float(np.abs(got - want).max() / max(1.0, np.abs(want).max()))


def check_structures(check, program, folder, text):
    for preset in PRESETS:
        model = folder / preset
        call(program, "synth", "--preset", preset, "--to", "f32", "--layout", "released", "--out", model)
        (model / "tokenizer.json").write_text(json.dumps(tinymodel.tokenizer_json()))
        want = logits(program, model)
        plain = quantize(program, model, folder / f"{preset}-plain", "f32")
        for options in ((), ("--own-head",)):
            out = quantize(program, model, folder / f"{preset}-calibrated{len(options)}", "f32", "--calibrate", text, *options)
            # Two ways of rounding the same sums in F32; Huginn's random weights magnify that.
            off = error(logits(program, out), want)
            check(off < (3e-4 if preset == "tiny-huginn" else 2e-5), f"{preset} {options}: other logits, by {off:.1e}")
            a, b = (reference.read_tensors(m) for m in (plain, out))
            moved = [n for n in a if not np.array_equal(a[n][1], b[n][1])]
            check(any("attn.v." in n for n in moved) and any("mlp.down." in n for n in moved), f"{preset}: nothing has moved")
            check(any(n.endswith("n1.weight") for n in moved) == (preset != "tiny-retrofit-olmo"), f"{preset}: norms {moved[:4]}")


def check_large_channel(check, program, folder, text):
    """One channel of the stream is 30 times the others in all rows, as the norm in front of qkv and up sees it."""
    model = folder / "large"
    artifacts.make(str(model), "f32", 3, vocab_size=300, tie_word_embeddings=True)
    (model / "tokenizer.json").write_text(json.dumps(tinymodel.tokenizer_json()))
    tensors = {n: raw.copy() for n, (_, raw) in reference.read_tensors(str(model)).items()}
    for name, a in tensors.items():
        if name.endswith(("n1.weight", "n4.weight")):
            a[7] *= 30
        elif ".attn.q." in name or ".attn.k." in name or ".attn.v." in name or ".mlp.gate." in name or ".mlp.up." in name:
            a[:, 7] /= 30
        elif name.endswith("final_norm.weight"):
            a[7] *= 30
    tensors["model.embed_tokens.weight"][:, 7] /= 30
    artifacts.write_safetensors(str(model / "model.safetensors"), tensors)
    want = logits(program, model)

    def off(name, *options):
        got = logits(program, quantize(program, model, folder / name, "int8", *options))
        return float(np.sqrt(((got - want) ** 2).mean() / (want**2).mean()))

    plain, better, best = off("large-int8"), off("large-better", "--calibrate", text), off("large-best", "--calibrate", text, "--own-head")
    check(better < 0.9 * plain, f"calibrated, the head as it was: off by {better:.4f}, plainly by {plain:.4f}")
    check(best < 0.4 * plain, f"calibrated with a head of its own: off by {best:.4f}, plainly by {plain:.4f}")
    again = quantize(program, model, folder / "again", "int8", "--calibrate", text, "--own-head")
    check((again / "model.safetensors").read_bytes() == (folder / "large-best" / "model.safetensors").read_bytes(), "two runs differ")


def check_int4(check, program, folder):
    """Calibrated on one text, measured on another of the same words."""
    rng = np.random.default_rng(5)
    words = ["".join(rng.choice(list("etaoinshrdlu"), rng.integers(2, 8))) for _ in range(60)]
    text, other = folder / "words.txt", folder / "other.txt"
    text.write_text(" ".join(rng.choice(words, 1500)))
    other.write_text(" ".join(rng.choice(words, 100)))
    gains = []
    for preset in PRESETS[::2]:
        model = folder / preset

        def divergence(name, *options):
            done = call(program, "quantize", "--model", model, "--to", "int4", "--out", folder / f"{preset}-{name}", "--text", other,
                        "--loops", "1", *options)
            return float(done.stdout.split()[-1])  # the last figure of the report

        gains.append(divergence("int4") / divergence("int4-better", "--calibrate", text))
        if preset == "tiny-ouro":
            again = quantize(program, model, folder / "int4-again", "int4", "--calibrate", text)
            first = folder / f"{preset}-int4-better"
            check((again / "model.safetensors").read_bytes() == (first / "model.safetensors").read_bytes(), "two INT4 runs differ")
    mean = float(np.exp(np.mean(np.log(gains))))
    check(min(gains) > 1.1 and mean > 1.6, f"calibrated, INT4 is {mean:.2f} times as close as plainly: " + ", ".join(f"{g:.2f}" for g in gains))


def check_refusals(check, program, folder, text):
    def refused(what, code, sentence, *options, model="tiny"):
        done = call(program, "quantize", "--model", folder / model, "--out", folder / "never", "--quiet", *options)
        check(done.returncode == code and sentence in done.stderr, f"{what}: exit {done.returncode}, {done.stderr}")

    (folder / "empty.txt").write_text("")
    refused("no such text", 2, "cannot be read", "--calibrate", folder / "nowhere.txt")
    refused("an empty text", 1, "0 tokens", "--calibrate", folder / "empty.txt")
    (folder / "tiny" / "tokenizer.json").unlink()
    refused("no tokenizer", 1, "no tokenizer", "--calibrate", text)
    check(not list(folder.glob("never*")), f"left behind: {list(folder.glob('never*'))}")


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--bin", default=ROOT / "build/release/tinyloop", type=pathlib.Path)
    a = p.parse_args()
    check = Tally()
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        text = folder / "text.txt"
        text.write_text(TEXT)
        check_structures(check, a.bin, folder, text)
        check_large_channel(check, a.bin, folder, text)
        check_int4(check, a.bin, folder)
        check_refusals(check, a.bin, folder, text)
    print(f"{check.passed} passed, {check.failed} failed")
    return check.failed > 0


if __name__ == "__main__":
    sys.exit(main())
