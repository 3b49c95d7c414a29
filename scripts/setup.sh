#!/usr/bin/env bash
# Creates .venv with what `serve`, `pd` (serving with a router) or `test` (the default) needs. Quick
# if it is there.
set -euo pipefail
cd "$(dirname "$0")/.."

# Each of these has what the ones before it have.
uses=(serve pd test)
use=${1:-test}
rank_of() { # Index of a use; empty: there is no such use.
    local nth
    for nth in "${!uses[@]}"; do [ "${uses[nth]}" != "$1" ] || echo "$nth"; done
}
if [ -z "$(rank_of "$use")" ]; then
    echo "setup: $use must be one of ${uses[*]}" >&2
    exit 1
fi

# The extra of pyproject.toml with the Mooncake wheel for this machine; empty: the CPU's.
extra=
if [ -e /dev/nvidiactl ]; then extra=cuda; fi
for driver in /sys/class/infiniband/*/device/driver; do
    case $(readlink -f "$driver") in */efa) extra=efa${extra:+-$extra} && break ;; esac
done

# The installation depends on these; on the path because the package is installed in place.
key=$(cat pyproject.toml scripts/setup.sh scripts/install.py <(pwd) <(echo "$extra") | sha256sum | cut -d' ' -f1)
stamp=.venv/setup.stamp
log=.venv/setup.log
cuda_index=https://download.pytorch.org/whl/cu130
pypi=https://pypi.org/simple
quiet_s=15 # Longest time without output.
is_current() {
    local of made
    read -r of made 2>/dev/null <"$stamp" || return 1
    [ "$of" = "$key" ] && (($(rank_of "$made") >= $(rank_of "$use"))) && [ -x .venv/bin/python ]
}
[ -z "${PYTHON:-}" ] && is_current && exit 0

said=0 # When `say` said something.
say() {
    printf 'setup: %4d s  %s\n' "$SECONDS" "$*"
    said=$SECONDS
}
die() {
    echo "setup: $*" >&2
    exit 1
}

# The second number of the first version that works, and of the first after it that does not.
read -r first end < <(sed -n 's/^requires-python = ">=3\.\([0-9]*\),<3\.\([0-9]*\)"$/\1 \2/p' pyproject.toml)
versions="Python 3.$first to 3.$((end - 1))"
# The version of an interpreter, and whose it is: a virtual environment has that of its base.
about() {
    "$1" -c 'import os, sys
print("%d.%d" % sys.version_info[:2], os.path.realpath(getattr(sys, "base_prefix", "")))'
}
is_supported() { # Takes what `about` says.
    local minor
    [[ $1 == 3.* ]] || return 1
    minor=${1#3.}
    ((${minor%% *} >= first && ${minor%% *} < end))
}

# True if an interpreter was compiled with a profile, and has what servers and environments need. One
# without a profile, as pyenv compiles by default, takes a quarter longer. Distributions use one.
is_fast() {
    "$1" -c 'import ensurepip, os, sys, sysconfig, venv
options = sysconfig.get_config_var("CONFIG_ARGS") or ""
is_optimized = "--enable-optimizations" in options or sys.base_prefix == "/usr"
header = os.path.join(sysconfig.get_path("include"), "Python.h")
sys.exit(not (is_optimized and os.path.exists(header)))' 2>/dev/null
}

# Sets `python`, `identity` (what `about` says of it). `PYTHON` is used or refused; without it, an
# environment keeps its interpreter. Another gets the lowest version that fits, and of that version
# the first fast interpreter, or else the first.
choose_python() {
    local name candidate candidates about_it made
    if [ -n "${PYTHON:-}" ]; then
        identity=$(about "$PYTHON" 2>/dev/null) ||
            die "PYTHON=$PYTHON does not run: $(about "$PYTHON" 2>&1 | head -n 1)"
        is_supported "$identity" || die "PYTHON=$PYTHON is Python ${identity%% *}; needs $versions"
        python=$PYTHON
    fi
    if [ -L .venv/bin/python ] || [ -e .venv/bin/python ]; then
        made=$(about .venv/bin/python 2>/dev/null) ||
            die ".venv/bin/python does not run; make .venv again: rm -r .venv, then the same command"
        is_supported "$made" ||
            die ".venv has Python ${made%% *}; needs $versions: rm -r .venv, then the same command"
        [ "$made" = "${identity:-$made}" ] ||
            die ".venv has Python $made, PYTHON=$PYTHON is $identity:" \
                "rm -r .venv, then the same command; or leave PYTHON out to keep .venv"
        python=${python:-.venv/bin/python} identity=$made
        return
    fi
    [ -z "${python:-}" ] || return 0
    for name in $(seq -f python3.%g "$first" $((end - 1))) python3; do
        mapfile -t candidates < <(type -aP "$name")
        for candidate in "${candidates[@]}"; do
            about_it=$(about "$candidate" 2>/dev/null) && is_supported "$about_it" || continue
            if is_fast "$candidate"; then
                python=$candidate identity=$about_it
                return
            fi
            [ -n "${python:-}" ] || python=$candidate identity=$about_it
        done
        [ -z "${python:-}" ] || return 0
    done
    die "found no $versions; name one with PYTHON=/path/to/python3.$first"
}

# `make serve` and `make test` may start together: one sets up, the other waits.
mkdir -p .venv
exec 9>.venv/setup.lock
flock --nonblock 9 || {
    say "another set-up of this checkout runs; waiting for it ($log has what it does)"
    until flock --timeout "$quiet_s" 9; do say "... waiting"; done
}
choose_python
is_current && exit 0

packages_there() { find .venv/lib -maxdepth 3 -name '*.dist-info' 2>/dev/null | wc -l; }

# Shows large downloads, builds, the number of installed packages, and errors from uv's and pip's
# output. Prints a line after every `quiet_s` seconds without output of its own, whatever they say.
show_progress() {
    local line status left doing="working"
    while true; do
        status=0
        left=$((said + quiet_s - SECONDS))
        if [ $left -le 0 ]; then
            say "... $doing; $(packages_there) packages are there"
            left=$quiet_s
        fi
        IFS= read -r -t "$left" line || status=$?
        if [ $status -gt 128 ]; then
            continue
        elif [ $status -ne 0 ] && [ -z "$line" ]; then
            return 0
        fi
        echo "$line" >>"$log"
        case $line in
            *Downloading*[0-9]\ [MG]B\)* | *Downloading*[0-9][MG]iB\)*)
                doing="downloading" && say "${line#"${line%%[! ]*}"}"
                ;;
            "Building wheel"*) doing="building" && say "$line" ;;
            "Installed "[0-9]*\ packages*) say "$line" ;;
            "Installing collected packages: "*)
                doing="installing"
                say "installing $(tr -cd , <<<"$line," | wc -c) packages"
                ;;
            ERROR* | error*) say "$line" ;;
        esac
    done
}

# Runs a long command, after its description; the log gets its whole output.
run() {
    local what=$1
    shift
    say "$what"
    "$@" 2>&1 | show_progress || die "$what failed$(where_space_is_left); the last lines of $log:
$(tail -n 15 "$log")"
}

# Of a full disk pip says no more than that there is one.
where_space_is_left() {
    tail -n 15 "$log" | grep -qi "no space left" || return 0
    local folder
    for folder in .venv "${TMPDIR:-/tmp}" "${PIP_CACHE_DIR:-${HOME:-/root}/.cache}"; do
        [ -d "$folder" ] || continue
        printf '; %s has %s free' "$folder" "$(df -h --output=avail "$folder" | tail -n 1 | tr -d ' ')"
    done
}

packages=()
loads() { "$python" -c "import ctypes; ctypes.CDLL('$1')" 2>/dev/null; }
# Mooncake's wheel links these libraries, but does not contain them.
loads libcurl.so.4 || packages+=(libcurl4)
loads libibverbs.so.1 || packages+=(libibverbs1 ibverbs-providers)
loads libnuma.so.1 || packages+=(libnuma1)
case $extra in efa*) loads libfabric.so.1 || packages+=(libfabric1) ;; esac
has_pip() { .venv/bin/python -m pip --version >/dev/null 2>&1; }
if ! has_pip && ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
    # Debian's interpreters have these modules in a package.
    [[ $identity == *" /usr" ]] ||
        die "$python lacks the modules venv and ensurepip; name another with PYTHON=/path/to/python3.$first"
    packages+=("python${identity%% *}-venv")
fi

say "installing into .venv with Python $identity; minutes the first time, all of it in $log"
: >"$log"
if [ ${#packages[@]} -gt 0 ]; then
    if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
        die "install these system packages, then run it again: ${packages[*]}" \
            "(Debian: sudo apt-get install -y ${packages[*]})"
    fi
    export DEBIAN_FRONTEND=noninteractive
    run "apt-get update" apt-get update -q
    run "apt-get install ${packages[*]}" \
        apt-get install -y -q --no-install-recommends "${packages[@]}"
fi
has_pip || run "making .venv" "$python" -m venv .venv
export PIP_DISABLE_PIP_VERSION_CHECK=1
pip=(.venv/bin/python scripts/install.py)
# pip would compile with one core, after the downloads. What cannot be compiled is not imported.
# Nothing imports the tests of packages, and of transformers' models only those that are compared
# with the engine's: the rest is a quarter of all source text. Servers and tests use a few modules
# of the other packages here, or none: a third of the rest.
models='auto|deepseek_v|encoder_decoder|glm|llama|m(in)?istral|qwen[23]|__init__'
tools='anthropic|fontTools|graphql|kubernetes_validate|matplotlib|mypy|mypyc|networkx|openai|pip'
tools+='|pygments|schemathesis|setuptools|sympy/(physics|stats)|torch/(_inductor|testing)|torchgen'
tools+='|virtualenv'
rarely="/site-packages/(.+/tests/|transformers/models/(?!$models)|($tools)/)"
compile() { .venv/bin/python -m compileall -q -q -j 0 -x "$rarely" "$@" || true; }
.venv/bin/python -m pip install -q uv >>"$log" 2>&1 || say "there is no uv; pip takes longer"
# First and with an exact version: the machine's pip configuration chooses the build, and on a CPU
# host the next step then does not fetch CUDA's libraries.
torch=torch==2.13.0
run "installing torch" "${pip[@]}" "$torch"
has_cuda() { .venv/bin/python -c 'import sys, torch; sys.exit(torch.version.cuda is None)'; }
case $extra in
    *cuda)
        # pip's configuration may name an index of CPU builds.
        has_cuda 2>>"$log" || run "installing torch's CUDA build" \
            "${pip[@]}" --force-reinstall --index-url "$cuda_index" --extra-index-url "$pypi" "$torch"
        ;;
esac
compile .venv/lib 9>&- & # Beside the next downloads.
case $use in
    serve) project=. ;;
    *) project=".[$use]" ;;
esac
run "installing everything else" "${pip[@]}" --editable "$project"
if [ -n "$extra" ]; then
    # All wheels of Mooncake install the same files.
    wheel=$("$python" -c 'import sys, tomllib
project = tomllib.load(open("pyproject.toml", "rb"))["project"]
print(project["optional-dependencies"][sys.argv[1]][0])' "$extra")
    run "removing Mooncake's CPU wheel" \
        .venv/bin/python -m pip uninstall -y mooncake-transfer-engine-non-cuda
    run "installing $wheel" "${pip[@]}" --no-deps "$wheel"
fi
wait
run "compiling" compile .venv/lib python
# `rigs`, which the tests share, is not a part of the package: it is found in place.
for site in .venv/lib/python3*/site-packages; do echo "$PWD/test" >"$site/rigs.pth"; done
# With torch, which brings the libraries of CUDA that Mooncake's CUDA wheels link.
run "loading mooncake" .venv/bin/python -c 'import torch, mooncake.store'
echo "$key $use" >"$stamp"
say "done"
