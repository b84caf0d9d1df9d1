#!/usr/bin/env bash
# Install what building, testing and serving need on Debian 12. Safe to run again.
#   scripts/setup.sh           packages to build and serve
#   scripts/setup.sh --test    also what the quick tests need (a private Python environment in build/venv)
#   scripts/setup.sh --dev     also analysers, fuzzers and load tools
#   scripts/setup.sh --check   install nothing; list what is missing and exit 1 if anything is
set -euo pipefail
cd "$(dirname "$0")/.."

build_pkgs=(gcc libc6-dev make pkg-config libmicrohttpd-dev libcjson-dev libuv1-dev libpcre2-dev libinih-dev
            libxxhash-dev libutf8proc-dev libgnutls28-dev)
# nvcc, where there is one, wants a C++ compiler beside it.
if command -v nvcc >/dev/null || [ -x /usr/local/cuda/bin/nvcc ]; then build_pkgs+=(g++); fi
test_pkgs=(check python3-venv curl mandoc groff-base)
dev_pkgs=(clang clang-format clang-tidy cppcheck shellcheck valgrind libdnnl-dev libclang-rt-14-dev wrk
          python3-torch libopenblas0 prometheus nginx-light)

mode="build"
case "${1:-}" in
    "") ;;
    --test) mode="test" ;;
    --dev) mode="dev" ;;
    --check) mode="check" ;;
    *) echo "setup.sh: unknown option '$1' (known: --test, --dev, --check)" >&2; exit 2 ;;
esac

want=("${build_pkgs[@]}")
[ "$mode" = build ] || want+=("${test_pkgs[@]}")
[ "$mode" = dev ] && want+=("${dev_pkgs[@]}")

missing=()
for p in "${want[@]}"; do
    [ "$(dpkg-query -W -f='${db:Status-Status}' "$p" 2>/dev/null)" = installed ] || missing+=("$p")
done

if [ "$mode" = check ]; then
    [ ${#missing[@]} -eq 0 ] && { echo "setup: nothing is missing"; exit 0; }
    echo "setup: missing packages: ${missing[*]}"
    exit 1
fi

if [ ${#missing[@]} -gt 0 ]; then
    sudo=()
    if [ "$(id -u)" -ne 0 ]; then
        command -v sudo >/dev/null || { echo "setup.sh: run as root, or install: ${missing[*]}" >&2; exit 1; }
        sudo=(sudo)
    fi
    export DEBIAN_FRONTEND=noninteractive
    "${sudo[@]}" apt-get -o DPkg::Lock::Timeout=600 update -qq
    "${sudo[@]}" apt-get -o DPkg::Lock::Timeout=600 install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
fi

if [ "$mode" = test ] || [ "$mode" = dev ]; then
    # Black-box tests and reference maths only; serving needs no Python.
    if ! build/venv/bin/python -c 'import numpy, tokenizers, pytest, openai, jsonschema, jinja2, yaml, schemathesis, openapi_spec_validator' 2>/dev/null; then
        mkdir -p build
        /usr/bin/python3 -m venv build/venv
        build/venv/bin/pip install -q --disable-pip-version-check -r tests/requirements.txt
    fi
    # The public cases for JSON schemas travel in the validator's source package. Without them one test fails, and says so.
    if [ ! -d build/json-schema-suite/draft2020-12 ]; then
        mkdir -p build/json-schema-suite
        { build/venv/bin/pip download -q --disable-pip-version-check --no-deps --no-binary jsonschema -d build/sdist \
              "$(grep '^jsonschema==' tests/requirements.txt)" &&
              tar -xzf build/sdist/jsonschema-*.tar.gz -C build/json-schema-suite --strip-components=3 --wildcards '*/json/tests/*'
        } || echo "setup.sh: the cases of JSON-Schema-Test-Suite could not be fetched" >&2
    fi
fi
echo "setup: done ($mode)"
