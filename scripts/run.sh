#!/usr/bin/env bash
# Serve the bundled model on 127.0.0.1:8080, from a bare Debian 12 on: installs what is missing, builds, starts, and prints
# a request to try. Further arguments go to tinyloopd; MODEL=DIR serves another model, PORT=N listens elsewhere.
set -euo pipefail
cd "$(dirname "$0")/.."

model=${MODEL:-config/demo-model}
port=${PORT:-8080}
daemon=build/release/tinyloopd

scripts/setup.sh --check >/dev/null 2>&1 || scripts/setup.sh
echo "run: building"
make -s -j"$(nproc)" all
[ -f "$model/config.json" ] || { echo "run.sh: there is no model in $model (set MODEL to its directory)" >&2; exit 2; }

"$daemon" --model "$model" --port "$port" "$@" &
pid=$!
# The daemon drains on a signal; this script ends with it and hands its exit code on.
trap 'kill -TERM $pid 2>/dev/null || true' INT TERM

name=$(basename "$(cd "$model" && pwd)")
for _ in $(seq 600); do
    kill -0 "$pid" 2>/dev/null || break
    if "$daemon" --port "$port" --healthcheck >/dev/null 2>&1; then
        cat <<TEXT

Ready. Try, in another terminal:

  curl http://127.0.0.1:$port/v1/completions -H 'Content-Type: application/json' \\
    -d '{"model": "$name", "prompt": "Once upon a time", "max_tokens": 60, "temperature": 0.7}'

The same as a stream of events: add "stream": true (and curl -N). Ctrl-C ends the server.

TEXT
        break
    fi
    sleep 0.2
done

code=0
while kill -0 "$pid" 2>/dev/null; do
    code=0
    wait "$pid" || code=$?
done
exit "$code"
