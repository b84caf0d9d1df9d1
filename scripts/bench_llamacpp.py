#!/usr/bin/env python3
"""Speed beside llama.cpp, in one run, on the same weights and the same threads.

    scripts/bench_llamacpp.py --gguf SmolLM2-135M-Instruct.Q4_1.gguf --int4 DIR [--int8 DIR] [--threads 2] [--rounds 5]

INT4 of tinyloop (scripts/fetch_smollm2.py, then `tinyloop quantize`) stands against the Q4_1 file, INT8 against Q8_0, which is
made from it here. The two programs take turns, round by round, so that whatever else the machine does meets both; printed are
the best and the median of the rounds. Measured: prompt tokens/s, decoded tokens/s, and the time to the first token of a prompt
whose first part is cached (a prefix cache; llama.cpp: its state, kept). tinyloopd answers
over HTTP, the way it is used; llama.cpp runs inside this process. Bytes per token are the weights that one decoded token reads. Needs llama-cpp-python and numpy.
"""
import argparse
import ctypes
import json
import os
import pathlib
import re
import statistics
import subprocess
import tempfile
import time
import urllib.request

import llama_cpp
import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[1]
PREFIX, SUFFIX = 512, 16


class Llama:
    def __init__(self, path, threads):
        self.llm = llama_cpp.Llama(str(path), n_ctx=2048, n_batch=512, n_threads=threads, n_threads_batch=threads, verbose=False)
        self.vocab = self.llm.n_vocab()
        self.tokens = [(i * 7919 + 13) % 40000 + 100 for i in range(PREFIX + SUFFIX)]

    def argmax(self):
        logits = llama_cpp.llama_get_logits_ith(self.llm._ctx.ctx, -1)
        return int(np.argmax(np.ctypeslib.as_array(ctypes.cast(logits, ctypes.POINTER(ctypes.c_float)), (self.vocab,))))

    def prefill(self, n):
        self.llm.reset()
        start = time.perf_counter()
        self.llm.eval(self.tokens[:n])
        self.argmax()
        return n / (time.perf_counter() - start)

    def decode(self, n):
        self.llm.reset()
        self.llm.eval(self.tokens[:32])
        token = self.argmax()
        start = time.perf_counter()
        for _ in range(n):
            self.llm.eval([token])
            token = self.argmax()
        return n / (time.perf_counter() - start)

    def cached_ms(self):
        if self.llm.n_tokens != PREFIX + SUFFIX:  # once: compute the prefix
            self.llm.reset()
            self.llm.eval(self.tokens)
        self.llm.n_tokens = PREFIX
        start = time.perf_counter()
        self.llm.eval(self.tokens[PREFIX:])
        self.argmax()
        return (time.perf_counter() - start) * 1e3


class Ours:
    def __init__(self, model, threads, bin_dir):
        self.model, self.threads, self.bin = pathlib.Path(model), threads, pathlib.Path(bin_dir)
        self.tokens = [(i * 7919 + 13) % 40000 + 100 for i in range(PREFIX + SUFFIX)]
        self.daemon = None

    def ask(self, tokens, max_tokens, **fields):
        if not self.daemon:
            self.start()
        return self.post("/v1/completions", {"model": self.model.name, "prompt": tokens, "max_tokens": max_tokens, "temperature": 0,
                                             "ignore_eos": True, "pool": "off", **fields})

    def prefill(self, n):
        start = time.perf_counter()
        self.ask(self.tokens[:n], 1)
        return n / (time.perf_counter() - start)

    def decode(self, n):
        """The first token comes with the prompt: n more are timed."""
        return n / self.ask(self.tokens[:32], n + 1)["tinyloop"]["timings"]["decode_ms"] * 1e3

    def post(self, path, body, method="POST"):
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"},
                                         method=method)
        return json.loads(urllib.request.urlopen(request, timeout=120).read())

    def start(self):
        log = tempfile.NamedTemporaryFile("w+", suffix=".log")
        self.daemon = subprocess.Popen([self.bin / "tinyloopd", "--model", self.model, "--threads", str(self.threads), "--port", "0",
                                        "--admin-port", "0", "--max-seq-len", "2048"], stdout=log, stderr=subprocess.STDOUT)
        for _ in range(600):
            text = pathlib.Path(log.name).read_text()
            if " ready " in text:
                break
            time.sleep(0.1)
        self.port = int(re.search(r"listening on http://[^ :\"]+:(\d+)", text)[1])
        self.post("/v1/prefix_caches/bench", {"prompt": self.tokens[:PREFIX]}, "PUT")

    def cached_ms(self):
        start = time.perf_counter()
        reply = self.ask(self.tokens[PREFIX:], 1, prefix_cache="bench", pool=None)
        ms = (time.perf_counter() - start) * 1e3
        assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == PREFIX, reply
        return ms

    def stop(self):
        if self.daemon:
            self.daemon.terminate()
            self.daemon.wait()


def weight_bytes(path):
    """What a decoded token reads: everything but an embedding that is not the head, too (here it is)."""
    if path.is_file():
        return path.stat().st_size
    return sum(f.stat().st_size for f in path.glob("*.safetensors"))


def requantize(gguf, out):
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0
    params.allow_requantize = True
    if llama_cpp.llama_model_quantize(str(gguf).encode(), str(out).encode(), ctypes.byref(params)) != 0:
        raise SystemExit(f"bench_llamacpp: {gguf} could not be written as Q8_0")


def compare(label, ours, llama, rounds, decode_tokens):
    print(f"\n{label}: {weight_bytes(ours.model) / 1e6:.1f} MB against {weight_bytes(pathlib.Path(llama.llm.model_path)) / 1e6:.1f} MB per decoded token")
    ratios = {}
    for name, call, better in ((f"prompt {PREFIX}, tokens/s", lambda x: x.prefill(PREFIX), max),
                               ("decode, tokens/s", lambda x: x.decode(decode_tokens), max),
                               (f"first token after {PREFIX} cached + {SUFFIX}, ms", lambda x: x.cached_ms(), min)):
        call(llama), call(ours)  # to warm up
        a, b = [], []
        for _ in range(rounds):
            a.append(call(ours))
            b.append(call(llama))
        sign = 1 if better is max else -1
        ratios[name] = ((better(a) / better(b)) ** sign, (statistics.median(a) / statistics.median(b)) ** sign)
        print(f"  {name:42} tinyloop {better(a):9.2f} (median {statistics.median(a):9.2f})   llama.cpp {better(b):9.2f} "
              f"(median {statistics.median(b):9.2f})   ratio {ratios[name][0]:.2f} (median {ratios[name][1]:.2f})")
    ours.stop()
    return ratios


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--gguf", required=True, type=pathlib.Path)
    p.add_argument("--int4", type=pathlib.Path)
    p.add_argument("--int8", type=pathlib.Path)
    p.add_argument("--bin", default=ROOT / "build/release", help="folder with tinyloop and tinyloopd")
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--decode", type=int, default=32, help="tokens to decode a round")
    p.add_argument("--json", help="write the ratios there")
    a = p.parse_args()
    print(f"llama-cpp-python {llama_cpp.__version__}, {llama_cpp.llama_print_system_info().decode().strip()}")
    print(f"{a.threads} threads, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the start")
    result = {}
    with tempfile.TemporaryDirectory() as folder:
        if a.int4:
            result["int4 / Q4_1"] = compare("INT4 against Q4_1", Ours(a.int4, a.threads, a.bin), Llama(a.gguf, a.threads), a.rounds, a.decode)
        if a.int8:
            q8 = pathlib.Path(folder) / "q8_0.gguf"
            requantize(a.gguf, q8)
            result["int8 / Q8_0"] = compare("INT8 against Q8_0", Ours(a.int8, a.threads, a.bin), Llama(q8, a.threads), a.rounds, a.decode)
    print(f"load {os.getloadavg()[0]:.1f} at the end")
    if a.json:
        pathlib.Path(a.json).write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
