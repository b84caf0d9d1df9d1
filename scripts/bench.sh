#!/usr/bin/env bash
# Figures of the CPU backend on synthetic models of exact shape, as JSON lines, with ratios to ceilings measured in the same run.
#   scripts/bench.sh [DIR]    DIR keeps the models between runs (default build/bench)
set -euo pipefail
cd "$(dirname "$0")/.."
dir=${1:-build/bench}
bin=build/release/tinyloop
mkdir -p "$dir"
for w in int4 int8; do
    [ -d "$dir/loop-407m-$w" ] || $bin synth --preset loop-407m --to "$w" --out "$dir/loop-407m-$w" >/dev/null
done
build/release/bench_gemm
build/release/bench_grammar 2000
for w in int4 int8; do
    for what in decode prefill reuse exact; do
        $bin bench "$what" --model "$dir/loop-407m-$w" --loops 8 --json
    done
done
$bin bench reuse --model "$dir/loop-407m-int4" --loops 8 --prompt 4096 --runs 1 --json
