#!/usr/bin/env bash
# Starts a Mooncake store, and the server with the built-in model on top of it.
# Arguments are passed to the server. ONCE=1 ends after one answer.
# MODEL=hybrid serves the built-in hybrid model, MODEL=smollm2 a real model from PyPI.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh serve
exec .venv/bin/python -m sglang.serve_embedded "$@"
