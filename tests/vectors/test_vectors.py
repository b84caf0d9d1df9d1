#!/usr/bin/env python3
"""tests/vectors/test_vectors.py - is what the engine computes right?

  1. reference.py against golden logits: every golden.json in the golden folder.
  2. The engine against reference.py: small random models, every value of every knob, F32, BF16, INT8 and INT4.
  3. The engine against the golden models.
  4. `tinyloop generate`: greedy tokens, made one by one over the KV store, are the reference's best ones.
  5. `tinyloop quantize` on the golden models: the converted model is the same model, and the engine runs it right.

usage: test_vectors.py [--bin build/release/tinyloop] [--driver build/test/tests/vectors_driver] [--golden DIR]
                       [--device NAME] [--jobs N] [--only TEXT] [--every N] [--keep DIR] [-v]
What lacks its binary is left out, and that is said. The last line is "N passed, N failed"; the exit code is 1 if any failed.

Tolerances (relative to the largest logit of the case, at least 1)
  f32   1e-5: the engine sums in F32 where this sums in double. 3e-6 is the most seen, where norms are missing.
  bf16, int8, int4: both sides round at the same places, so rows agree as well as in F32 until a value lies so near to the
        border of two roundings that the 1e-7 between the two sides decide. One BF16 input then differs by 2^-8 of itself,
        one int8 input by 1/127 of its row's largest, one F16 key or value by 2^-11, and later rows see it through
        attention. So two things are asked: no row is off by more than some such steps ("worst": about twice what is
        seen), and of up to five draws of weights and tokens one has a median row as close as in F32 ("typical": 3e-6, of
        which 2e-7 is seen). A wrong rule of rounding moves every row of every draw. Cases of 150 tokens and more always
        meet a flip: worst only.
  cuda  attends with matrix units, so the reference rounds queries and weights of keys too (half_products). Sums of BF16 keep
        fewer bits there: 3e-5, and more flips, so ten draws. A case may be without such a draw, 1 of 10 of a kind; were the rule of
        attention another one, 4 to 8 of 10 would be.
  golden 1e-4 where golden.json has the logits; 3e-4 for huginn-tiny from a given state at 5 loops, and at depths that only the
        reference has: the random weights of huginn-tiny magnify a rounding up to 1000 times, and numpy in F32 is off by
        as much there (2.7e-4 from the given state, 1.9e-4 at 8 loops).
        Golden models as bf16, int8 and int4 on a card: of the draws' worst rows the median is held to the limits above, the worst of all
        to as much as the reference is from itself when each of its sums is off as F32's are (reference.swayed), if that is more.
        That is for huginn-tiny alone, where a flip of one BF16 input is worth 3e-2 to 0.8 (other models: at most 5e-2 for int8,
        1.4e-2 for bf16). Its typical row is held to the same limit as everyone's.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

import artifacts
import reference

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
TOLERANCE = {  # typical (median over rows), worst row
    "f32": (1e-5, 1e-5),
    "bf16": (3e-6, 3e-2),
    "int8": (3e-6, 6e-2),
    "int4": (3e-6, 6e-2),
}
SUMS = {"bf16": 1e-6, "int8": 1e-7, "int4": 1e-7}  # what a sum on a card is off by, of its row's standard deviation
GOLDEN, GOLDEN_MAGNIFIED = (1e-4, 1e-4), (3e-4, 3e-4)
DEVICE = ["--device", "cpu"]  # of every command; on a card also a memory budget, for several run at once
ON_CARD, ENGINES = False, None
DRAWS = [11, 8, 6, 5, 4]  # tokens of each draw


class Results:
    """Of checks by several threads."""

    def __init__(self, verbose):
        self.verbose, self.passed, self.failures, self.table = verbose, 0, [], {}
        self.lock = threading.RLock()

    def check(self, ok, what):
        with self.lock:
            if ok:
                self.passed += 1
            else:
                self.failures.append(what)
            if self.verbose or not ok:
                print(("ok      " if ok else "FAILED  ") + what, flush=True)

    def within(self, group, what, typical, worst, limits):
        """Errors of one comparison; a NaN fails."""
        with self.lock:
            n, t, w = self.table.get(group, (0, 0.0, 0.0))
            self.table[group] = (n + 1, max(t, typical), max(w, worst))
        ok = typical <= limits[0] and worst <= limits[1]
        self.check(ok, f"{group}: {what}: typical {typical:.1e} (limit {limits[0]:.0e}), worst {worst:.1e} (limit {limits[1]:.0e})")


def compare(got, want):
    """Median and maximum over rows of the largest difference, relative to the largest logit (at least 1)."""
    got, want = np.asarray(got, dtype=np.float64), np.asarray(want)
    if got.shape != want.shape:
        return np.inf, np.inf
    rows = np.abs(got - want).max(axis=1) / max(1.0, np.abs(want).max())
    return float(np.median(rows)), float(rows.max())


# ---- 1. the reference against golden logits ----


def golden_dirs(folder):
    return sorted(d for d in os.listdir(folder) if os.path.exists(os.path.join(folder, d, "golden.json")))


def golden_cases(golden):
    """(name, loops, start states or None, logits, first row) for every set of logits in a golden.json."""
    given = golden.get("s0")
    for key, value in golden.items():
        if key == "logits_by_loops":
            for loops, logits in value.items():
                yield f"logits at {loops} loops", int(loops), None, logits, 0
        elif key.startswith("logits_R"):
            loops = int(key[8:].split("_")[0])
            yield key, loops, given if key.endswith("given_s0") else None, value, 0
        elif key.startswith("suffix_after_prefix5"):
            loops = int(key.split("_R")[1].split("_")[0]) if "_R" in key else len(golden["gate_logit_by_loop"])
            yield key, loops, None, value, 5


def check_reference(folder, name, results):
    golden = json.load(open(os.path.join(folder, name, "golden.json")))
    model = reference.open_model(os.path.join(folder, name))
    tokens = golden["tokens"]

    def near(what, got, want):
        error = float(np.abs(np.asarray(got) - np.array(want)).max())
        results.within("reference = golden", f"{name}, {what}", error, error, (2e-5, 2e-5))

    for what, loops, given, logits, first in golden_cases(golden):
        near(what, model.forward(tokens, loops, start_states=given).logits[first:], logits)
    for key, states in golden.items():
        if key.startswith("state_R"):
            loops = int(key[7:].split("_")[0])
            near(key, model.forward(tokens, loops, start_states=golden["s0"]).states[-1], states)
    for loops, hidden in golden.get("hidden_by_loops", {}).items():
        near(f"hidden at {loops} loops", model.forward(tokens, int(loops)).hidden, hidden)
    if "gate_logit_by_loop" in golden:
        out = [model.forward(tokens, t + 1) for t in range(len(golden["gate_logit_by_loop"]))]
        near("gate logits", out[-1].gates, golden["gate_logit_by_loop"])
        for q, want in golden["q_exit"].items():
            steps = reference.exit_steps(out[-1].gates, float(q))
            results.check(list(steps) == want["exit_step_0based"], f"reference: {name}, exit steps at q {q}")
            near(f"logits at exit, q {q}", [out[t].logits[i] for i, t in enumerate(steps)], want["logits"])


# ---- 2. and 3. the engine ----


class Engines:
    """Processes of the driver that stay, one to a thread: for a device whose first touch takes longer than a model here."""

    def __init__(self, driver, device, memory_mib):
        self.command, self.local, self.all = [driver, "--serve", device, str(memory_mib)], threading.local(), []

    def rows(self, directory, tokens, loops, window):
        engine = getattr(self.local, "engine", None)
        if engine is None or engine.poll() is not None:
            engine = subprocess.Popen(self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            self.local.engine = engine
            self.all.append(engine)
        engine.stdin.write(f"{loops} {window} {','.join(map(str, tokens))} {directory}\n")
        engine.stdin.flush()
        line = engine.stdout.readline()
        out = json.loads(line) if line else {"error": f"the driver ended with {engine.wait()}"}
        if "error" in out:
            raise RuntimeError(out["error"])
        return out["logits"]

    def end(self):
        for engine in self.all:
            engine.stdin.close()
            engine.wait(20)


def engine_rows(binary, directory, tokens, loops, window=0, n_rows=None):
    if ENGINES:
        return ENGINES.rows(directory, tokens, loops, window)[len(tokens) - (n_rows or len(tokens)) :]
    command = [binary, "logits", "--model", directory, *DEVICE, "--tokens", ",".join(map(str, tokens)), "--loops", str(loops)]
    command += ["--rows", str(n_rows or len(tokens)), "--window", str(window), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if done.returncode != 0:
        raise RuntimeError(f"exit code {done.returncode}: {done.stderr.strip()[-300:]}")
    out = json.loads(done.stdout)
    return out["rows"] if "rows" in out else [out["logits"]]


def open_model(directory):
    """The reference of what the engine computes on DEVICE."""
    return reference.open_model(directory, half_products=ON_CARD)


def random_tokens(rng, vocab, n):
    return [int(t) for t in rng.integers(0, vocab, n)]


def knob_cases():
    """(name, kind, knobs, runs); a run is (number of tokens, loops, window). 0 tokens: as in DRAWS."""
    for i, (name, knobs) in enumerate(artifacts.SINGLE):
        yield name, "f32", knobs, [(11, 1, 0), (11, 3, 0)]
        yield name, ("int4", "bf16", "int8")[i % 3], knobs, [(0, 2, 0)]
    for kind in TOLERANCE:
        rng = np.random.default_rng(7)
        for i in range(14):
            yield f"random {i}", kind, artifacts.random_knobs(rng), [(0, 1 + i % 4, 0)]
        yield "windows", kind, artifacts.INJECT, [(0, 2, w) for w in (1, 2, 3, 4, 10, 11, 100)]
        # Rows past a block of 64 tokens and past a split of 256 keys.
        yield "long", kind, {}, [(150, 2, 0), (150, 2, 65), (300, 1, 0), (300, 1, 257)]


def draw(binary, directory, seed, kind, knobs, n_tokens, loops, window):
    artifacts.make(directory, kind, seed, **knobs)
    model = open_model(directory)
    tokens = random_tokens(np.random.default_rng(seed), model.embed.values.shape[0], n_tokens)
    return compare(engine_rows(binary, directory, tokens, loops, window), model.forward(tokens, loops, window).logits)


def run_case(binary, directory, case_no, case):
    name, kind, knobs, runs = case
    lines = []
    for n_tokens, loops, window in runs:
        typical, worst, n_draws, note = np.inf, 0.0, 0, ""
        while n_draws < (1 if n_tokens or kind == "f32" else len(DRAWS)) and typical > TOLERANCE[kind][0]:
            n = n_tokens or DRAWS[n_draws]
            try:
                t, w = draw(binary, directory, 1000 * n_draws + case_no, kind, knobs, n, loops, window)
            except (RuntimeError, ValueError, subprocess.TimeoutExpired) as e:
                t, w, note = np.inf, np.inf, f" ({e})"
            typical, worst, n_draws = min(typical, t), max(worst, w), n_draws + 1
        what = f"{name}, {n} tokens, loops {loops}" + (f", window {window}" if window else "") + note
        lines.append((kind, what + (f", draw {n_draws}" if n_draws > 1 else ""), typical, worst, n_tokens >= 150))
    return lines


def check_engine(pool, binary, folder, only, every, results):
    cases = [(i, c) for i, c in enumerate(knob_cases()) if only in f"{c[1]} {c[0]}"][::every]  # the draws of a case are its own
    runs = [pool.submit(run_case, binary, os.path.join(folder, f"case-{i}"), i, c) for i, c in cases]
    n, n_loose = dict.fromkeys(TOLERANCE, 0), dict.fromkeys(TOLERANCE, 0)
    for job in runs:
        for kind, what, typical, worst, is_long in job.result():
            limits = TOLERANCE[kind]
            if is_long and kind != "f32":
                results.within(f"engine = reference, {kind}, long", what, typical, worst, (limits[1], limits[1]))
                continue
            loose = ON_CARD and kind != "f32" and typical > limits[0]
            n[kind], n_loose[kind] = n[kind] + 1, n_loose[kind] + loose
            results.within(f"engine = reference, {kind}", what, typical, worst, (np.inf, limits[1]) if loose else limits)
    for kind, count in n.items():
        results.check(n_loose[kind] * 10 <= count, f"{n_loose[kind]} of {count} cases of {kind} are off in every draw")


def check_golden(binary, folder, name, results):
    directory = os.path.join(folder, name)
    golden = json.load(open(os.path.join(directory, "golden.json")))
    tokens, model = golden["tokens"], reference.open_model(directory)

    def near(what, loops, want, limits, first=0):
        try:
            got = np.array(engine_rows(binary, directory, tokens, loops, n_rows=len(tokens) - first))
            error = float(np.abs(got - want).max())
        except RuntimeError as e:
            what, error = f"{what}: {e}", np.inf
        group = "engine = golden" if limits == GOLDEN else "engine = reference, golden models"
        results.within(group, f"{name}, {what}", error, error, limits)

    for what, loops, given, logits, first in golden_cases(golden):
        if given is None:
            near(what, loops, np.array(logits), GOLDEN, first)
    for loops in range(1, 9):  # depths that golden.json leaves out, by way of the reference
        near(f"the reference's logits at {loops} loops", loops, model.forward(tokens, loops).logits, GOLDEN_MAGNIFIED)


def check_greedy(binary, directory, name, loops, window, results):
    """The reference sees the whole sequence at once. Where its best two logits are closer than the engine's error, either is
    right. Ending tokens are off on both sides."""
    model, prompt = open_model(directory), [5, 9, 2]
    command = [binary, "generate", "--model", directory, *DEVICE, "--tokens", ",".join(map(str, prompt))]
    command += ["--loops", str(loops), "--window", str(window), "--max-tokens", "90", "--temperature", "0", "--ignore-eos", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    what = f"engine: {name}, 90 greedy tokens, loops {loops}, window {window}"
    if done.returncode != 0:
        results.check(False, f"{what}: {done.stderr.strip()[-200:]}")
        return
    made = json.loads(done.stdout)["tokens"]
    logits = model.forward(prompt + made, loops, window).logits[len(prompt) - 1 : -1]
    eos = json.load(open(os.path.join(directory, "config.json"))).get("eos_token_id", -1)
    if eos >= 0:
        logits[:, eos] = -np.inf
    behind = logits.max(axis=1) - logits[np.arange(len(made)), made]
    results.check(len(made) == 90 and behind.max() < 1e-3, f"{what}: at most {behind.max():.1e} behind the best")


# Root mean square error of a matrix, relative to its own, for normally distributed weights: half a step of 1/127 of a row's
# largest, or of 1/7 of a group's largest with the scale itself rounded to 4 bits. About what is seen, and half as much again.
QUANTISER_RMS = {"f32": 0.0, "bf16": 2**-8, "int8": 0.009, "int4": 0.14}


def check_quantiser(binary, folder, name, scratch, results):
    original, golden = os.path.join(folder, name), json.load(open(os.path.join(folder, name, "golden.json")))
    before = reference.open_model(original)
    for kind in TOLERANCE:
        out = os.path.join(scratch, f"{name}-{kind}")
        command = [binary, "quantize", "--model", original, "--to", kind, "--out", out, "--quiet"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        results.check(done.returncode == 0, f"quantize {name} to {kind}: {done.stderr.strip()[-200:]}")
        if done.returncode != 0:
            continue
        after = open_model(out)
        pairs = [(m.rows(slice(None)), reference.matrices(after)[n].rows(slice(None))) for n, m in reference.matrices(before).items()]
        error = max(np.sqrt(((a - b) ** 2).mean() / (a**2).mean()) for a, b in pairs)
        results.check(error <= QUANTISER_RMS[kind], f"quantize {name} to {kind}: weights are off by {error:.4f} of their size")
        limits = GOLDEN_MAGNIFIED if kind == "f32" else TOLERANCE[kind]
        typical, worst, sways = np.inf, [], [limits[1]]
        others = [reference.swayed(after, SUMS[kind], seed) for seed in range(4)] if ON_CARD and kind != "f32" else []
        draws = [random_tokens(np.random.default_rng(i), before.embed.values.shape[0], n) for i, n in enumerate(DRAWS)]
        for tokens in draws:
            want = after.forward(tokens, 2).logits
            t, w = compare(engine_rows(binary, out, tokens, 2), want)
            typical, worst = min(typical, t), [*worst, w]
            sways += [compare(other.forward(tokens, 2).logits, want)[1] for other in others]
        group = f"engine = reference, golden as {kind}"
        results.within(group, name, typical, max(worst), (limits[0], max(sways)))
        results.check(np.median(worst) <= limits[1], f"{group}: {name}: half of the draws within {limits[1]:.0e}")
        if kind == "f32":
            same = compare(after.forward(golden["tokens"], 3).logits, before.forward(golden["tokens"], 3).logits)
            results.within("converted = original, reference", name, *same, (1e-6, 1e-6))


def driver_output(driver, directory, tokens, loops, states=None, chunk=0):
    with tempfile.NamedTemporaryFile(suffix=".f32") as f:
        if states is not None:
            f.write(np.asarray(states, dtype="<f4").tobytes())
            f.flush()
        command = [driver, directory, str(loops), f.name if states is not None else "-", str(chunk), *map(str, tokens)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if done.returncode != 0:
        raise RuntimeError(f"exit code {done.returncode}: {done.stderr.strip()[-300:]}")
    return json.loads(done.stdout)


def check_golden_inside(driver, folder, name, results):
    """What needs the driver: given start states, rows before the head, gate logits, exit steps."""
    directory = os.path.join(folder, name)
    golden = json.load(open(os.path.join(directory, "golden.json")))
    tokens = golden["tokens"]

    def near(what, got, want):
        error = float(np.abs(np.array(got) - np.array(want)).max())
        results.within("engine = golden", f"{name}, {what}", error, error, GOLDEN)

    for what, loops, given, logits, _ in golden_cases(golden):
        if given is not None:
            whole = driver_output(driver, directory, tokens, loops, given)
            near(what, whole["logits"], logits)
            for chunk in (1, 3):
                cut = driver_output(driver, directory, tokens, loops, given, chunk)
                results.check(cut == whole, f"engine: {name}, {what}: chunks of {chunk} give the same bits")
    for loops, hidden in golden.get("hidden_by_loops", {}).items():
        near(f"hidden at {loops} loops", driver_output(driver, directory, tokens, int(loops))["hidden"], hidden)
    if "gate_logit_by_loop" in golden:
        out = driver_output(driver, directory, tokens, len(golden["gate_logit_by_loop"]))
        near("gate logits", out["gates"], golden["gate_logit_by_loop"])
        for q, want in golden["q_exit"].items():
            results.check(out["exit"][q] == want["exit_step_0based"], f"engine: {name}, exit steps at q {q}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin", default=os.path.join(ROOT, "build", "release", "tinyloop"))
    parser.add_argument("--driver", default=os.path.join(ROOT, "build", "test", "tests", "vectors_driver"))
    parser.add_argument("--golden", default=os.path.join(ROOT, "tests", "golden"))
    parser.add_argument("--only", default="", help="only cases of part 2 whose type and name contain this")
    parser.add_argument("--every", type=int, default=1, help="only each Nth case of part 2")
    parser.add_argument("--keep", help="write the random models here and leave them")
    parser.add_argument("--device", default="cpu", help="what the engine computes on; not for the driver, which is the CPU's")
    parser.add_argument("--serve", metavar="DRIVER", help="this driver computes the engine's logits, of --device too; it starts once")
    parser.add_argument("--jobs", type=int, default=2, help="checks at a time")
    parser.add_argument("-v", action="store_true", help="print every check")
    args = parser.parse_args()
    results, started = Results(args.v), time.time()
    global ON_CARD, ENGINES
    ON_CARD = args.device == "cuda"
    if args.serve:
        ENGINES = Engines(args.serve, args.device, 1024)
    if ON_CARD:
        DEVICE[:] = ["--device", args.device, "--memory-mib", "1024"]
        TOLERANCE["bf16"] = (3e-5, 3e-2)
        DRAWS.extend([3] * 5)

    names = golden_dirs(args.golden) if os.path.isdir(args.golden) else []
    results.check(names, f"there are golden models in {args.golden}")
    for name in names:
        check_reference(args.golden, name, results)
    if os.path.exists(args.bin):
        with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(max_workers=args.jobs) as pool:
            runs = []
            for i, name in enumerate(("base", "inject concat_linear, zero", "qk_norm full", "rope pair", "core_to_coda norm")):
                directory = os.path.join(folder, f"greedy-{i}")
                artifacts.make(directory, "f32", i, **dict(artifacts.SINGLE)[name])
                for window in (0, 5, 64):
                    runs.append(pool.submit(check_greedy, args.bin, directory, name, 2, window, results))
            for name in names:
                runs.append(pool.submit(check_greedy, args.bin, os.path.join(args.golden, name), name, 2, 0, results))
                runs.append(pool.submit(check_quantiser, args.bin, args.golden, name, folder, results))
                runs.append(pool.submit(check_golden, args.bin, args.golden, name, results))
            check_engine(pool, args.bin, args.keep or folder, args.only, args.every, results)
            for run in runs:
                run.result()
        if ENGINES:
            ENGINES.end()
    else:
        print(f"there is no {args.bin}: the engine itself is not checked")
    if os.path.exists(args.driver):
        for name in names:
            check_golden_inside(args.driver, args.golden, name, results)
    else:
        print(f"there is no {args.driver}: given start states, gates and exits of the engine are not checked")

    print(f"\n{'':40} {'cases':>6} {'typical':>9} {'worst':>9}")
    for group, (n, typical, worst) in results.table.items():
        print(f"{group:40} {n:6} {typical:9.1e} {worst:9.1e}")
    print(f"{time.time() - started:.1f} s")
    print(f"{results.passed} passed, {len(results.failures)} failed")
    return 1 if results.failures else 0


if __name__ == "__main__":
    sys.exit(main())
