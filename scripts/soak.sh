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
for seed in 2 3; do
    build/venv/bin/python tests/grammar/test_grammar_equal.py --bin build/test/tests/grammar_driver --seed "$seed" \
        --schemas 10000 --soups 30000 --regexes 3000 || fail=1
done
build/venv/bin/python tests/grammar/test_schema_suite.py --bin build/test/tests/grammar_driver --walks 100 || fail=1
# The comparison of devices must see a wrong rule: the CPU's own attention is not the one of CUDA.
grep -q 'the typical row is off' <(build/test/tests/check_backend --device cpu --only shapes --rule half) || fail=1
make -j"$(nproc)" FLAVOUR=release all || fail=1
TINYLOOP_DAMAGE=5000 build/venv/bin/python -m pytest -q -p no:cacheprovider tests/http/test_damage.py -k random || fail=1
TINYLOOP_GENERATED=2500 build/venv/bin/python -m pytest -q -p no:cacheprovider tests/openapi || fail=1
make -j"$(nproc)" fuzz || fail=1
for f in build/fuzz/fuzz_*; do
    [ -x "$f" ] || continue
    corpus=build/fuzz/corpus-$(basename "$f")
    mkdir -p "$corpus"
    "$f" -max_total_time="${FUZZ_SECONDS:-120}" -rss_limit_mb=4096 -print_final_stats=1 "$corpus" || fail=1
done
if nvidia-smi >/dev/null 2>&1; then
    make -j"$(nproc)" build/release/tinyloop build/release/tests/{check_backend,check_model,test_exactness,vectors_driver} || fail=1
    for part in correct exact; do
        scripts/card.sh "$part" --out build/card || fail=1
    done
fi
OPENBLAS_NUM_THREADS=1 /usr/bin/python3 scripts/train_demo/smoke.py || fail=1
if [ -x tests/load/soak.sh ]; then
    make -j"$(nproc)" FLAVOUR=release all build/release/tests/load && tests/load/soak.sh || fail=1
fi
build/venv/bin/python -m pytest -q -p no:cacheprovider tests/operations || fail=1
build/venv/bin/python tests/scaleout/run.py || fail=1
[ "$fail" -eq 0 ] && echo "soak: everything held" || echo "soak: something failed, see above"
exit "$fail"
