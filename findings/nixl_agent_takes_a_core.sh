#!/usr/bin/env bash
# nixl-cu13 1.5.1: an agent that does nothing takes a core, and importing the module silences the
# errors of everybody's log handlers.
#
# Expected: an agent without transfers sleeps; a library leaves `logging.raiseExceptions` alone, by
# which Python's handlers report what they cannot write.
# Seen: the progress thread, which is on by default and whose pause the Python API sets to 0, runs
# all the time: 0.9 of a core on a machine that is free. Without that thread an idle agent takes
# next to nothing. After the import `logging.raiseExceptions` is False for the whole process, unless
# NIXL_DEBUG_LOGGING is set.
#
# Exit status 0: as described. 1: this version behaves otherwise now.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check --no-deps nixl-cu13==1.5.1
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check numpy
cat > "$folder/idle.py" <<'PYTHON'
import logging
import os
import time

assert logging.raiseExceptions
from nixl_cu13._api import nixl_agent, nixl_agent_config

print("logging.raiseExceptions after the import:", logging.raiseExceptions)
assert logging.raiseExceptions is False, "otherwise now"


agents = []


def cores(**config):
    agent = nixl_agent("idle", nixl_agent_config(backends=["UCX"], **config))
    time.sleep(1)
    used, begun = time.process_time(), time.monotonic()
    time.sleep(3)
    share = (time.process_time() - used) / (time.monotonic() - begun)
    print(f"idle agent, {config or 'default'}: {share:.3f} of a core")
    agents.append(agent)
    return share


quiet = cores(enable_prog_thread=False)
busy = cores()
assert quiet < 0.05 and busy - quiet > 0.15, "otherwise now"
# The agents' end is not of interest here.
print(end="", flush=True)
os._exit(0)
PYTHON
"$folder/venv/bin/python" "$folder/idle.py"
