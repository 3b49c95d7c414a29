#!/usr/bin/env bash
# torch 2.13.0: while a profile ends, no other thread of the process runs Python.
#
# Expected: `torch.profiler.profile.stop()` gathers the events in C++, which needs no Python, so other
# threads go on, as they do while the profile is taken and while `export_chrome_trace` writes it.
# Seen: a thread that wakes every 5 ms stands still for all of `stop()`, which takes 0.5 s for 60,000
# operations with shapes on a quiet machine. The longest pause during the export is a third of that. A server that is
# profiled misses its heartbeats at the end of the profile, and its peers take it for dead.
#
# Exit status 0: as described. 1: this version behaves otherwise now.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy
cat > "$folder/end.py" <<'PYTHON'
import sys
import threading
import time

import torch
from torch.profiler import ProfilerActivity, profile

beats: list[float] = []
done = threading.Event()


def beat() -> None:
    while not done.is_set():
        beats.append(time.monotonic())
        time.sleep(0.005)


def longest_pause(begin: float, end: float) -> float:
    times = [begin, *(at for at in beats if begin < at < end), end]
    return max(after - before for before, after in zip(times, times[1:]))


torch.set_num_threads(1)
thread = threading.Thread(target=beat)
thread.start()
one = torch.ones(4)
profiled = profile(activities=[ProfilerActivity.CPU], record_shapes=True)
profiled.start()
for _ in range(60_000):
    one + one
begin = time.monotonic()
profiled.stop()
end = time.monotonic()
profiled.export_chrome_trace(sys.argv[1])
written = time.monotonic()
done.set()
thread.join()
of_stop = longest_pause(begin, end) / (end - begin)
of_export = longest_pause(end, written) / (end - begin)
print(f"torch {torch.__version__}: stop() takes {end - begin:.2f} s, a pause of {of_stop:.2f} of that;")
print(f"the longest pause while the trace is written is {of_export:.2f} of it")
assert of_stop > 0.8 and of_export < 0.5, "otherwise now"
PYTHON
"$folder/venv/bin/python" "$folder/end.py" "$folder/trace.json"
