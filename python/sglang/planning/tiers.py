"""Sizes of the tiers, and the lengths at which a read is faster than computing.

Sizes are decided by the engine's own `size_pools`, and reads by its own prefetch cost model.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from sglang.planning.machine import Machine
from sglang.planning.model_costs import ModelCosts
from sglang.srt.arg_groups.checks import ranks_per_node
from sglang.srt.arg_groups.speculative import num_draft_tokens
from sglang.srt.constants import GB
from sglang.srt.environ import envs
from sglang.srt.mem_cache.device.state_spec import (
    ItemKind,
    StateSpec,
    bytes_per_request,
    bytes_per_state,
    bytes_per_token,
    check_page_size,
)
from sglang.srt.mem_cache.l3.prefetch_cost import PendingRead, is_rejected, slower_reads
from sglang.srt.mem_cache.storage.page_trailer import TRAILER_BYTES
from sglang.srt.mem_cache.tree.tick_sync import Rates
from sglang.srt.model_executor.cuda_graph_runner import MAX_BATCH_SIZE, estimate_graph_bytes
from sglang.srt.model_executor.pool_sizing import (
    DeviceMemory,
    PoolSizes,
    longest_pass,
    memory_parts,
    size_pools,
)
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.eagle_worker import verification_bytes

HOST_SHARE: Final = 0.9
"""Share of the free host memory, less the engine's reserve, that the planner gives to L2."""
BUFFER_PAGES: Final = 512
"""Pages of L2 that the planner gives to a buffer: the fewest with which a get has all the pages
that it has with a large L2, since it may have an eighth of them."""
TYPICAL_PROMPT: Final = 8192
PREFIXES: Final = (1024, 8192, 32768, 131072)
"""Tokens of the prompts whose times are shown."""
_LONGEST_TOKENS: Final = 1 << 24


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolCost:
    """Bytes of one item of a pool: a token or several, or the state of one prefix."""

    name: str
    item: str
    dtype: str
    layers: int
    rank_bytes: int
    """On one rank: in L1 and in L2."""
    store_bytes: float
    """In L3, where ranks share equal bytes: of all ranks together, with the objects' trailers."""


def pool_cost(spec: StateSpec, page_size: int) -> PoolCost:
    """The cost of one pool.

    Args:
        page_size: Tokens of a page, which has one trailer in each object.
    """
    share = spec.share
    objects = share.total // (share.end - share.begin)
    items = page_size // spec.stride if spec.item is ItemKind.TOKEN else 1
    stored = objects * (spec.num_bytes + TRAILER_BYTES / items)
    return PoolCost(
        name=spec.name,
        item=spec.item if spec.stride == 1 else f"{spec.stride} {spec.item}s",
        dtype=str(spec.dtype).removeprefix("torch."),
        layers=len(spec.layers),
        rank_bytes=spec.num_bytes,
        store_bytes=0.0 if spec.item is ItemKind.REQUEST else stored,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """One tier of a server."""

    name: str
    rank_bytes: float
    """Bytes on each rank; of L3, of the store."""
    tokens: float
    """Infinite for a store without a limit."""
    states: int
    """Recurrent states."""
    reason: str


def device_tier(
    args: ServerArgs, machine: Machine, costs: ModelCosts, *, context_len: int, vocab_size: int
) -> tuple[Tier, dict[str, int]]:
    """L1 of each rank, and its `memory_parts`. Raises ValueError if the model does not fit; names
    the flag."""
    assert args.page_size is not None, "resolved"
    check_page_size(costs.specs, args.page_size)
    kind = machine.kind
    graphs = 0
    if kind.captures_graphs and not args.disable_cuda_graph:
        states = [spec.layer_bytes for spec in costs.specs if spec.item is ItemKind.STATE]
        graphs = estimate_graph_bytes(
            args.cuda_graph_max_bs or MAX_BATCH_SIZE, vocab_size, max(states, default=0)
        )
    split = args.tp_size // (args.attn_cp_size * args.attn_dp_size)
    graphs += verification_bytes(costs.specs, num_draft_tokens(args), -(-vocab_size // split))
    exchange = costs.exchange_bytes * longest_pass(
        args.chunked_prefill_size, args.max_prefill_tokens
    )
    sharers = 1 if kind.has_own_memory else ranks_per_node(args)
    available = int(machine.device_free_bytes) - sharers * costs.weight_bytes
    if available <= 0:
        raise ValueError(
            f"the weights of a rank take {costs.weight_bytes / GB:.1f} GB, and the device has "
            f"{machine.device_free_bytes / sharers / GB:.1f} GB free for it: use a larger "
            "--tp-size, or --quantization fp8"
        )
    token_bytes, state_bytes = bytes_per_token(costs.specs), bytes_per_state(costs.specs)
    sizes: PoolSizes = size_pools(
        DeviceMemory(
            has_own_memory=kind.has_own_memory,
            total_bytes=int(machine.device_bytes.value),
            available_bytes=available,
            mem_fraction_static=args.mem_fraction_static,
            weight_bytes=costs.weight_bytes,
            graph_bytes=graphs,
            exchange_bytes=exchange,
            sharers=sharers,
        ),
        kv_bytes_per_token=token_bytes,
        state_bytes=state_bytes,
        page_size=args.page_size,
        context_len=context_len,
        keeps_snapshots=not args.disable_radix_cache,
        max_total_tokens=args.max_total_tokens,
        full_memory_ratio=args.mamba_full_memory_ratio,
        max_states=args.max_mamba_cache_size,
        max_running_requests=args.max_running_requests,
        request_bytes=bytes_per_request(costs.specs),
    )
    num_states = 0 if sizes.states is None else sizes.states.amount
    tier = Tier(
        name="L1",
        rank_bytes=int(sizes.tokens.amount * token_bytes) + sizes.state_bytes,
        tokens=sizes.tokens.amount,
        states=num_states,
        reason=sizes.tokens.reason,
    )
    return tier, memory_parts(
        costs.specs,
        weight_bytes=costs.weight_bytes,
        tokens=sizes.tokens.amount,
        states=num_states,
        page_size=args.page_size,
        graph_bytes=graphs,
        exchange_bytes=exchange,
        requests=0 if sizes.requests is None else sizes.requests.amount,
    )


def is_buffer(args: ServerArgs) -> bool:
    """True if L2 keeps no pages."""
    return args.hicache_host_memory_mode == "buffer_only"


def host_tier(
    args: ServerArgs, machine: Machine, device: Tier, *, ratio: float | None, ranks_here: int
) -> Tier:
    """L2 of each rank: as large as the flags say, or as the host's memory allows.

    Args:
        ratio: `--hicache-ratio`; None: the flag was not given.
    """
    reserve = envs.HICACHE_HOST_MEMORY_RESERVE_BYTES.get()
    most = max(0.0, machine.host_bytes.value - reserve) / ranks_here
    wanted, reason = HOST_SHARE * most, f"{HOST_SHARE:.0%} of the host's free memory"
    if is_buffer(args):
        assert args.page_size is not None, "resolved"
        tokens = BUFFER_PAGES * args.page_size
        wanted, reason = device.rank_bytes * tokens / device.tokens, f"a buffer of {tokens} tokens"
    if args.hicache_size:
        wanted, reason = args.hicache_size * GB, f"--hicache-size {args.hicache_size:g}"
    elif args.hicache_host_memory_fraction is not None:
        fraction = args.hicache_host_memory_fraction
        wanted, reason = fraction * most, f"--hicache-host-memory-fraction {fraction:g}"
    elif ratio is not None:
        wanted, reason = ratio * device.rank_bytes, f"--hicache-ratio {ratio:g}"
    if wanted > most:
        raise ValueError(
            f"{reason} takes {wanted / GB:.1f} GB for each rank, and the host has {most / GB:.1f} "
            "GB: lower --hicache-size or --hicache-ratio, or give --host-memory"
        )
    share = wanted / device.rank_bytes
    return Tier(
        name="L2",
        rank_bytes=wanted,
        tokens=int(device.tokens * share),
        states=int(device.states * share),
        reason=reason,
    )


def store_tier(size_bytes: float, costs: ModelCosts, page_size: int) -> Tier:
    """L3: as many tokens as fit into `size_bytes`; infinite if it has no limit. Recurrent states
    are not counted: how many there are depends on the prompts."""
    per_token = store_bytes_per_token(costs, page_size)
    return Tier(
        name="L3",
        rank_bytes=size_bytes,
        tokens=size_bytes if math.isinf(size_bytes) else int(size_bytes / per_token),
        states=0,
        reason="no limit" if math.isinf(size_bytes) else "--l3-size",
    )


def store_bytes_per_token(costs: ModelCosts, page_size: int) -> float:
    """Bytes of one token in L3, of all ranks together."""
    return sum(
        pool_cost(spec, page_size).store_bytes / spec.stride
        for spec in costs.specs
        if spec.item is ItemKind.TOKEN
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOrCompute:
    """Rates of one rank, in tokens per second, and what the engine's cost model makes of them."""

    prefill: float
    """A prompt of 8,192 tokens, without a cached prefix."""
    compute_s: dict[int, float]
    """Seconds to compute a prompt, by its tokens."""
    load: float
    """Copies from L2 to L1."""
    read: float
    """Reads from L3 to L2."""
    longest_begun: int | None
    """Tokens of the longest read from L3 that begins on an idle server; None: any length does."""
    longest_kept: int | None
    """Tokens of the longest one that is not overtaken by computing; None: none is."""
    break_even_bytes_per_s: float
    """Rate of L3 at which reading takes as long as computing."""


def read_or_compute(
    machine: Machine,
    costs: ModelCosts,
    *,
    prefill_s: Callable[[int], float],
) -> ReadOrCompute:
    """Compare reading with computing.

    Args:
        prefill_s: Seconds in which the server computes a prompt of so many tokens.
    """
    prefill = TYPICAL_PROMPT / prefill_s(TYPICAL_PROMPT)
    token_bytes = float(bytes_per_token(costs.specs))
    read = machine.l3_bytes_per_s.value / token_bytes
    rates = Rates(reads=int(read), prefills=int(prefill))
    return ReadOrCompute(
        prefill=prefill,
        compute_s={tokens: prefill_s(tokens) for tokens in PREFIXES},
        load=machine.l2_bytes_per_s.value / token_bytes,
        read=read,
        longest_begun=_longest(lambda n: not is_rejected(n, rates, ahead=0, waiting=0)),
        longest_kept=_longest(
            lambda n: not slower_reads([PendingRead(n, n, n)], rates, ahead=0, waiting=0)[0]
        ),
        break_even_bytes_per_s=prefill * token_bytes,
    )


def _longest(holds: Callable[[int], bool]) -> int | None:
    """The largest number of tokens for which `holds` is true; None: it is for all. It is true up to
    some number."""
    if holds(_LONGEST_TOKENS):
        return None
    low, high = 0, _LONGEST_TOKENS
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
