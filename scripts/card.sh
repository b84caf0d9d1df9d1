#!/usr/bin/env bash
# Proves and measures the CUDA backend on a machine with an NVIDIA GPU, in three parts: the first of at most five minutes, the others of nine.
#   scripts/card.sh correct|exact|fast --out DIR [--device cuda] [--small]
#     correct  kernels against double sums, every op and knob against the CPU, golden models, whole models, the daemon over HTTP;
#              memcheck, racecheck; and the CPU's own kernels, for that machine may have instructions that others lack
#     exact    reuse, chunks and batches change no bit: tiny and large models of every weight type
#     fast     the figures of tests/bench/results.md, on synthetic models of exact shape, and a PyTorch peer
#   --small    a short run of everything, to try the script itself (also with --device cpu)
# Logs go to DIR; a table comes last. Exit 0 only if nothing failed.
# Programs are taken from BIN_DIR (with lib/, golden/, demo-model/ beside them) if that is set, else from the build of this tree:
#   make build/release/{tinyloop,tinyloopd} build/release/tests/{check_backend,check_model,test_exactness,vectors_driver}
#   make FLAVOUR=test build/test/tests/test_cpu_{kernels,step}
# Environment: BIN_DIR; READ_GB_S, INT8_TOPS (ceilings, of an H200 by default); TIME_LIMIT (seconds); STEP_ROWS (of prefill, if not
#   the engine's own); PEER (path of a PyTorch peer to run beside "fast"); EXACT_COST (not empty: "fast" also compares with kernels that
#   may sum in any order; needs PyTorch and check_linear, check_attention in BIN_DIR); NVCC; PYTHON (one with numpy, pytest).
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1

part=${1:-} out="" device=cuda small=""
[[ "$part" =~ ^(correct|exact|fast)$ ]] || { sed -n '2,8p' "$0" | cut -c3- >&2; exit 2; }
shift
while [ $# -gt 0 ]; do
    case $1 in
        --out) out=${2:?}; shift 2 ;;
        --device) device=${2:?}; shift 2 ;;
        --small) small=1; shift ;;
        *) echo "card.sh: unknown option '$1'" >&2; exit 2 ;;
    esac
done
[ -n "$out" ] || { echo "card.sh: --out DIR is missing" >&2; exit 2; }
mkdir -p "$out" || exit 1
out=$(cd "$out" && pwd)
models=$(mktemp -d "${TMPDIR:-/tmp}/card.XXXXXX") || exit 1
trap 'rm -rf "$models"' EXIT
deadline=$((SECONDS + ${TIME_LIMIT:-$([ "$part" = correct ] && echo 300 || echo 530)}))
table=$out/$part.tsv
: >"$table"
libraries=${LD_LIBRARY_PATH:-} # of other programs
[ -z "${BIN_DIR:-}" ] || export LD_LIBRARY_PATH=$BIN_DIR/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}

pick() { if [ -n "$small" ]; then echo "$2"; else echo "$1"; fi; }

# Where a program or a folder is: in BIN_DIR, or its places in the tree, given in order.
find_of() {
    local name=$1 p
    shift
    for p in ${BIN_DIR:+"$BIN_DIR/$name"} "$@"; do
        [ -e "$p" ] && { echo "$p"; return; }
    done
}
tinyloop=$(find_of tinyloop build/release/tinyloop)
check_backend=$(find_of check_backend build/{release,test}/tests/check_backend)
check_model=$(find_of check_model build/{release,test}/tests/check_model)
test_exactness=$(find_of test_exactness build/{release,test}/tests/test_exactness)
vectors_driver=$(find_of vectors_driver build/{release,test}/tests/vectors_driver)
tinyloopd=$(find_of tinyloopd build/release/tinyloopd)
golden=$(find_of golden tests/golden)
demo=$(find_of demo-model config/demo-model)
python=${PYTHON:-$(find_of none build/venv/bin/python)}
python=${python:-python3}
nvcc=${NVCC:-$(command -v nvcc || find_of none /usr/local/cuda/bin/nvcc)}
sanitizer=$(command -v compute-sanitizer || find_of none /usr/local/cuda/bin/compute-sanitizer)
for p in tinyloop check_backend check_model test_exactness; do
    [ -n "${!p}" ] || { echo "card.sh: $p is not built; see the top of this script" >&2; exit 1; }
done

# run NAME SECONDS COMMAND...: at most so long and never past the deadline; one line of the table.
run() {
    local name=$1 limit=$2 rc=0 t=$SECONDS log line verdict
    shift 2
    log=$out/$part-${name//[^A-Za-z0-9._-]/_}.log
    [ $((deadline - SECONDS)) -ge "$limit" ] || limit=$((deadline - SECONDS))
    if [ "$limit" -lt 5 ]; then
        printf '%s\tNOT RUN\tno time left\t0 s\n' "$name" >>"$table"
        return
    fi
    timeout -k 5 "$limit" "$@" >"$log" 2>&1 || rc=$?
    line=$(grep -aE '[0-9]+ (passed|checks), [0-9]+ failed|[0-9]+ passed.* in |Checks: [0-9]+, Failures' "$log" | tail -n 1)
    case $rc in
        0) verdict=ok ;;
        124 | 137) verdict="TIMED OUT" ;;
        *) verdict="FAILED ($rc)" ;;
    esac
    printf '%s\t%s\t%s\t%d s\n' "$name" "$verdict" "$line" $((SECONDS - t)) >>"$table"
    [ "$rc" -eq 0 ] || { echo "---- $name: $verdict, from $log:"; grep -aE 'FAILED|differs|error|Error|ERROR' "$log" | head -n 15; tail -n 8 "$log"; }
}

synth() { # NAME PRESET TYPE [--set K=V]...
    local name=$1 preset=$2 type=$3
    shift 3
    "$tinyloop" synth --preset "$preset" --to "$type" --out "$models/$name" "$@" >>"$out/$part-synth.log" 2>&1 ||
        printf 'synth %s\tFAILED\t\t0 s\n' "$name" >>"$table"
}

# The parts of "correct" run side by side; each has processors of its own, for the CPU's threads wait for each other by spinning.
processors() { # FIRST-LAST
    [ "$(nproc)" -lt 16 ] || taskset -cp "$1" "$BASHPID" >/dev/null 2>&1
}

# Kernels by themselves: built here where there is a compiler, or brought along.
kernel_check() {
    local name=$1 prog
    shift
    prog=$(find_of "$name")
    if [ -z "$prog" ] && [ -n "$nvcc" ]; then
        prog=$models/$name
        run "build $name" 200 env LD_LIBRARY_PATH="$libraries" "$nvcc" -std=c++17 -O3 --fmad=false -gencode arch=compute_90a,code=sm_90a -Iengine -Icuda -o "$prog" "$@"
    fi
    if [ -x "$prog" ]; then run "$name" 90 "$prog"; fi
}

correct_kernels() {
    local prog
    [ "$device" = cuda ] || return 0
    kernel_check check_linear tests/cuda/check_linear.cu
    kernel_check check_attention tests/cuda/check_attention.cu cuda/attention*.cu
    prog=$(find_of check_draw build/release/tests/check_draw)
    if [ -n "$prog" ]; then run "tokens drawn" 60 "$prog"; fi
}

correct_ops() { # PART
    run "ops against cpu, $1" 280 "$check_backend" --device "$device" --only "$1" --random "$(pick 24 2)" --every "$(pick 1 12)"
}

correct_models() {
    local w g name
    for g in "$golden"/*/; do
        name=$(basename "$g")
        run "model $name" 60 "$check_model" --model "$g" --device "$device" --memory-mib 1024 --loops 1,2
        # At 8 loops huginn-tiny's random weights have magnified what F32 sums lose to 2.2e-2, measured against double sums.
        run "model $name, deep" 60 "$check_model" --model "$g" --device "$device" --memory-mib 1024 --loops 4,8 \
            --off "$([ "$name" = huginn-tiny ] && echo 5e-2 || echo 3e-4)"
    done
    for w in int4 int8 bf16 f32; do
        synth "tiny-$w" tiny "$w"
        run "model tiny, $w" 60 "$check_model" --model "$models/tiny-$w" --device "$device" --memory-mib 1024 --loops 1,4,9
    done
    for w in int8 int4; do
        g=$demo
        [ $w = int8 ] || g=$demo/int4
        run "demo model, $w" 120 "$check_model" --model "$g" --device "$device" --memory-mib 2048 --loops "$(pick 1,4,8 2)" \
            --text README.md
    done
    [ -z "$small" ] || return 0
    synth wide-int4 loop-block1 int4 --set vocab_size=4000
    run "model 3/1/4 of width 2048, int4" 120 "$check_model" --model "$models/wide-int4" --device "$device" --memory-mib 4096 --loops 2,8
}

correct_vectors() {
    "$python" -c 'import numpy' 2>/dev/null || return 0
    run "knobs against formulas" 280 env OPENBLAS_NUM_THREADS=1 "$python" tests/vectors/test_vectors.py --bin "$tinyloop" \
        --driver /nonexistent ${vectors_driver:+--serve "$vectors_driver"} --golden "$golden" --device "$device" \
        --jobs "$(pick 4 2)" --only "$(pick "" "windows")"
}

# Beside the other parts: on an idle card clearing and packing are over before the first step comes.
correct_first_steps() {
    local g
    [ -n "$vectors_driver" ] || return 0
    for g in ouro-tiny retrofit-olmo-tiny; do
        run "first steps of $g" 60 "$python" tests/cuda/first_step.py "$vectors_driver" "$golden/$g" "$device" "$(pick 60 5)"
    done
}

correct_processor() {
    local name prog
    for name in test_cpu_kernels test_cpu_step; do
        prog=$(find_of "$name" "build/test/tests/$name")
        if [ -n "$prog" ]; then run "$name, $(grep -qm1 avx512_vnni /proc/cpuinfo && echo AVX-512 || echo AVX2)" 120 "$prog"; fi
    done
    prog=$(find_of bench_gemm build/release/bench_gemm)
    if [ -n "$prog" ]; then run "CPU kernels beside oneDNN" 60 "$prog"; fi
}

# The tests of the daemon take the device from the environment; several daemons share a card.
correct_daemon() {
    [ -n "$tinyloopd" ] && "$python" -c 'import pytest' 2>/dev/null || return 0
    local parallel=() files=(tests/http/test_{reuse_exactness,lifecycle,shutdown}.py)
    printf '#!/bin/sh\nexport TINYLOOP_DEVICE=%s TINYLOOP_MEMORY_BYTES=1G\nexec "%s" "$@"\n' "$device" "$(realpath "$tinyloopd")" \
        >"$models/tinyloopd"
    chmod +x "$models/tinyloopd"
    "$python" -c 'import xdist' 2>/dev/null && parallel=(-n "$(pick 3 2)")
    [ -n "$small" ] || files+=(tests/http/test_{prefix_caches,resume_handles,stream}.py)
    run "daemon against command line" 140 env DEVICE="$device" TINYLOOP="$tinyloop" TINYLOOPD="$tinyloopd" \
        "$python" -m pytest -p no:cacheprovider -q "${parallel[@]}" tests/cuda/test_daemon.py
    run "daemon over HTTP" 140 env TINYLOOP="$tinyloop" TINYLOOPD="$models/tinyloopd" "$python" -m pytest -p no:cacheprovider -q \
        "${parallel[@]}" "${files[@]}"
}

sanitized() { # TOOL TYPE
    run "$1, tiny $2" 140 "$sanitizer" --tool "$1" --error-exitcode 9 "$tinyloop" generate --model "$models/san-$2" --device cuda \
        --memory-mib 512 --step-rows 256 --tokens "$(seq -s, 1 80)" --loops 2 --max-tokens 4 --ignore-eos --json
}

sanitized_ops() {
    run "memcheck, ops" 280 "$sanitizer" --tool memcheck --error-exitcode 9 "$check_backend" --only knobs --every 23 --random 0
}

part_correct() {
    if [ "$device" = cuda ] && [ -n "$sanitizer" ]; then # first: they take longest
        synth san-int4 tiny int4
        synth san-bf16 tiny bf16
        (processors 0-1; sanitized memcheck int4; sanitized memcheck bf16) &
        (processors 0-1; sanitized racecheck int4; sanitized racecheck bf16) &
        (processors 2-2; sanitized_ops) &
    fi
    (processors 2-3; correct_ops linear) &
    (processors 4-5; correct_ops knobs) &
    (processors 6-7; correct_ops shapes; correct_processor) &
    (processors 8-9; correct_kernels) &
    (processors 10-10; correct_models; correct_first_steps) &
    (processors 11-12; correct_vectors) &
    (processors 13-15; correct_daemon) &
    wait
}

exact_of() { # NAME COMPARISONS SECONDS MIB [OPTION...]
    local name=$1 comparisons=$2 seconds=$3 mib=$4
    shift 4
    run "exact $name" $((seconds + 60)) "$test_exactness" --model "$models/$name" --device "$device" --memory-mib "$mib" \
        --comparisons "$comparisons" --seconds "$seconds" "$@"
}

part_exact() {
    local w n t
    n=$(pick 12000 300)
    t=$(pick 90 15)
    (
        for w in int4 int8 bf16 f32; do
            synth "tiny-$w" tiny "$w"
            exact_of "tiny-$w" "$n" "$t" 1024
        done
    ) &
    (
        for w in diag plain ouro huginn retrofit-llama retrofit-olmo qwen3; do
            synth "$w" "tiny-$w" int8
            exact_of "$w" "$((n / 4))" "$((t / 2))" 1024
        done
    ) &
    (
        for w in f32 int4 int8 bf16; do # heads of 64, which the one-row kernel takes but in F32
            synth "narrow-$w" loop-block1 "$w" --set hidden_size=256 --set intermediate_size=704 --set num_attention_heads=8 \
                --set head_dim=64 --set vocab_size=1000
            exact_of "narrow-$w" "$((n / 4))" "$t" 2048 --step-rows "$(pick 600 256)"
            [ -z "$small" ] || exit 0
        done
        for w in int4 int8 bf16; do
            synth "wide-$w" loop-block1 "$w" --set hidden_size=1024 --set intermediate_size=2560 --set num_attention_heads=8 \
                --set num_key_value_heads=2 --set vocab_size=2000
            exact_of "wide-$w" "$n" "$t" 8192 --step-rows 600
            [ "$w" = bf16 ] && continue # norms behind products and loops, with few kv heads
            synth "norms-$w" tiny-ouro "$w" --set hidden_size=1024 --set intermediate_size=2560 --set num_attention_heads=8 \
                --set num_key_value_heads=2 --set head_dim=128 --set vocab_size=2000
            exact_of "norms-$w" "$n" "$t" 8192 --step-rows 600
        done
    ) &
    (
        [ -z "$small" ] || exit 0
        for w in int4 int8 bf16; do
            synth "full-$w" loop-block1 "$w" --set vocab_size=4000
            exact_of "full-$w" "$n" "$t" 16384
        done
        exact_of full-int4 "$n" "$t" 16384 --step-rows 2048 --seed 5
    ) &
    wait
}

bench() { # NAME MODEL WHAT SECONDS OPTION...
    local name=$1 model=$2 what=$3 limit=$4
    shift 4
    run "$name" "$limit" "$tinyloop" bench "$what" --model "$models/$model" --device "$device" --runs "$(pick 5 1)" \
        --read-ceiling "${READ_GB_S:-4660}" --int8-ceiling "$((${INT8_TOPS:-1979} * 1000))" "$@"
}

# figure WHAT LOG METRIC MUST AIM HIGH|LOW: one row of the figures, with the verdict on MUST.
figure() {
    awk -v what="$1" -v metric="$3" -v must="$4" -v aim="$5" -v sense="$6" '
        $1 == metric { v = $2; unit = $3; of = ""; for (i = 4; i <= NF; i++) of = of (of == "" ? "" : " ") $i
                       if (sense == "ratio") { v = $4 / 100; unit = "x" } }
        END { if (v == "") { printf "| %s | - | %s | %s | not measured |\n", what, must, aim; exit }
              met = sense == "high" ? v >= must : v <= must
              printf "| %s | %.5g %s | %s%s | %s | %s |\n", what, v, unit, must, (met ? "" : " (missed)"), aim, of }' \
        "$out/fast-$2.log" 2>/dev/null || echo "| $1 | - | $4 | $5 | not measured |"
}

exact_cost() {
    local linear attention
    linear=$(find_of check_linear) attention=$(find_of check_attention)
    [ -n "$linear" ] && [ -n "$attention" ] || return 0
    run "times of products" 60 "$linear" time
    run "times of attention" 60 "$attention" times
    run "cost of exactness" 60 env LD_LIBRARY_PATH="$libraries" python3 tests/cuda/bench_exact.py \
        --linear "$out/fast-times_of_products.log" --attention "$out/fast-times_of_attention.log"
}

part_fast() {
    local n prompt narrow=() rows=(${STEP_ROWS:+--step-rows "$STEP_ROWS"})
    prompt=$(pick 4096 512)
    [ -z "$small" ] || narrow=(--set hidden_size=256 --set intermediate_size=704 --set head_dim=32 --set vocab_size=1000)
    synth loop loop-407m int4 "${narrow[@]}" &
    synth block1 loop-block1 int4 "${narrow[@]}" &
    [ -n "$small" ] || synth ouro-int4 ouro-1.4b int4 &
    [ -n "$small" ] || synth ouro-bf16 ouro-1.4b bf16 &
    wait
    bench loop loop decode,steps 90 --loops 8 --prompt "$prompt" --tokens "$(pick 220 8)" --context "$(pick 512 64)"
    bench many loop streams,clones 90 --loops 8 --streams 64 --prompt "$prompt" --context "$(pick 512 64)" --tokens "$(pick 24 8)"
    for n in 2 4 8 16; do
        bench "streams-$n" loop streams 30 --loops 8 --streams "$n" --context "$(pick 256 64)" --tokens "$(pick 40 8)"
    done
    bench block1 block1 decode 60 --loops 8 --tokens "$(pick 220 8)"
    bench prefill loop prefill 60 --loops 8 --prompt "$prompt" "${rows[@]}"
    bench reuse loop reuse 60 --loops 8 --from-loops 4 --prompt "$(pick 2048 256)" "${rows[@]}"
    bench exact loop exact 60 --loops 8 --prompt 128
    if [ -z "$small" ]; then
        bench ouro-int4 ouro-int4 decode 90 --loops 4 --tokens 220
        bench ouro-bf16 ouro-bf16 decode 90 --loops 4 --tokens 220
    fi
    [ -z "${EXACT_COST:-}" ] || exact_cost
    [ -z "${PEER:-}" ] || run peer 200 env LD_LIBRARY_PATH="$libraries" python3 "$PEER"
    {
        echo "| what | figure | must | aim | of |"
        echo "|---|---|---|---|---|"
        figure "loop-407m INT4, loops 8, 1 stream, tokens/s" loop decode 3500 5480 high
        figure "its weights, read from memory" loop decode_weight_stream 0 4660 high
        figure "work of the host for a token" loop decode_host_work 50 10 low
        figure "loop-block1 INT4, loops 8, 1 stream" block1 decode 7000 11000 high
        figure "ouro-1.4b INT4, 4 loops, 1 stream" ouro-int4 decode 1000 1400 high
        figure "ouro-1.4b BF16, 4 loops, 1 stream" ouro-bf16 decode 300 360 high
        for n in 2 4 8 16; do
            figure "a step of $n streams, ctx 256" "streams-$n" streams_step - - high
        done
        figure "64 streams, ctx 512" many "streams_64_ctx_$(pick 512 64)" 35000 70000 high
        figure "64 clones of one 512-token prefix" many "clones_64_of_$(pick 512 64)_tokens" 60000 140000 high
        figure "prefill of $prompt tokens" prefill prefill 80000 200000 high
        figure "prefix hit to first launch, 64 tokens" loop hit_to_launch_of_64_tokens 50 15 low
        figure "prefix hit to first launch, $prompt tokens" loop "hit_to_launch_of_${prompt}_tokens" 50 15 low
        figure "16 tokens against one decode step" loop step_of_16_tokens 1.5 1.15 ratio
        figure "resume 4 to 8 saves" reuse resume_saves 45 48 high
        figure "resumed bits equal" reuse resume_equal_bits 1 1 high
        figure "pause between two tokens of a stream" loop pause_between_tokens 10 1 low
    } >"$out/fast.md"
}

[ "$device" != cuda ] || nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader 2>&1 | tee "$out/card.txt"
"part_$part"
echo
column -t -s $'\t' "$table" 2>/dev/null || cat "$table"
if [ "$part" = fast ]; then
    echo
    cat "$out/fast.md"
    grep -ah 'tok/s' "$out/fast-peer.log" 2>/dev/null
    grep -ah 'in the median' "$out/fast-cost_of_exactness.log" 2>/dev/null
fi
if grep -qE 'FAILED|TIMED OUT|NOT RUN' "$table" || [ ! -s "$table" ]; then
    echo "card $part: something failed, see above ($SECONDS s)"
    exit 1
fi
echo "card $part: all held ($SECONDS s)"
