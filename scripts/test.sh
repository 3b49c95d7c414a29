#!/usr/bin/env bash
# Runs all checks that a change must pass. The last line is `N passed, N failed`.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh
# Files with processes of their own wait much: three run beside one that computes all the time.
exec .venv/bin/python test/run_suite.py --hw cpu --continue-on-error --at-once 4 --preload \
    --check scripts/lint.sh --suite base-a-test-cpu --suite base-b-test-cpu
