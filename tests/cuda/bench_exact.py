#!/usr/bin/env python3
"""tests/cuda/bench_exact.py - what exactness costs in time, on a card, beside kernels that are free to sum as they like.

    bench_exact.py --linear LOG --attention LOG

The logs are what check_linear (or "check_linear time") and check_attention print there. Beside them, of the same shapes in the same
state of the card: PyTorch's BF16 product (cuBLASLt, sums of F32, F32 out), and PyTorch's attention of one query per sequence over
contiguous F16 keys (the faster of flash, which splits keys as it sees fit, and cuDNN), each as a captured graph. Products are
stored and no more on both sides: neither adds to a stream nor gates. Weights, keys and values rotate through more memory than the
L2 cache holds, as in those programs. Our attention also finishes q, k and v (norm, rope, store); theirs only attends.

Prints a table and the median of the ratios; a ratio of 1.08 is a cost of 8 %. Needs PyTorch with CUDA."""

import argparse
import re
import statistics

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

POOL = 512 << 20  # bytes, as in check_linear
HEADS, KV_HEADS, WIDTH = 16, 4, 128  # as in check_attention


def median_us(calls):
    """Of one call, in a graph of all of them."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls[:3]:
            call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for call in calls:
                call()
        times = []
        for i in range(9):
            a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            a.record()
            graph.replay()
            b.record()
            b.synchronize()
            if i > 1:
                times.append(a.elapsed_time(b) * 1000 / len(calls))
    return statistics.median(times)


def linear_times(path):
    """{(outputs, inputs, rows): microseconds} of the tile that is chosen, of the BF16 table."""
    out, table, column = {}, None, None
    for line in open(path):
        head = re.match(r"(\w+): microseconds per launch", line)
        if head:
            table = head[1]
        elif line.split()[:3] == ["N", "K", "M"]:
            column = line.split().index("chosen")
        elif table == "bf16" and re.match(r" *\d+ +\d+ +\d+ ", line):
            fields = line.split()
            out[tuple(map(int, fields[:3]))] = float(fields[column])
    return out


def attention_times(path):
    """{(sequences, keys): microseconds} of single rows."""
    out = {}
    for line in open(path):
        m = re.match(r"(\d+) rows?, ctx (\d+) +class \w+ +([\d.]+) us", line)
        if m:
            out[int(m[1]), int(m[2])] = float(m[3])
    return out


def linear_free(n_out, n_in, rows):
    copies = max(1, POOL // (2 * n_out * n_in))
    pool = torch.randn(copies, n_out, n_in, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(rows, n_in, device="cuda", dtype=torch.bfloat16)
    n = 4 if rows > 1024 else 24
    try:
        out = torch.empty(rows, n_out, device="cuda", dtype=torch.float32)
        torch.mm(x, pool[0].T, out_dtype=torch.float32, out=out)
        calls = [lambda i=i: torch.mm(x, pool[i % copies].T, out_dtype=torch.float32, out=out) for i in range(n)]
    except (TypeError, RuntimeError):  # BF16 out: fewer bytes than ours
        out = torch.empty(rows, n_out, device="cuda", dtype=torch.bfloat16)
        calls = [lambda i=i: torch.mm(x, pool[i % copies].T, out=out) for i in range(n)]
    return median_us(calls)


def attention_free(n_seqs, keys):
    size = n_seqs * KV_HEADS * keys * WIDTH
    copies = 2 if keys * n_seqs < 1 << 18 else 1  # check_attention has two slots
    q = torch.randn(n_seqs, HEADS, 1, WIDTH, device="cuda", dtype=torch.float16)
    kv = torch.randn(copies, 2, size, device="cuda", dtype=torch.float16).view(copies, 2, n_seqs, KV_HEADS, keys, WIDTH)
    best, name = float("inf"), "-"
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
        try:
            with sdpa_kernel([backend]):
                calls = [lambda i=i: F.scaled_dot_product_attention(q, kv[i % copies, 0], kv[i % copies, 1], enable_gqa=True)
                         for i in range(20)]
                us = median_us(calls)
        except RuntimeError:
            continue
        if us < best:
            best, name = us, backend.name.split("_")[0].lower()
    return best, name


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--linear")
    parser.add_argument("--attention")
    args = parser.parse_args()
    torch.manual_seed(1)
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}")
    ratios = {}
    if args.linear:
        print(f"{'BF16 product':24} {'exact us':>9} {'free us':>9} {'ratio':>6}")
        for (n_out, n_in, rows), us in linear_times(args.linear).items():
            if rows < 16:
                continue  # a product of few rows is another kernel here
            free = linear_free(n_out, n_in, rows)
            ratios.setdefault("products of 16 to 256 rows" if rows <= 256 else "products of 512 rows and more", []).append(us / free)
            print(f"{n_out:6} x {n_in:5}, {rows:5} rows {us:9.2f} {free:9.2f} {us / free:6.2f}", flush=True)
    if args.attention:
        print(f"{'attention':24} {'exact us':>9} {'free us':>9} {'ratio':>6}")
        for (n_seqs, keys), us in attention_times(args.attention).items():
            if keys < 256:
                continue
            free, name = attention_free(n_seqs, keys)
            ratios.setdefault("attention of single rows", []).append(us / free)
            print(f"{n_seqs:4} rows, {keys:6} keys {us:13.2f} {free:9.2f} {us / free:6.2f}  {name}", flush=True)
    for name, of in ratios.items():
        print(f"{name}: {statistics.median(of):.2f} in the median of {len(of)}, {min(of):.2f} to {max(of):.2f}")


if __name__ == "__main__":
    main()
