#!/usr/bin/env bash
# The load programs at full length; see run.py.
set -euo pipefail
cd "$(dirname "$0")/../.."
exec build/venv/bin/python tests/load/run.py --long "$@"
