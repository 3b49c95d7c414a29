"""The parts of a scheduler, and their construction."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from sglang.srt.distributed.rank_group import RankGroup, SingleRank
from sglang.srt.managers.scheduler.batch import BatchPools, DecodeBatch
from sglang.srt.managers.scheduler.control import ControlHandler, InputHandler
from sglang.srt.managers.scheduler.decode import DecodeScheduler
from sglang.srt.managers.scheduler.grammar import GrammarManager
from sglang.srt.managers.scheduler.policy import (
    BatchLimits,
    BatchPolicy,
    NewTokenEstimate,
    SchedulePolicy,
)
from sglang.srt.managers.scheduler.prefill import PrefillScheduler
from sglang.srt.managers.scheduler.requests.stop import StopChecker
from sglang.srt.managers.scheduler.results import OutputCollector, ResultProcessor
from sglang.srt.managers.scheduler.role import Role
from sglang.srt.managers.scheduler.snapshots import Snapshots
from sglang.srt.managers.scheduler.state import SchedulerState

if TYPE_CHECKING:
    from sglang.srt.constrained.grammar import GrammarBackend
    from sglang.srt.managers.detokenizer.detokenizer_manager import DecoderFactory
    from sglang.srt.managers.scheduler.launched_step import ModelWorker
    from sglang.srt.mem_cache.tree.radix_cache import RadixCache
    from sglang.srt.model_loader.weight_seed import WeightSeed
    from sglang.srt.observability.engine_metrics import SchedulerMetrics
    from sglang.srt.server_args import ServerArgs


TickGuard = Callable[[], AbstractContextManager[object]]


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerResources:
    """Inputs of a scheduler, built by `build_scheduler` or a test. The tree must be on the worker's
    pools."""

    worker: ModelWorker
    tree: RadixCache
    metrics: SchedulerMetrics
    group: RankGroup = field(default_factory=SingleRank)
    """The ranks; the tree has the same group."""
    new_decoder: DecoderFactory | None = None
    """Makes the decoders that stop strings and patterns need; None: no request may have any."""
    grammar_backend: Callable[[], GrammarBackend] | None = None
    """Makes the grammar backend when a request first needs it; None: constraints are refused.
    Raises ValueError if the model cannot be constrained."""
    weight_seed: WeightSeed | None = None
    """Gives other servers the addresses of the weights; None: none may read them."""
    make_role: Callable[[SchedulerState, PrefillScheduler], Role] | None = None
    """Makes the role of a prefill or decode server; None: the server does both."""
    overlap: bool = False
    """Prepare each step while the device runs the one before it. It pays if launching a forward
    returns at once."""
    tick_guard: TickGuard = nullcontext
    """The watchdog's context, entered for a tick and for its message to the other ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerParts:
    """The collaborators of a `Scheduler`. They share `state`."""

    resources: SchedulerResources
    state: SchedulerState
    input: InputHandler
    control: ControlHandler
    grammar: GrammarManager
    prefill: PrefillScheduler
    decode: DecodeScheduler
    batch_policy: BatchPolicy
    results: ResultProcessor
    outputs: OutputCollector
    role: Role


def make_parts(server_args: ServerArgs, resources: SchedulerResources) -> SchedulerParts:
    """The parts of a scheduler that prefills and decodes.

    Args:
        server_args: Resolved.
        resources: Inputs that no other scheduler uses.
    """
    state = _make_state(server_args, resources)
    outputs = OutputCollector(server_args.stream_interval)
    public_args = server_args.to_public_dict()
    control = ControlHandler(state, outputs, public_args, resources.weight_seed)
    role = Role()
    prefill = PrefillScheduler(state, lambda req: role.may_compute(req))
    if resources.make_role is not None:
        role = resources.make_role(state, prefill)
    stop_checker = StopChecker(resources.new_decoder, resources.group)
    results = ResultProcessor(state, stop_checker, outputs, role)
    grammar = GrammarManager(resources.grammar_backend)
    resources.tree.watch_workload(state.workload)
    resources.tree.watch_queues(state.queues)
    return SchedulerParts(
        resources=resources,
        state=state,
        input=InputHandler(state, control, results, outputs, grammar, role),
        control=control,
        grammar=grammar,
        prefill=prefill,
        decode=DecodeScheduler(state, role.keeps),
        batch_policy=BatchPolicy(server_args.target_inter_token_latency),
        results=results,
        outputs=outputs,
        role=role,
    )


def _make_state(server_args: ServerArgs, resources: SchedulerResources) -> SchedulerState:
    worker = resources.worker
    allocator = worker.token_to_kv_pool_allocator
    chunk = server_args.chunked_prefill_size
    snaps_prompts_alone = server_args.mamba_scheduler_strategy == "no_buffer"
    interval = 0 if snaps_prompts_alone else server_args.mamba_track_interval
    pools = BatchPools(
        req_to_token_pool=worker.req_to_token_pool,
        allocator=allocator,
        token_to_kv_pool=worker.token_to_kv_pool,
        device=torch.device(allocator.device),
    )
    return SchedulerState(
        tree=resources.tree,
        pools=pools,
        limits=BatchLimits(
            page_size=allocator.page_size,
            max_running_requests=worker.req_to_token_pool.size,
            max_queued_requests=server_args.max_queued_requests,
            max_prefill_tokens=server_args.max_prefill_tokens,
            chunk_tokens=None if chunk in (None, -1) else chunk,
            pool_tokens=allocator.size,
            context_len=worker.context_len,
        ),
        policy=SchedulePolicy(server_args.schedule_policy),
        estimate=NewTokenEstimate(server_args.schedule_conservativeness),
        decode_batch=DecodeBatch(pools),
        vocab_size=worker.vocab_size,
        eos_token_ids=worker.eos_token_ids,
        metrics=resources.metrics,
        snapshots=Snapshots(resources.tree, worker.req_to_token_pool.mamba_pool, interval),
    )
