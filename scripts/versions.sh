#!/usr/bin/env bash
# Runs the suites of `make test` with other versions of Python, torch and transformers.
# Each combination has an environment of its own below .venv/versions:
#   scripts/versions.sh [oldest|newest]     (without a name: one after the other)
# Words after a name are flags for test/run_suite.py, in place of both suites:
#   scripts/versions.sh oldest --suite base-b-test-cpu --root test/registered/routers
# The Pythons have to be there. docs/deploy.md says what ran.
set -euo pipefail
cd "$(dirname "$0")/.."

case ${1:-} in
    # The interpreter of Triton 3.6, which torch 2.11 goes with, fails with a newer numpy.
    oldest) python=python3.12 packages=(torch==2.11.0 transformers==5.17.0 "numpy<2.4") ;;
    newest) python=python3.13 packages=(torch transformers) ;;
    "")
        status=0
        for name in oldest newest; do scripts/versions.sh "$name" || status=$?; done
        exit "$status"
        ;;
    *) echo "versions: no combination '$1'; there are oldest and newest" >&2 && exit 2 ;;
esac
suites=("${@:2}")
[ $# -gt 1 ] || suites=(--suite base-a-test-cpu --suite base-b-test-cpu)
echo "=== $1: $python, ${packages[*]}"
"$python" -c 'import ensurepip, venv' || {
    echo "versions: '$1' needs $python with the modules venv and ensurepip" >&2
    exit 1
}
# Dependencies and those of tests, without the two that the combination chooses.
others='import re, tomllib
project = tomllib.load(open("pyproject.toml", "rb"))["project"]
for one in project["dependencies"] + project["optional-dependencies"]["test"]:
    if re.split("[^a-z-]", one)[0] not in ("torch", "transformers"):
        print(one)'
venv=.venv/versions/$1
"$python" -m venv "$venv"
pip=("$venv/bin/python" -m pip install --progress-bar off)
"${pip[@]}" --upgrade "${packages[@]}" --requirement <("$python" -c "$others")
"${pip[@]}" --no-deps --editable .
"$venv/bin/python" -m pip list --format freeze | grep -E '^(torch|transformers|mooncake.*)='
PYTHONPATH=test exec "$venv/bin/python" test/run_suite.py --hw cpu --continue-on-error \
    --at-once 3 --preload "${suites[@]}"
