#!/usr/bin/env bash
# The tree speaks of the project alone, and its parts include only what lies below them.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
passed=0
failed=0
check() { # NAME, what must print nothing
    local name=$1 out
    shift
    out=$("$@" 2>/dev/null)
    if [ -z "$out" ]; then
        passed=$((passed + 1))
    else
        failed=$((failed + 1))
        printf '%s:\n%s\n' "$name" "$out"
    fi
}
self=':!scripts/check_words.sh'
check "unfinished marks" git grep -nIE '\b(T[O]DO|F[I]XME|X[X]X|H[A]CK)\b' -- '*.c' '*.h' '*.cu' '*.cuh' '*.py' '*.sh' Makefile "$self"
check "paths of one machine" git grep -nIE '/h[o]me/[a-z]|/r[o]ot/|/w[o]rk/' -- . "$self"
check "engine/ knows neither server/ nor the HTTP libraries" git grep -nE '#include [<"]((\.\./)?server/|microhttpd|uv\.h)' -- engine cuda
check "microhttpd.h is included in server/http alone" bash -c "git grep -lE '#include <microhttpd.h>' -- '*.c' '*.h' | grep -v '^server/http' | grep -v '^tests/'"
check "libm in the numeric path" git grep -nE '\b(expf|sinf|cosf|powf|logf|tanhf)\(' -- 'engine/*.c' 'engine/*.h' 'engine/cpu/*'
big=$(git ls-files '*.c' '*.h' '*.cu' '*.cuh' '*.py' | xargs -r wc -l | awk '$2 != "total" && $1 > 800')
check "files past 800 lines" echo "$big"
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
