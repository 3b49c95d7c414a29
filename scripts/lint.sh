#!/usr/bin/env bash
# Checks style, format and types, and that every test file can be collected.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh
.venv/bin/ruff check .
.venv/bin/ruff format --check .
.venv/bin/mypy
.venv/bin/python test/run_suite.py --hw cpu --suite base-a-test-cpu --suite base-b-test-cpu --collect-only > /dev/null
