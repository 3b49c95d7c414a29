"""Messages of the ranks in a tick: none while idle, else one broadcast and one round."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import torch

from rigs.caches.memory_ranks import MemoryExchange, PassedOnGroup
from rigs.schedulers.scheduler_rig import SchedulerRig, greedy, prompt
from sglang.srt.distributed.rank_group import RankGroup
from sglang.srt.messages.io_struct import (
    BatchTokenIDOutput,
    SchedulerOutput,
    ShutdownReq,
    ToScheduler,
)
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=1, suite="base-a-test-cpu")

NUM_LONG: Final = 300
"""Tokens of the answer that outlasts every copy, on a loaded machine too."""
IDLE_POLLS: Final = 6
IDLE_MS: Final = 1000
"""Milliseconds for which an idle rank 0 waits for messages."""


class CountingGroup(PassedOnGroup):
    """The bytes of each collective that a rank takes part in."""

    def __init__(self, group: RankGroup) -> None:
        super().__init__(group)
        self.broadcasts: list[int] = []
        self.reductions: list[int] = []

    def broadcast(self, payload: bytes | None) -> bytes:
        said = super().broadcast(payload)
        self.broadcasts.append(len(said))
        return said

    def reduce_min(self, values: torch.Tensor) -> torch.Tensor:
        self.reductions.append(values.nbytes)
        return super().reduce_min(values)


class Script:
    """Rank 0's channel: a request, idleness, the same prompt and another, idleness, the end.

    `polls` has for each poll its timeout, how many messages it gave, and what was said until the
    next: broadcasts and reductions.
    """

    def __init__(self, rig: SchedulerRig, group: CountingGroup) -> None:
        self._group = group
        self._waves: list[list[ToScheduler]] = [
            [rig.request("a", prompt(1, 100), greedy(12))],
            [rig.request("b", prompt(1, 100)), rig.request("c", prompt(2, 60), greedy(NUM_LONG))],
            [ShutdownReq(timeout=5.0)],
        ]
        self._num_idle = IDLE_POLLS
        self._before = (0, 0)
        self.polls: list[list[int]] = []
        self.num_tokens = 0

    def receive(self, timeout_ms: int) -> list[ToScheduler]:
        self.settle()
        self._num_idle = self._num_idle + 1 if timeout_ms == IDLE_MS else 0
        # The first wave finds a scheduler that has been idle from the start.
        messages = self._waves.pop(0) if self._num_idle > IDLE_POLLS and self._waves else []
        if messages:
            self._num_idle = 0
        self.polls.append([timeout_ms, len(messages)])
        return messages

    def settle(self) -> None:
        """Note what was said since the last poll."""
        now = len(self._group.broadcasts), len(self._group.reductions)
        if self.polls:
            self.polls[-1] += [count - old for count, old in zip(now, self._before, strict=True)]
        self._before = now

    def send(self, output: SchedulerOutput) -> None:
        if isinstance(output, BatchTokenIDOutput):
            self.num_tokens += sum(len(one.output_ids) for one in output.outputs)


def test_one_broadcast_a_tick_one_round_while_something_is_under_way_and_none_while_idle(
    tmp_path: Path,
) -> None:
    exchange = MemoryExchange(2)
    groups = [CountingGroup(exchange.group(rank, most_delay_s=0.0005)) for rank in range(2)]
    args: dict[str, Any] = {
        "page_size": 16,
        "enable_hierarchical_cache": True,
        "chunked_prefill_size": 64,
    }
    with ThreadPoolExecutor(2) as pool:
        # The ranks start together: a cache of several tiers agrees on its sizes.
        rigs = list(pool.map(lambda group: SchedulerRig(tmp_path, group=group, **args), groups))
        for group in groups:
            group.reductions.clear()
        script = Script(rigs[0], groups[0])
        ends = [
            pool.submit(rigs[0].scheduler.run, script),
            pool.submit(rigs[1].scheduler.run_beside),
        ]
        for end in ends:
            end.result(60)
    script.settle()
    for rig in rigs:
        rig.close()

    assert script.num_tokens == 12 + 8 + NUM_LONG
    assert groups[0].broadcasts == groups[1].broadcasts
    assert groups[0].reductions == groups[1].reductions
    assert len(set(groups[0].reductions)) == 1, "the tick sync has one size"

    said = [(broadcasts, rounds) for _, _, broadcasts, rounds in script.polls]
    assert set(said) == {(0, 0), (1, 0), (1, 1)}
    for (timeout, messages, _, _), (broadcasts, rounds) in zip(script.polls, said, strict=True):
        if timeout != IDLE_MS or messages:
            assert broadcasts == 1, "a tick is one broadcast"
        else:
            assert rounds == 0, "nothing is under way while the scheduler is idle"
    idle = [poll for poll in script.polls if poll[0] == IDLE_MS and not poll[1]]
    # Page ownership is checked once in each idle time, together. The script counts idleness anew
    # behind the parts of the check, whose polls do not wait.
    assert sum(poll[2] for poll in idle) == 2 < len(idle) == 2 * (IDLE_POLLS + 1)
    decode_ticks = [one for one in said if one == (1, 0)]
    assert len(decode_ticks) > 20, "no round while requests decode and no copy is under way"
    ticks = [one for one in said if one[0]]
    print(
        f"{len(said)} polls, {len(ticks)} ticks: a tick is {min(groups[0].broadcasts)} to "
        f"{max(groups[0].broadcasts)} bytes, a tick sync {groups[0].reductions[0]} bytes in "
        f"{len(groups[0].reductions)} of them"
    )
