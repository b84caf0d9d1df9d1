#!/usr/bin/env bash
# The command line from outside: exit codes 0, 1, 2, messages that name what is wrong, output that scripts can read.
#   test_cli.sh BIN
set -uo pipefail
bin=$(realpath "$1")
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
passed=0
failed=0

# expect NAME CODE PATTERN COMMAND...: exit code and a pattern in stdout or stderr
expect() {
    local name=$1 code=$2 pattern=$3 out rc=0
    shift 3
    out=$("$@" 2>&1) || rc=$?
    if [ "$rc" -eq "$code" ] && grep -qE -- "$pattern" <<<"$out"; then
        passed=$((passed + 1))
    else
        failed=$((failed + 1))
        printf 'FAILED %s: exit %d (expected %d), pattern %s, output:\n%s\n' "$name" "$rc" "$code" "$pattern" "$(head -c 600 <<<"$out")"
    fi
}

model=$tmp/tiny
expect "synth writes a model" 0 'tiny' "$bin" synth --preset tiny --to int4 --out "$model"
expect "synth refuses to overwrite" 2 'exists' "$bin" synth --preset tiny --to int4 --out "$model"
expect "unknown preset" 2 'nonesuch' "$bin" synth --preset nonesuch --to int4 --out "$tmp/x"
expect "no command" 2 'usage' "$bin"
expect "unknown command" 2 'frobnicate' "$bin" frobnicate
expect "version" 0 '^tinyloop [0-9]+\.[0-9]+' "$bin" --version
for c in generate logits tokenize inspect quantize synth bench; do
    expect "$c --help has an example" 0 'tinyloop '"$c" "$bin" "$c" --help
    expect "$c names an unknown option" 2 'no-such-option' "$bin" "$c" --no-such-option
done
expect "inspect" 0 'prelude' "$bin" inspect --model "$model"
expect "generate is JSON on demand" 0 '^\{"text":"","tokens":\[[0-9,]+\],"finish_reason":"length"' \
    "$bin" generate --model "$model" --tokens 1,2,3 --max-tokens 5 --ignore-eos --json
expect "greedy output does not depend on threads" 0 same bash -c \
    "[ \"\$($bin generate --model $model --tokens 1,2,3 --max-tokens 9 --ignore-eos --threads 1)\" = \"\$($bin generate --model $model --tokens 1,2,3 --max-tokens 9 --ignore-eos --threads 2)\" ] && echo same"
expect "logits hash" 0 '"hash":"[0-9a-f]{16}"' "$bin" logits --model "$model" --tokens 1,2,3 --loops 3 --json
expect "missing model" 1 'nowhere' "$bin" logits --model "$tmp/nowhere" --tokens 1
expect "depth out of range" 1 'loops is 64' "$bin" generate --model "$model" --tokens 1 --loops 64
expect "token out of range" 2 '300' "$bin" logits --model "$model" --tokens 1,300
expect "not a number" 2 'tokens' "$bin" logits --model "$model" --tokens 1,x
expect "prompt or tokens, not both" 2 'either' "$bin" generate --model "$model" --tokens 1 --prompt a
expect "text without a tokenizer" 2 'tokenizer' "$bin" generate --model "$model" --prompt hello
expect "context length" 1 'limit' "$bin" generate --model "$model" --tokens 1 --max-tokens 100000
expect "too little memory" 1 'budget' "$bin" logits --model "$model" --tokens 1 --memory-mib 1 --step-rows 4096
expect "unknown device" 1 'device' "$bin" logits --model "$model" --tokens 1 --device abacus
expect "cuda where there is none" 1 'CUDA|cuda' "$bin" logits --model "$model" --tokens 1 --device cuda
expect "unknown benchmark" 2 'sprint' "$bin" bench sprint --model "$model"
cp -r "$model" "$tmp/cut"
truncate -s -100 "$tmp/cut/model.safetensors"
expect "truncated weights" 1 'model.safetensors' "$bin" logits --model "$tmp/cut" --tokens 1
cp -r "$model" "$tmp/badconfig"
echo '{"model_type":"tinyloop","hidden_size":"64"}' >"$tmp/badconfig/config.json"
expect "bad config names the key" 1 'hidden_size|vocab_size' "$bin" logits --model "$tmp/badconfig" --tokens 1
echo '{"model_type":"gpt9"}' >"$tmp/badconfig/config.json"
expect "unknown architecture" 1 'gpt9' "$bin" logits --model "$tmp/badconfig" --tokens 1

echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
