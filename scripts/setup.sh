#!/usr/bin/env bash
# Make .venv with everything that serving and testing need. Quick when there is nothing to do.
set -euo pipefail
cd "$(dirname "$0")/.."

# What is installed depends on these; the path because the package is installed in place.
key=$(cat pyproject.toml scripts/setup.sh <(pwd) | sha256sum | cut -d' ' -f1)
stamp=.venv/setup.stamp
is_current() { [ "$(cat "$stamp" 2>/dev/null)" = "$key" ] && [ -x .venv/bin/python ]; }
is_current && exit 0

die() {
    echo "setup: $*" >&2
    exit 1
}

# `make serve` and `make test` may start together: one sets up, the other waits.
mkdir -p .venv
exec 9>.venv/setup.lock
flock 9
is_current && exit 0

find_python() {
    local candidate
    for candidate in "${PYTHON:-}" python3.11 python3.12 python3; do
        if [ -n "$candidate" ] && "$candidate" -c \
            'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    die "needs Python 3.11 or 3.12; name one with PYTHON=/path/to/python3.11"
}
python=$(find_python)

packages=()
loads() { "$python" -c "import ctypes; ctypes.CDLL('$1')" 2>/dev/null; }
# Mooncake's wheel links these and does not carry them.
loads libibverbs.so.1 || packages+=(libibverbs1 ibverbs-providers)
loads libnuma.so.1 || packages+=(libnuma1)
"$python" -c 'import ensurepip, venv' 2>/dev/null || packages+=(python3-venv)
if [ ${#packages[@]} -gt 0 ]; then
    if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
        die "install these system packages, then run it again: ${packages[*]}" \
            "(Debian: sudo apt-get install -y ${packages[*]})"
    fi
    echo "setup: installing ${packages[*]}"
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq
    apt-get install -y -qq --no-install-recommends "${packages[@]}"
fi

echo "setup: installing into .venv with $("$python" --version); the first time takes minutes"
.venv/bin/python -m pip --version >/dev/null 2>&1 || "$python" -m venv .venv
export PIP_DISABLE_PIP_VERSION_CHECK=1
if ! [ -e /dev/nvidiactl ]; then
    # By itself and exactly: the machine's pip configuration decides which build that is, and
    # what follows finds it satisfied instead of fetching CUDA's libraries.
    .venv/bin/python -m pip install --quiet torch==2.13.0
fi
.venv/bin/python -m pip install --quiet --editable '.[test]'
.venv/bin/python -c 'import mooncake.store' ||
    die "mooncake is installed but does not load; see the line above"
echo "$key" >"$stamp"
echo "setup: done"
