#!/usr/bin/env bash
# The long tests: exactness at full length on every weight type and architecture, fuzzing, load, training in miniature. About an hour on two cores.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
scripts/setup.sh --dev || exit 1
make -j"$(nproc)" FLAVOUR=test all tests || exit 1
fail=0
for w in int4 int8 bf16 f32; do
    dir=build/tiny-$w
    [ -d "$dir" ] || build/test/tinyloop synth --preset tiny --to "$w" --out "$dir" >/dev/null
    build/test/tests/test_exactness --model "$dir" --comparisons 20000 --seed 7 || fail=1
done
for g in tests/golden/*/; do
    build/test/tests/test_exactness --model "$g" --comparisons 5000 || fail=1
done
make -j"$(nproc)" fuzz || fail=1
for f in build/fuzz/fuzz_*; do
    [ -x "$f" ] || continue
    corpus=build/fuzz/corpus-$(basename "$f")
    mkdir -p "$corpus"
    "$f" -max_total_time="${FUZZ_SECONDS:-120}" -rss_limit_mb=4096 -print_final_stats=1 "$corpus" || fail=1
done
OPENBLAS_NUM_THREADS=1 /usr/bin/python3 scripts/train_demo/smoke.py || fail=1
if [ -x tests/load/soak.sh ]; then
    make -j"$(nproc)" FLAVOUR=release all tests && tests/load/soak.sh || fail=1
fi
[ "$fail" -eq 0 ] && echo "soak: everything held" || echo "soak: something failed, see above"
exit "$fail"
