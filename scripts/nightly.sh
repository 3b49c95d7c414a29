#!/usr/bin/env bash
# Runs tests that take too long for every change: soaks, and long runs of random tests.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh
exec .venv/bin/python test/run_suite.py --hw cpu --nightly --continue-on-error \
    --timeout-per-file 3600 --suite nightly-test-cpu
