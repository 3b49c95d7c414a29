#!/usr/bin/env bash
# What takes longer than a change should wait: soaks, and the long runs of random tests.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh
exec .venv/bin/python test/run_suite.py --hw cpu --nightly --continue-on-error \
    --timeout-per-file 1800 --suite nightly-test-cpu
