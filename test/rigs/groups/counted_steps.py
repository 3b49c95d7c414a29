"""Collectives that a rank of real ones makes, step by step: DP groups that share experts, and plain
tensor parallelism."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch

from rigs.models.tiny_models import save_tiny_checkpoint
from rigs.schedulers.rank_processes import run_ranks
from rigs.schedulers.scheduler_rig import SchedulerRig, greedy, prompt
from sglang.srt.distributed.parallel_state import (
    GroupCoordinator,
    get_attention_tp_group,
    get_world_group,
)
from sglang.srt.distributed.torch_rank_group import TorchRankGroup
from sglang.srt.managers.scheduler.group_scheduler import GroupScheduler
from sglang.srt.managers.scheduler.scheduler import Scheduler, SchedulerResources
from sglang.srt.managers.scheduler.step_agreement import StepAgreement
from sglang.srt.messages.io_struct import StepCall, ToScheduler
from sglang.srt.model_executor.expert_ranks import expert_ranks
from sglang.srt.model_executor.grouped_runner import GroupedModelRunner
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.model_executor.runner_config import ModelRunnerConfig

PRELOAD: Final = ("rigs.groups.counted_steps",)
LAYERS: Final = 4
"""Layers of the model, all with experts."""
PROMPT: Final = 256
TICKS: Final = 16
COLLECTIVES: Final = (
    "all_reduce", "all_gather", "reduce_scatter", "broadcast_on_cpu", "min_on_cpu"
)  # fmt: skip

Counts = dict[str, tuple[float, float]]
"""Calls and bytes of a step by collective."""


@contextmanager
def counting() -> Iterator[Counter[tuple[str, str]]]:
    """Count the collectives of this rank's groups of several ranks: calls and bytes by name."""
    counts: Counter[tuple[str, str]] = Counter()
    originals = {name: getattr(GroupCoordinator, name) for name in COLLECTIVES}

    def counted(name: str) -> Callable[..., Any]:
        def call(group: GroupCoordinator, x: torch.Tensor) -> Any:
            if group.size > 1:
                counts[name, "calls"] += 1
                counts[name, "bytes"] += x.nbytes
            return originals[name](group, x)

        return call

    try:
        for name in COLLECTIVES:
            setattr(GroupCoordinator, name, counted(name))
        yield counts
    finally:
        for name, original in originals.items():
            setattr(GroupCoordinator, name, original)


class StepRig(SchedulerRig):
    """One rank of a server of `dp_size` groups. `more`: arguments of `SchedulerRig`."""

    agreement: StepAgreement | None = None

    def __init__(self, model: Path, dp_size: int, ep_size: int, **more: Any) -> None:
        self._sizes = dp_size, ep_size
        whole = get_attention_tp_group()
        super().__init__(model, **{"pool_tokens": 4096, "tp_group": whole, **more})

    def make_runner(self, config: ModelRunnerConfig) -> ModelRunner:
        dp_size, ep_size = self._sizes
        config = dataclasses.replace(config, attn_dp_size=dp_size, ep_size=ep_size)
        config = dataclasses.replace(config, experts=expert_ranks(config))
        return GroupedModelRunner(config) if dp_size > 1 else ModelRunner(config)

    def make_scheduler(self, resources: SchedulerResources) -> Scheduler:
        dp_size, _ = self._sizes
        runner = self.worker._runner
        if not isinstance(runner, GroupedModelRunner):
            return super().make_scheduler(resources)
        dp_rank = get_world_group().rank * dp_size // get_world_group().size
        self.agreement = StepAgreement(TorchRankGroup.of_world(), dp_rank, dp_size, None)
        return GroupScheduler(self.server_args, resources, self.agreement, runner)

    def ticks(self, count: int, *messages: ToScheduler, works: bool = True) -> Counts:
        """Collectives of `count` ticks, in which some group works or none."""
        with counting() as counts:
            for _ in range(count):
                calls: list[ToScheduler] = []
                if self.agreement is not None and works:
                    # The others would call.
                    calls = [StepCall(number=self.agreement._next)]
                self.step(*messages, *calls)
                messages = ()
        return {
            name: (counts[name, "calls"] / count, counts[name, "bytes"] / count)
            for name in COLLECTIVES
        }


def measure(model: str, dp_size: int, ep_size: int) -> dict[str, Counts]:
    """One rank's counts by what the groups do. Run by each process."""
    rig = StepRig(Path(model), dp_size, ep_size)
    dp_rank = get_world_group().rank * dp_size // get_world_group().size
    found: dict[str, Counts] = {}
    mine = [rig.request(f"a{n}", prompt(n, 16), greedy(400)) for n in range(4)]
    rig.ticks(1, *mine)
    found["all decode 4"] = rig.ticks(TICKS)
    long = rig.request("long", prompt(9, PROMPT), greedy(400))
    found[f"one prefills {PROMPT}, others decode 4"] = rig.ticks(1, *([] if dp_rank else [long]))
    for request in (*mine, long):
        rig.ticks(1, rig.abort(request.rid))
    rig.ticks(1)
    alone = [] if dp_rank else [rig.request("b", prompt(1, 16), greedy(400))]
    rig.ticks(1, *alone)
    found["one decodes 1, others have nothing"] = rig.ticks(TICKS)
    rig.ticks(1, rig.abort("b"))
    rig.ticks(1)
    found["nobody has work"] = rig.ticks(TICKS, works=False)
    rig.close()
    return found


def counts_of(model: Path, size: int, dp_size: int, ep_size: int) -> dict[str, Counts]:
    """Counts of a step on the first of `size` ranks in `dp_size` groups, by what the groups do.

    Args:
        model: From `save_model`.
    """
    arguments = str(model), dp_size, ep_size
    return run_ranks(size, measure, *arguments, attn_dp_size=dp_size, preload=PRELOAD)[0]  # type: ignore[no-any-return]


def save_model(directory: Path) -> None:
    """Save a model of LAYERS layers that 8 ranks can split."""
    save_tiny_checkpoint(
        directory, "qwen3_moe", eos_token_id=None, num_hidden_layers=LAYERS,
        num_attention_heads=8, num_key_value_heads=8,
    )  # fmt: skip
