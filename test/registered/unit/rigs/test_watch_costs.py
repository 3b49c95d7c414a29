"""Calls that an operator's figures add to a server that nobody looks at, as a share of all."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Final

from rigs.schedulers.scheduler_rig import SchedulerRig, greedy, prompt
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="base-a-test-cpu")

FILES: Final = (
    "tenants.py", "store_nodes.py", "store_presence.py", "store_usage.py", "trace_recorder.py",
)  # fmt: skip
FUNCTIONS: Final = ("_hold", "awaits_l3", "watch_store", "_sample")
MOST: Final = 0.005


def test_unused_figures_take_at_most_half_a_percent_of_the_calls(model: Path) -> None:
    rig = SchedulerRig(model, page_size=16, enable_hierarchical_cache=True, hicache_ratio=2.0)
    rig.generate([prompt(1, 100)], 4)
    counts: Counter[str] = Counter()

    def note(frame: FrameType, event: str, arg: object) -> None:
        if event == "call":
            code = frame.f_code
            ours = Path(code.co_filename).name in FILES or code.co_name in FUNCTIONS
            counts["ours" if ours else "others"] += 1

    def calls(work: object) -> tuple[int, int]:
        counts.clear()
        sys.setprofile(note)
        try:
            assert callable(work)
            work()
        finally:
            sys.setprofile(None)
        return counts["ours"], counts["others"]

    ours, others = calls(lambda: rig.generate([prompt(2, 400)], 32))
    assert 0 < ours <= MOST * others, (ours, others)
    rig.step(rig.request("decodes", prompt(3, 40), greedy(40)))
    for _ in range(3):
        rig.step()
    # Pages of the requests before may reach L2 in a step.
    ours, others = min(calls(rig.step) for _ in range(8))
    assert others > 50 and ours <= 1, "a decode step counts nothing, but may sample the history"
    rig.settle()
    rig.close()
