#!/usr/bin/env bash
# Every quick test, from a bare Debian 12 on: installs what is missing, builds, runs, counts.
#   scripts/test.sh                         the quick tests (release and test builds)
#   scripts/test.sh --sanitizer asan|tsan   unit tests and a short exactness run under a sanitizer
# Ends with one line "N passed, N failed"; exit 0 only if nothing failed.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1

sanitizer=""
case "${1:-}" in
    "") ;;
    --sanitizer) sanitizer=${2:-}; [[ "$sanitizer" =~ ^(asan|tsan)$ ]] || { echo "test.sh: --sanitizer takes asan or tsan" >&2; exit 2; } ;;
    *) echo "test.sh: unknown option '$1'" >&2; exit 2 ;;
esac

jobs=$(nproc)
passed=0
failed=0
log=build/test-logs
start=$SECONDS

# run NAME COMMAND...: counts come from the closing line of Check ("Checks: n, Failures: n, Errors: n"), of pytest
# ("n passed, n failed") or of our own programs ("N passed, N failed"). No count and a bad exit code are failures.
run() {
    local name=$1 out p=0 f=0 rc=0 t=$SECONDS
    shift
    out=$log/${name//[^A-Za-z0-9._-]/_}.log
    timeout -k 10 "${LIMIT:-600}" "$@" >"$out" 2>&1 || rc=$?
    if line=$(grep -aE 'Checks: [0-9]+, Failures: [0-9]+, Errors: [0-9]+' "$out" | tail -n 1) && [ -n "$line" ]; then
        local n fl er
        n=$(sed -E 's/.*Checks: ([0-9]+).*/\1/' <<<"$line")
        fl=$(sed -E 's/.*Failures: ([0-9]+).*/\1/' <<<"$line")
        er=$(sed -E 's/.*Errors: ([0-9]+).*/\1/' <<<"$line")
        f=$((fl + er))
        p=$((n - f))
    else
        line=$(grep -aE '[0-9]+ (passed|failed)' "$out" | tail -n 1)
        p=$(grep -oE '[0-9]+ passed' <<<"$line" | grep -oE '[0-9]+' || echo 0)
        f=$(grep -oE '[0-9]+ (failed|error)' <<<"$line" | grep -oE '[0-9]+' | head -n 1 || echo 0)
        p=${p:-0}
        f=${f:-0}
    fi
    [ "$rc" -ne 0 ] && [ "$f" -eq 0 ] && f=1
    [ "$p" -eq 0 ] && [ "$f" -eq 0 ] && f=1
    passed=$((passed + p))
    failed=$((failed + f))
    printf '%-34s %6d passed %4d failed  %4d s\n' "$name" "$p" "$f" $((SECONDS - t))
    [ "$f" -eq 0 ] || { echo "---- $name (exit $rc), end of $out:"; tail -n 40 "$out"; echo "----"; }
}

finish() {
    echo "all in $((SECONDS - start)) s"
    echo "$passed passed, $failed failed"
    [ "$failed" -eq 0 ]
    exit
}

build() { # FLAVOUR TARGET...
    local flavour=$1
    shift
    echo "== build $flavour"
    if ! make -j"$jobs" FLAVOUR="$flavour" "$@" >"$log/build-$flavour.log" 2>&1; then
        tail -n 30 "$log/build-$flavour.log"
        failed=$((failed + 1))
        finish
    fi
}

unit_tests() {
    local t
    for t in build/"$1"/tests/test_*; do
        if [[ -f "$t" && -x "$t" && "$t" != */test_exactness ]]; then
            run "$1/$(basename "$t")" "$t"
        fi
    done
}

# Exactness on every weight type of a random model: comparisons per type.
exactness() {
    local flavour=$1 comparisons=$2 w dir
    for w in int4 int8 bf16 f32; do
        dir=build/tiny-$w
        [ -d "$dir" ] || "build/$flavour/tinyloop" synth --preset tiny --to "$w" --out "$dir" >/dev/null
        run "$flavour/exactness-$w" "build/$flavour/tests/test_exactness" --model "$dir" --comparisons "$comparisons"
    done
}

mkdir -p "$log"
if [ -n "$sanitizer" ]; then
    scripts/setup.sh --dev || exit 1
    build "$sanitizer" all tests
    export ASAN_OPTIONS=detect_leaks=1:allocator_may_return_null=1 UBSAN_OPTIONS=print_stacktrace=1
    export TSAN_OPTIONS=halt_on_error=1 CK_TIMEOUT_MULTIPLIER=10
    LIMIT=1800 unit_tests "$sanitizer"
    LIMIT=1800 exactness "$sanitizer" 300
    finish
fi

scripts/setup.sh --test || exit 1
build release all man
build test all tests
run words scripts/check_words.sh
unit_tests test
exactness test 2500
if [ -n "$(command -v nvcc || ls /usr/local/cuda/bin/nvcc 2>/dev/null)" ]; then
    build release build/release/tests/cuda_faults
    run cuda-faults build/release/tests/cuda_faults build/tiny-int4 build/tiny-bf16
fi
run vectors build/venv/bin/python tests/vectors/test_vectors.py --bin build/release/tinyloop
run ask build/venv/bin/python tests/ask/test_ask.py --bin build/release/tinyloop
run parcae build/venv/bin/python tests/parcae/test_parcae.py --bin build/release/tinyloop
run calibrate build/venv/bin/python tests/quantize/test_calibrate.py --bin build/release/tinyloop
run tokenizer build/venv/bin/python tests/tokenizer/test_tokenizer_equal.py --bin build/test/tests/tokenizer_driver
run grammar build/venv/bin/python tests/grammar/test_grammar_equal.py --bin build/test/tests/grammar_driver
run schema-suite build/venv/bin/python tests/grammar/test_schema_suite.py --bin build/test/tests/grammar_driver
run chat-templates build/venv/bin/python tests/chat/test_chat_equal.py --bin build/test/tests/chat_driver --template config/demo-model/tokenizer_config.json
run command-line tests/cli/test_cli.sh build/release/tinyloop
if [ -x build/release/tinyloopd ]; then
    TINYLOOPD=build/release/tinyloopd TINYLOOP=build/release/tinyloop \
        run http build/venv/bin/python -m pytest -q -p no:cacheprovider tests/http
    TINYLOOPD=build/release/tinyloopd TINYLOOP=build/release/tinyloop \
        run openapi build/venv/bin/python -m pytest -q -p no:cacheprovider tests/openapi
    run man tests/man/test_man.sh build/release
fi
finish
