#!/usr/bin/env python3
"""What named reuse saves, through HTTP, on a daemon that this program starts.

  scripts/bench_reuse.py [--model DIR] [--prompt N] [--rounds N] [--bin DIR] [--only LIST] [--flag=...]

Without --model a random model with the loop of the 407M one, but narrower, is made in build/bench. Five experiments:

  resume     a handle at depth 4 taken to depth 8, against the same request from scratch at depth 8
  draft      the same for a draft at depth 4 that leaves its handle behind (store_resume): what the handle adds to the draft
  breakeven  how many follow-ups pay for building the handle
  pool       hit against miss over the share of the prompt that is registered, 0 to 1
  prefix     time to the first token of a hit against the length of the prefix (should be flat)

What is compared is measured in turn, in an order that changes, and each ratio is taken within one round: a figure is the median of
the rounds' ratios, with the least and the greatest behind it. Beside wall-clock there is the processor time of the daemon, which
says the same on a machine that others use, too. Every pair must be equal: token ids and hashes of the logits.
"""
import argparse
import json
import pathlib
import random
import re
import statistics
import subprocess
import sys
import threading
import time
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parents[1]
SHARES = (0, 0.25, 0.5, 0.75, 0.9, 1)


class Server:
    def __init__(self, binary, model, flags):
        self.model = pathlib.Path(model).name
        self.process = subprocess.Popen([binary, "--model", model, "--port", "0", "--admin-port=-1", "--pool-auto=false",
                                         "--pool-capacity", "256", *flags], stdout=subprocess.PIPE, text=True)
        self.url = None
        for line in self.process.stdout:
            found = re.search(r"listening on (http://[^\s\"]+)", line)
            self.url = found[1] if found else self.url
            if "ready" in line and self.url:
                break
        if not self.url:
            sys.exit("the daemon did not start")
        threading.Thread(target=self.process.stdout.read, daemon=True).start() # its log must not fill the pipe

    def cpu_ms(self):
        """Processor time of all its threads so far."""
        tasks = list(pathlib.Path(f"/proc/{self.process.pid}/task").glob("*/schedstat"))
        if not tasks:
            sys.exit("this kernel does not say what threads have used (/proc/PID/task/*/schedstat)")
        return sum(int(t.read_text().split()[0]) for t in tasks) / 1e6

    def call(self, method, path, body=None):
        """The reply, with what the call took."""
        data = None if body is None else json.dumps(body).encode()
        req = urllib.request.Request(self.url + path, data=data, method=method, headers={"Content-Type": "application/json"})
        cpu, start = self.cpu_ms(), time.perf_counter()
        with urllib.request.urlopen(req, timeout=600) as r:
            text = r.read()
        wall = (time.perf_counter() - start) * 1e3
        return {**(json.loads(text) if text else {}), "wall": wall, "cpu": self.cpu_ms() - cpu}

    def complete(self, prompt=None, **fields):
        body = {"model": self.model, "temperature": 0, "ignore_eos": True, "return_tokens": True, "return_logits_hash": True,
                "pool": "off", **fields}
        if prompt is not None:
            body["prompt"] = prompt
        return self.call("POST", "/v1/completions", body)

    def end(self):
        self.process.terminate()
        self.process.wait()


def tokens(seed, n, vocab):
    r = random.Random(seed)
    return [r.randrange(vocab) for _ in range(n)]


def same(a, b):
    if [(c["tokens"], c["logits_hash"]) for c in a["choices"]] != [(c["tokens"], c["logits_hash"]) for c in b["choices"]]:
        sys.exit("NOT EQUAL: reuse changed an answer")


def timing(reply, *names):
    return sum(reply["tinyloop"]["timings"][n] for n in names)


def measure(seed, **parts):
    """Call each part once, in an order of this round's own: name -> what it returned."""
    names = sorted(parts)
    random.Random(seed).shuffle(names)
    return {n: parts[n]() for n in names}


class Spread:
    """Values of the rounds: the median counts."""
    def __init__(self, values):
        self.values = sorted(values)
        self.median = statistics.median(self.values)

    def show(self, form):
        return f"{self.median:{form}} ({self.values[0]:{form}} to {self.values[-1]:{form}})"


def resume(s, n, rounds, vocab, out_tokens):
    """Both ways to depth 8, each with one token (the prefill part) and with out_tokens (end to end)."""
    seen = []
    for i in range(rounds):
        p = tokens(i, n, vocab)
        handle = s.call("POST", "/v1/resume_handles", {"prompt": p, "loops_used": 4, "max_loops": 8})
        reuse = {"handle": handle["id"], "loops": 8}
        r = measure(i, fresh=lambda: s.complete(p, loops=8, max_tokens=1), deep=lambda: s.complete(resume=reuse, max_tokens=1),
                    fresh_all=lambda: s.complete(p, loops=8, max_tokens=out_tokens),
                    deep_all=lambda: s.complete(resume=reuse, max_tokens=out_tokens))
        same(r["fresh"], r["deep"])
        same(r["fresh_all"], r["deep_all"])
        seen.append({**r, "build": handle})
        s.call("DELETE", f"/v1/resume_handles/{handle['id']}")
    part = Spread(1 - timing(r["deep"], "resume_ms", "prefill_ms") / timing(r["fresh"], "prefill_ms") for r in seen)
    part_cpu = Spread(1 - r["deep"]["cpu"] / r["fresh"]["cpu"] for r in seen)
    total = Spread(1 - r["deep_all"]["wall"] / r["fresh_all"]["wall"] for r in seen)
    total_cpu = Spread(1 - r["deep_all"]["cpu"] / r["fresh_all"]["cpu"] for r in seen)
    pays = {k: Spread(r["build"][k] / (r["fresh"][k] - r["deep"][k]) for r in seen) for k in ("wall", "cpu")}
    print(f"resume 4 -> 8 against fresh at 8, {n} tokens, {rounds} rounds; saved:")
    print(f"  prefill part (limit 50 %)      wall {part.show('.1%')}   processor {part_cpu.show('.1%')}")
    print(f"  end to end with {out_tokens:3d} tokens     wall {total.show('.1%')}   processor {total_cpu.show('.1%')}")
    print(f"breakeven: resumes that pay for a handle built for them alone: wall {pays['wall'].show('.2f')}   "
          f"processor {pays['cpu'].show('.2f')}", flush=True)
    return {"prefill_part": part.median, "prefill_part_cpu": part_cpu.median, "total": total.median, "total_cpu": total_cpu.median,
            "break_even": pays["wall"].median, "break_even_cpu": pays["cpu"].median}


def draft(s, n, rounds, vocab, out_tokens):
    """A draft was wanted anyway; its handle costs what the draft takes longer for leaving it."""
    seen = []
    for i in range(rounds):
        p = tokens(500 + i, n, vocab)
        r = measure(i, plain=lambda: s.complete(p, loops=4, max_tokens=out_tokens), stores=lambda: s.complete(
            p, loops=4, max_tokens=out_tokens, store_resume={"max_loops": 8, "ttl_seconds": 60}))
        same(r["plain"], r["stores"])
        handle = r["stores"]["tinyloop"]["resume_handle"]["id"]
        r |= measure(i, fresh=lambda: s.complete(p, loops=8, max_tokens=1),
                     deep=lambda: s.complete(resume={"handle": handle, "loops": 8}, max_tokens=1))
        same(r["fresh"], r["deep"])
        seen.append(r)
        s.call("DELETE", f"/v1/resume_handles/{handle}")
    extra = {k: Spread(r["stores"][k] / r["plain"][k] - 1 for r in seen) for k in ("wall", "cpu")}
    pays = Spread((r["stores"]["cpu"] - r["plain"]["cpu"]) / (r["fresh"]["cpu"] - r["deep"]["cpu"]) for r in seen)
    print(f"draft at 4, {n} tokens and {out_tokens} out: leaving a handle adds wall {extra['wall'].show('+.1%')}   processor "
          f"{extra['cpu'].show('+.1%')}; resumes that pay for it: processor {pays.show('.2f')}", flush=True)
    return {"handle_adds_cpu": extra["cpu"].median, "break_even_cpu": pays.median}


def pool(s, n, rounds, vocab):
    print(f"pool, {n} tokens, hit / miss by the share that is registered (work left), time to the first token:")
    out = []
    for share in SHARES:
        wall, cpu = [], []
        for i in range(rounds):
            p = tokens(1000 + i, n, vocab)
            cut = int(n * share)
            entry = s.call("POST", "/v1/pool/entries", {"prompt": p[:cut], "loops": 8}) if cut else None
            r = measure(i, miss=lambda: s.complete(p, loops=8, max_tokens=1),
                        hit=lambda: s.complete(p, loops=8, max_tokens=1, pool="auto"))
            same(r["miss"], r["hit"])
            if r["hit"]["usage"]["prompt_tokens_details"]["cached_tokens"] != cut:
                sys.exit("the pool did not match")
            wall.append(timing(r["hit"], "ttft_ms") / timing(r["miss"], "ttft_ms"))
            cpu.append(r["hit"]["cpu"] / r["miss"]["cpu"])
            if entry:
                s.call("DELETE", f"/v1/pool/entries/{entry['id']}")
        wall, cpu = Spread(wall), Spread(cpu)
        print(f"  {share:4.0%} ({1 - share:4.2f}): wall {wall.show('.3f')}   processor {cpu.show('.3f')}", flush=True)
        out.append({"share": share, "wall": wall.median, "cpu": cpu.median})
    return out


def prefix(s, n, rounds, vocab):
    lengths = sorted({max(n // 8, 1), max(n // 4, 1), max(n // 2, 1), n})
    for length in lengths:
        s.call("PUT", f"/v1/prefix_caches/len{length}", {"prompt": tokens(7, length, vocab), "loops": 8})
    seen = []
    for i in range(5 * rounds):
        suffix = tokens(i, 8, vocab)
        parts = {f"{kind}{k}": (lambda k=k, kind=kind: s.complete(suffix if kind == "suffix" else None, prefix_cache=f"len{k}",
                                                                 max_tokens=1)) for k in lengths for kind in ("bare", "suffix")}
        seen.append(measure(i, **parts))
    print(f"prefix hit, time to the first token by the length of the prefix, {5 * rounds} rounds:")
    out = []
    for k in lengths:
        row = {kind: Spread(timing(r[f"{kind}{k}"], "ttft_ms") for r in seen) for kind in ("bare", "suffix")}
        cpu = {kind: Spread(r[f"{kind}{k}"]["cpu"] for r in seen) for kind in ("bare", "suffix")}
        print(f"  {k:6d} tokens: alone {row['bare'].median:7.2f} ms, processor {cpu['bare'].median:7.2f} ms;   8 tokens behind it "
              f"{row['suffix'].median:7.2f} ms, processor {cpu['suffix'].median:7.2f} ms", flush=True)
        out.append({"length": k, "bare_ms": row["bare"].median, "bare_cpu_ms": cpu["bare"].median,
                    "suffix_ms": row["suffix"].median, "suffix_cpu_ms": cpu["suffix"].median})
        s.call("DELETE", f"/v1/prefix_caches/len{k}")
    return out


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model")
    p.add_argument("--prompt", type=int, default=384)
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--out-tokens", type=int, default=16)
    p.add_argument("--bin", default=str(ROOT / "build/release"))
    p.add_argument("--only", default="resume,draft,pool,prefix", help="some of resume,draft,pool,prefix")
    p.add_argument("--flag", action="append", default=[], help="a flag for tinyloopd, e.g. --flag=--threads=4")
    p.add_argument("--json", action="store_true", help="also one line of JSON at the end")
    a = p.parse_args()
    model = a.model
    if not model:
        model = str(ROOT / "build/bench/reuse-small")
        if not pathlib.Path(model).exists():
            pathlib.Path(model).parent.mkdir(parents=True, exist_ok=True)
            subprocess.run([f"{a.bin}/tinyloop", "synth", "--preset", "loop-407m", "--out", model, *NARROW], check=True,
                           stdout=subprocess.DEVNULL)
    s = Server(f"{a.bin}/tinyloopd", model, a.flag)
    result, only = {}, a.only.split(",")
    try:
        vocab = s.call("GET", "/v1/models")["data"][0]["limits"]["vocab_size"]
        s.complete(tokens(0, 32, vocab), loops=8, max_tokens=4) # warm
        for name, run, args in (("resume", resume, (a.out_tokens,)), ("draft", draft, (a.out_tokens,)), ("pool", pool, ()),
                                ("prefix", prefix, ())):
            if name in only:
                result[name] = run(s, a.prompt, a.rounds, vocab, *args)
        if a.json:
            print(json.dumps(result))
    finally:
        s.end()


NARROW = [x for k, v in {"hidden_size": 256, "intermediate_size": 768, "num_attention_heads": 4, "num_key_value_heads": 1,
                         "head_dim": 64, "vocab_size": 4096}.items() for x in ("--set", f"{k}={v}")]

if __name__ == "__main__":
    main()
