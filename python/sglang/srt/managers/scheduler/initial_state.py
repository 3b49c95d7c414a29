"""Makes the state of a scheduler, from the server's arguments and what was built for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from sglang.srt.managers.scheduler.batch import BatchPools, DecodeBatch
from sglang.srt.managers.scheduler.policy import BatchLimits, NewTokenEstimate, SchedulePolicy
from sglang.srt.managers.scheduler.snapshots import Snapshots
from sglang.srt.managers.scheduler.state import SchedulerState
from sglang.srt.mem_cache.hiradix_cache import HiRadixCache

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler.launched_step import TpModelWorker
    from sglang.srt.mem_cache.radix_cache import RadixCache
    from sglang.srt.observability.engine_metrics import SchedulerMetrics
    from sglang.srt.server_args import ServerArgs


def make_state(
    server_args: ServerArgs, worker: TpModelWorker, tree: RadixCache, metrics: SchedulerMetrics
) -> SchedulerState:
    """The state before the first tick."""
    allocator, width = worker.token_to_kv_pool_allocator, worker.num_draft_tokens
    chunk = server_args.chunked_prefill_size
    snaps_prompts_alone = server_args.mamba_scheduler_strategy == "no_buffer"
    interval = 0 if snaps_prompts_alone else server_args.mamba_track_interval
    pools = BatchPools(
        req_to_token_pool=worker.req_to_token_pool,
        allocator=allocator,
        token_to_kv_pool=worker.token_to_kv_pool,
        device=torch.device(allocator.device),
    )
    snapshots = None
    if tree.mamba_snapshot_alignment is not None:
        pool = worker.req_to_token_pool.mamba_pool
        assert pool is not None, "the tree keeps its states"
        snapshots = Snapshots(tree, pool, interval)
    return SchedulerState(
        tree=tree,
        hicache=tree if isinstance(tree, HiRadixCache) else None,
        pools=pools,
        limits=BatchLimits(
            page_size=allocator.page_size,
            max_running_requests=worker.req_to_token_pool.size,
            max_queued_requests=server_args.max_queued_requests,
            max_prefill_tokens=server_args.max_prefill_tokens,
            chunk_tokens=None if chunk in (None, -1) else chunk,
            pool_tokens=allocator.size,
            decode_tokens=width,
            context_len=worker.context_len,
        ),
        policy=SchedulePolicy(server_args.schedule_policy),
        estimate=NewTokenEstimate(server_args.schedule_conservativeness),
        decode_batch=DecodeBatch(pools, width),
        vocab_size=worker.vocab_size,
        eos_token_ids=worker.eos_token_ids,
        metrics=metrics,
        snapshots=snapshots,
        backs_up_retracted=server_args.enable_hierarchical_cache
        and server_args.disaggregation_decode_retraction_backup is not None,
    )
