#!/usr/bin/env bash
# Runs tests that take too long for every change: soaks, random runs, large packages, versions.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh
# A consumer of KV events; apart, since servers would use its uvloop.
[ -d .venv/indexer ] || .venv/bin/python -m pip install --progress-bar off --target .venv/indexer \
    ai-dynamo-runtime==1.6.1
# 230 MB, without what it needs of the environment itself.
[ -d .venv/nixl ] || .venv/bin/python -m pip install --progress-bar off --no-deps \
    --target .venv/nixl "$(grep -o 'nixl-cu13==[0-9.]*' pyproject.toml)"
status=0
.venv/bin/python test/run_suite.py --hw cpu --nightly --continue-on-error \
    --timeout-per-file 3600 --suite nightly-test-cpu || status=$?
# The other suites, with the cases that are marked as nightly.
PYTEST_ADDOPTS='-m ""' .venv/bin/python test/run_suite.py --hw cpu --continue-on-error \
    --at-once 3 --preload --suite base-a-test-cpu --suite base-b-test-cpu || status=$?
scripts/versions.sh || status=$?
exit $status
