#!/usr/bin/env python3
"""What named reuse saves, through HTTP, on a daemon that this program starts.

  scripts/bench_reuse.py [--model DIR] [--prompt N] [--rounds N] [--bin DIR] [--flag=...]

Without --model a random model with the loop of the 407M one, but narrower, is made in build/bench. Four experiments:

  1 resume     a handle at depth 4 taken to depth 8, against the same request from scratch at depth 8
  2 break-even how many follow-ups pay for building the handle
  3 pool       hit against miss over the share of the prompt that is registered, 0 to 1
  4 prefix     time to the first token of a hit against the length of the prefix (should be flat)

Every pair is also compared: token ids and hashes of the logits must be equal. Times are in milliseconds, the best of the rounds:
what else the machine does only ever adds to them.
"""
import argparse
import json
import pathlib
import random
import re
import subprocess
import sys
import threading
import time
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parents[1]


class Server:
    def __init__(self, binary, model, flags):
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

    def call(self, method, path, body=None):
        data = None if body is None else json.dumps(body).encode()
        req = urllib.request.Request(self.url + path, data=data, method=method, headers={"Content-Type": "application/json"})
        with urllib.request.urlopen(req, timeout=600) as r:
            text = r.read()
        return json.loads(text) if text else None

    def complete(self, prompt=None, **fields):
        body = {"model": pathlib.Path(self.model).name, "temperature": 0, "ignore_eos": True, "return_tokens": True,
                "return_logits_hash": True, "pool": "off", **fields}
        if prompt is not None:
            body["prompt"] = prompt
        start = time.perf_counter()
        reply = self.call("POST", "/v1/completions", body)
        return (time.perf_counter() - start) * 1e3, reply

    def end(self):
        self.process.terminate()
        self.process.wait()


def tokens(seed, n, vocab):
    r = random.Random(seed)
    return [r.randrange(vocab) for _ in range(n)]


def proof(reply):
    return [(c["tokens"], c["logits_hash"]) for c in reply["choices"]]


def same(a, b):
    if proof(a) != proof(b):
        sys.exit("NOT EQUAL: reuse changed an answer")


def timing(reply, name):
    return reply["tinyloop"]["timings"][name]


def resume(s, n, rounds, vocab, out_tokens):
    fresh, deep, fresh_wall, deep_wall, build = [], [], [], [], []
    for i in range(rounds):
        p = tokens(i, n, vocab)
        start = time.perf_counter()
        h = s.call("POST", "/v1/resume_handles", {"prompt": p, "loops_used": 4, "max_loops": 8})
        build.append((time.perf_counter() - start) * 1e3)
        a_wall, a = s.complete(p, loops=8, max_tokens=out_tokens)
        b_wall, b = s.complete(resume={"handle": h["id"], "loops": 8}, max_tokens=out_tokens)
        same(a, b)
        fresh.append(timing(a, "prefill_ms"))
        deep.append(timing(b, "resume_ms"))
        fresh_wall.append(a_wall)
        deep_wall.append(b_wall)
        s.call("DELETE", f"/v1/resume_handles/{h['id']}")
    saved = 1 - min(deep) / min(fresh)
    total = 1 - min(deep_wall) / min(fresh_wall)
    print(f"1 resume 4 -> 8, {n} tokens: fresh prefill {min(fresh):.1f}, resume {min(deep):.1f}: "
          f"{saved:.1%} of the prefill part saved (limit 50 %)")
    print(f"  end to end with {out_tokens} tokens out: fresh {min(fresh_wall):.1f}, resumed {min(deep_wall):.1f}: "
          f"{total:.1%} saved")
    # A draft at depth 4 was wanted anyway; what the handle costs beyond it is its state. Without a draft it is the whole build.
    gain = min(fresh_wall) - min(deep_wall)
    print(f"2 break-even: building costs {min(build):.1f}, each resume gains {gain:.1f}: "
          f"{min(build) / gain:.2f} resumes pay for a build of its own; none are needed when the draft at depth 4 was wanted")
    return {"resume_saved_prefill": saved, "resume_saved_total": total, "break_even": min(build) / gain}


def pool(s, n, rounds, vocab):
    print("3 pool, share of the prompt that is registered: hit ttft / miss ttft")
    out = []
    for share in (0, 0.25, 0.5, 0.75, 0.9, 1):
        hits, misses = [], []
        for i in range(rounds):
            p = tokens(1000 + i, n, vocab)
            cut = int(n * share)
            entry = s.call("POST", "/v1/pool/entries", {"prompt": p[:cut], "loops": 8}) if cut else None
            _, miss = s.complete(p, loops=8, max_tokens=1)
            _, hit = s.complete(p, loops=8, max_tokens=1, pool="auto")
            same(miss, hit)
            if hit["usage"]["prompt_tokens_details"]["cached_tokens"] != cut:
                sys.exit("the pool did not match")
            hits.append(timing(hit, "ttft_ms"))
            misses.append(timing(miss, "ttft_ms"))
            if entry:
                s.call("DELETE", f"/v1/pool/entries/{entry['id']}")
        print(f"  {share:4.0%}: {min(hits):8.2f} / {min(misses):8.2f} = {min(hits) / min(misses):.3f} "
              f"(work left {1 - share:.2f})")
        out.append({"share": share, "hit_ms": min(hits), "miss_ms": min(misses)})
    return out


def prefix(s, n, rounds, vocab):
    print("4 prefix cache, 8 tokens of suffix: ttft against the length of the prefix")
    out = []
    for length in sorted({n // 8, n // 4, n // 2, n}):
        s.call("PUT", f"/v1/prefix_caches/len{length}", {"prompt": tokens(7, length, vocab), "loops": 8})
        times = [timing(s.complete(tokens(i, 8, vocab), prefix_cache=f"len{length}", max_tokens=1)[1], "ttft_ms")
                 for i in range(2 * rounds + 1)]
        bare = [timing(s.complete(prefix_cache=f"len{length}", max_tokens=1)[1], "ttft_ms") for _ in range(2 * rounds + 1)]
        print(f"  {length:6d} tokens: {min(times):8.2f}; without a suffix {min(bare):8.2f}")
        out.append({"length": length, "ttft_ms": min(times), "bare_ms": min(bare)})
        s.call("DELETE", f"/v1/prefix_caches/len{length}")
    return out


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model")
    p.add_argument("--prompt", type=int, default=384)
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--out-tokens", type=int, default=16)
    p.add_argument("--bin", default=str(ROOT / "build/release"))
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
    s.model = model
    try:
        vocab = s.call("GET", "/v1/models")["data"][0]["limits"]["vocab_size"]
        s.complete(tokens(0, 32, vocab), loops=8, max_tokens=4) # warm
        result = resume(s, a.prompt, a.rounds, vocab, a.out_tokens)
        result["pool"] = pool(s, a.prompt, a.rounds, vocab)
        result["prefix"] = prefix(s, a.prompt, a.rounds, vocab)
        if a.json:
            print(json.dumps(result))
    finally:
        s.end()


NARROW = [x for k, v in {"hidden_size": 256, "intermediate_size": 768, "num_attention_heads": 4, "num_key_value_heads": 1,
                         "head_dim": 64, "vocab_size": 4096}.items() for x in ("--set", f"{k}={v}")]

if __name__ == "__main__":
    main()
