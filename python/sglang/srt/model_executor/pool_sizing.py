"""Size of the device pools: pure decisions over plain numbers.

Each has a reason, which the server logs at the start.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from sglang.srt.constants import GB, GIB, MIB
from sglang.srt.mem_cache.device.state_spec import (
    ItemKind,
    StateSpec,
    bytes_per_state,
    bytes_per_token,
)

CPU_POOL_BYTES = 1 * GIB
CPU_POOL_FRACTION = 0.1
GPU_STATIC_FRACTION = 0.88
MAX_RUNNING_REQUESTS = 256
LONG_PREFIX = 131072
"""Tokens of the example in `lines_of_kinds`."""
MIN_TOKENS = 2
"""A token of a prompt and one of its output: with fewer, no request can be served."""
FULL_MEMORY_RATIO = 0.9
"""Bytes of recurrent states per byte of keys and values."""
REQUESTS_SHARE = 0.125
"""Most bytes of requests' own states per byte of all pools, unless the user asks for more
requests."""
REQ_TABLE_BYTES = 256 * MIB
"""Upper bound of the table of requests' slots, unless the user asks for more requests."""
_SLOT_BYTES = 4
"""Bytes of one token in that table."""


class Sizing(NamedTuple):
    """A size and the reason for it."""

    amount: int
    """Tokens (a multiple of the page size), requests, states or bytes."""
    reason: str


class PoolSizes(NamedTuple):
    """Sizes of all device pools."""

    tokens: Sizing
    states: Sizing | None
    """Recurrent states; None: the model has none."""
    state_bytes: int
    """Bytes that all recurrent states take, the padding's included."""
    requests: Sizing | None
    """Requests that have a state of their own; None: the model has none such."""
    request_bytes: int
    """Bytes that these states take, the padding's included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """The memory of a device, and what takes it beside the pools."""

    has_own_memory: bool
    """True if the device has its own memory; false for a CPU, which shares the host's."""
    total_bytes: int
    available_bytes: int
    """Free memory after the weights were loaded."""
    mem_fraction_static: float | None = None
    """Share of `total_bytes` for weights and pools together; None: on a CPU min(1 GiB, 10% of the
    memory), elsewhere 0.88 less `graph_bytes` and `exchange_bytes`."""
    weight_bytes: int = 0
    """Bytes of the weights, part of the static share."""
    graph_bytes: int = 0
    """Bytes that CUDA graphs, and verifications of drafts, will take."""
    exchange_bytes: int = 0
    """Most bytes that experts exchange with other DP groups at once."""
    sharers: int = 1
    """Ranks that share the memory, each with an equal part: on a CPU those of the machine."""

    @property
    def own_available_bytes(self) -> int:
        """This rank's part of the free memory."""
        return self.available_bytes // self.sharers

    def pool_budget(self) -> Sizing:
        """Decide how many bytes all device pools may take, unless the user asks for sizes.

        Raises:
            ValueError: `mem_fraction_static` is not between 0 and 1, or leaves too little for the
                exchange.
        """
        total, available = self.total_bytes // self.sharers, self.own_available_bytes
        memory = f"{total / GIB:.1f} GiB"
        if self.sharers > 1:
            memory += f" for each of {self.sharers} ranks"
        if self.mem_fraction_static is None and not self.has_own_memory:
            tenth = int(total * CPU_POOL_FRACTION)
            if tenth < CPU_POOL_BYTES:
                return Sizing(tenth, f"10% of {memory}")
            return Sizing(CPU_POOL_BYTES, "1 GiB, the default on a CPU")
        asked = self.mem_fraction_static
        fraction = GPU_STATIC_FRACTION if asked is None else asked
        if not 0.0 < fraction < 1.0:
            raise ValueError(f"--mem-fraction-static {fraction} must be between 0 and 1")
        budget = int(total * fraction) - self.weight_bytes
        reason = (
            f"--mem-fraction-static {fraction:g} of {memory}, "
            f"less {self.weight_bytes / GIB:.2f} GiB of weights"
        )
        if asked is not None:
            left = total - int(total * fraction)
            if self.exchange_bytes > left:
                raise ValueError(
                    f"--mem-fraction-static {fraction:g} leaves {left / GIB:.2f} GiB, and experts "
                    f"exchange up to {self.exchange_bytes / GIB:.2f} GiB of tokens with other DP "
                    "groups: lower it, or --chunked-prefill-size"
                )
            return Sizing(budget, reason)
        # Leave room for graphs, and the usual reserve even if other processes use the device.
        reserve = int(total * (1.0 - GPU_STATIC_FRACTION))
        if available - reserve < budget:
            budget = available - reserve
            reason = f"{available / GIB:.2f} GiB free, less a reserve of {reserve / GIB:.2f} GiB"
        if self.graph_bytes:
            reason += f" and {self.graph_bytes / GIB:.2f} GiB for CUDA graphs"
        if self.exchange_bytes:
            reason += f", less {self.exchange_bytes / GIB:.2f} GiB that experts exchange"
        return Sizing(budget - self.graph_bytes - self.exchange_bytes, reason)


def size_kv_pool(
    memory: DeviceMemory,
    *,
    kv_bytes_per_token: Fraction | int,
    page_size: int,
    max_total_tokens: int | None = None,
    state_bytes: int = 0,
    context_len: int | None = None,
) -> Sizing:
    """Decide how many tokens the device pool (L1) holds.

    Args:
        kv_bytes_per_token: Bytes of one token's keys and values over all layers.
        page_size: Tokens per page. One more page is needed for padding.
        max_total_tokens: Upper bound from the user.
        state_bytes: Bytes that recurrent states, and states of requests, will take.
        context_len: Longest context of the model. Unless the user asks for a size, a GPU's pool
            holds at most `MAX_RUNNING_REQUESTS` of them, to leave memory free for small models.

    Raises:
        ValueError: One page or the shortest request does not fit, or the memory is not available;
            the message names the flag.
    """
    budget, reason = memory.pool_budget()
    available_bytes, is_default = memory.own_available_bytes, memory.mem_fraction_static is None
    if state_bytes:
        budget -= state_bytes
        available_bytes -= state_bytes
        reason += f", less {state_bytes / GIB:.2f} GiB of states"
    tokens = budget // kv_bytes_per_token - page_size
    if is_default and memory.has_own_memory and context_len is not None:
        most = MAX_RUNNING_REQUESTS * context_len
        if most < tokens:
            tokens, reason = most, f"{MAX_RUNNING_REQUESTS} contexts of {context_len} tokens"
    if max_total_tokens is not None and (is_default or max_total_tokens < tokens):
        tokens, reason = max_total_tokens, f"--max-total-tokens {max_total_tokens}"
    tokens = tokens // page_size * page_size
    if tokens < max(page_size, MIN_TOKENS):
        raise ValueError(
            f"the KV pool would hold {max(tokens, 0)} tokens ({reason}), less than one page of "
            f"{page_size} or a prompt and its output, {MIN_TOKENS}: raise --mem-fraction-static or "
            "--max-total-tokens, or use a smaller --page-size"
        )
    need = int((tokens + page_size) * kv_bytes_per_token)
    if need > available_bytes:
        raise ValueError(
            f"the KV pool of {tokens} tokens ({reason}) needs {need / GIB:.2f} GiB and "
            f"{available_bytes / GIB:.2f} GiB of memory are available: lower --max-total-tokens "
            "or --mem-fraction-static"
        )
    return Sizing(tokens, reason)


def size_states(
    *,
    budget_bytes: int,
    state_bytes: int,
    keeps_snapshots: bool,
    full_memory_ratio: float | None = None,
    max_states: int | None = None,
    max_running_requests: int | None = None,
) -> Sizing:
    """Decide how many recurrent states the device holds: one for each running request, and
    snapshots.

    Args:
        budget_bytes: Bytes of all device pools: see `DeviceMemory`.
        state_bytes: Bytes of one state over all layers. One more state is needed for padding.
        keeps_snapshots: True if states of prefixes are cached; otherwise there are only as many
            states as running requests.
        full_memory_ratio: Most bytes of states per byte of keys and values; None: 0.9.
        max_states: Number from the user, which overrides the ratio.
        max_running_requests: Number from the user; None: `MAX_RUNNING_REQUESTS`.

    Raises:
        ValueError: Too few states fit, or are asked for; names the flags.
    """
    ratio = FULL_MEMORY_RATIO if full_memory_ratio is None else full_memory_ratio
    share = int(budget_bytes * ratio / (1.0 + ratio))
    states, reason = share // state_bytes - 1, f"--mamba-full-memory-ratio {ratio:g}"
    if max_states is not None:
        states, reason = max_states, f"--max-mamba-cache-size {max_states}"
    running = max_running_requests or MAX_RUNNING_REQUESTS
    if not keeps_snapshots and running < states:
        states, reason = running, f"one for each of {running} requests"
    if states < 1 or (states + 1) * state_bytes > budget_bytes:
        raise ValueError(
            f"{max(states, 0)} recurrent states of {state_bytes / MIB:.1f} MiB ({reason}), one "
            f"more for padding, do not fit into {budget_bytes / GIB:.2f} GiB: raise "
            "--mem-fraction-static or --mamba-full-memory-ratio, or lower --max-mamba-cache-size"
        )
    if keeps_snapshots and states < 2:
        raise ValueError(
            f"one recurrent state ({reason}) leaves no slot for the prefix cache beside that of a "
            "running request: give --max-mamba-cache-size 2 or more, which takes "
            f"{3 * state_bytes / MIB:.1f} MiB, or --disable-radix-cache"
        )
    return Sizing(states, reason)


def size_request_states(
    *, budget_bytes: int, request_bytes: int, max_running_requests: int | None = None
) -> Sizing:
    """Decide how many running requests have a state of their own, besides padding.

    Args:
        budget_bytes: Bytes of all device pools: see `DeviceMemory`.
        request_bytes: Bytes of the state of one request over all layers.
        max_running_requests: Number from the user; None: at most `MAX_RUNNING_REQUESTS`, in
            `REQUESTS_SHARE` of the budget.

    Raises:
        ValueError: Not one fits, or fewer than the user asks for; names the flags.
    """
    requests, reason = max_running_requests, f"--max-running-requests {max_running_requests}"
    if requests is None:
        share = int(budget_bytes * REQUESTS_SHARE)
        requests = min(MAX_RUNNING_REQUESTS, share // request_bytes - 1)
        reason = f"{REQUESTS_SHARE:.1%} of the memory for states of requests"
    if requests < 1 or (requests + 1) * request_bytes > budget_bytes:
        raise ValueError(
            f"states of {max(requests, 0)} running requests of {request_bytes / MIB:.1f} MiB "
            f"({reason}), one more for padding, do not fit into {budget_bytes / GIB:.2f} GiB: "
            "raise --mem-fraction-static, or set --max-running-requests lower"
        )
    return Sizing(requests, reason)


def size_pools(
    memory: DeviceMemory,
    *,
    kv_bytes_per_token: Fraction | int,
    state_bytes: int,
    page_size: int,
    context_len: int,
    keeps_snapshots: bool,
    max_total_tokens: int | None = None,
    full_memory_ratio: float | None = None,
    max_states: int | None = None,
    max_running_requests: int | None = None,
    request_bytes: int = 0,
) -> PoolSizes:
    """Divide the memory between states of requests, recurrent states and tokens.

    Args:
        state_bytes: Bytes of one recurrent state over all layers; 0: the model has none.
        request_bytes: Bytes of the state of a running request; 0: the model has none.

    The other arguments, and the errors, are those of `size_request_states`, `size_states` and
    `size_kv_pool`.
    """
    states = requests = None
    all_request_bytes = 0
    if request_bytes:
        requests = size_request_states(
            budget_bytes=memory.pool_budget().amount,
            request_bytes=request_bytes,
            max_running_requests=max_running_requests,
        )
        all_request_bytes = (requests.amount + 1) * request_bytes
    if state_bytes:
        states = size_states(
            budget_bytes=memory.pool_budget().amount - all_request_bytes,
            state_bytes=state_bytes,
            keeps_snapshots=keeps_snapshots,
            full_memory_ratio=full_memory_ratio,
            max_states=max_states,
            max_running_requests=max_running_requests,
        )
    all_state_bytes = 0 if states is None else (states.amount + 1) * state_bytes
    tokens = size_kv_pool(
        memory,
        kv_bytes_per_token=kv_bytes_per_token,
        page_size=page_size,
        max_total_tokens=max_total_tokens,
        state_bytes=all_state_bytes + all_request_bytes,
        context_len=context_len,
    )
    return PoolSizes(tokens, states, all_state_bytes, requests, all_request_bytes)


def memory_parts(
    specs: Iterable[StateSpec],
    *,
    weight_bytes: int,
    tokens: int,
    states: int,
    page_size: int,
    graph_bytes: int,
    exchange_bytes: int,
    requests: int = 0,
) -> dict[str, int]:
    """Bytes of a rank's device memory, by what takes them: the weights, each pool by its name with
    its padding, CUDA graphs with verifications of drafts, which are estimated, and what experts
    exchange with other DP groups.

    Args:
        specs: Specs of the model's state on the rank.
        tokens, states, requests: Sizes of L1; see `PoolSizes`.
        graph_bytes, exchange_bytes: See `DeviceMemory`.
    """
    slots = {
        ItemKind.TOKEN: tokens + page_size,
        ItemKind.STATE: states + 1,
        ItemKind.REQUEST: requests + 1,
    }
    pools = {str(spec.name): slots[spec.item] // spec.stride * spec.num_bytes for spec in specs}
    return {"weights": weight_bytes, **pools, "graphs": graph_bytes, "exchange": exchange_bytes}


def memory_text(parts: Mapping[str, int]) -> str:
    """`memory_parts` for a log."""
    sizes = ", ".join(f"{name} {size / GB:.3f} GB" for name, size in parts.items() if size)
    return f"{sizes}, in all {sum(parts.values()) / GB:.3f} GB"


def lines_of_kinds(specs: Sequence[StateSpec]) -> list[str]:
    """Log line with the bytes of a token by kind of state, and of a long prefix on one rank; none
    if each item stands for one token."""
    if all(spec.stride == 1 for spec in specs):
        return []
    paged = [spec for spec in specs if spec.item is ItemKind.TOKEN]
    kinds = ", ".join(f"{spec.name} {spec.num_bytes / spec.stride:g}" for spec in paged)
    pages, state = LONG_PREFIX * bytes_per_token(specs) / 1e9, bytes_per_state(specs) / 1e9
    return [
        f"A token takes {float(bytes_per_token(specs)):g} bytes on a rank: {kinds}; a prefix of "
        f"{LONG_PREFIX} tokens takes {float(pages):.3f} GB of pages and {state:.3f} GB of state "
        "in each tier"
    ]


def longest_pass(chunk: int | None, max_prefill_tokens: int) -> int:
    """New tokens of the longest prefill.

    Args:
        chunk: `--chunked-prefill-size`. Prompts that are not cut may have more new tokens.
    """
    return max_prefill_tokens if chunk is None or chunk == -1 else chunk


def size_running_requests(
    *,
    pool_tokens: int,
    context_len: int,
    available_bytes: int,
    max_running_requests: int | None = None,
    states: int | None = None,
    own_states: int | None = None,
) -> Sizing:
    """Decide how many requests may run at once.

    Unless the user asks for a number, the pool must have 64 tokens for each, there are at most 256,
    and the table of their slots (4 bytes per token of context) must stay small.

    Args:
        available_bytes: Memory of the device that weights, pools and states leave free.
        states: Number of recurrent states; each request needs one. None: the model has none.
        own_states: Number of states of requests, likewise.

    Raises:
        ValueError: `max_running_requests` is less than 1, or their table does not fit.
    """
    if max_running_requests is None:
        by_pool = pool_tokens // 64
        by_table = REQ_TABLE_BYTES // (_SLOT_BYTES * context_len)
        requests = max(1, min(MAX_RUNNING_REQUESTS, by_pool, by_table))
        reason = f"of {MAX_RUNNING_REQUESTS}, {by_pool} by pool, {by_table} by table"
        size = Sizing(requests, reason)
    elif max_running_requests < 1:
        raise ValueError(f"--max-running-requests {max_running_requests} must be at least 1")
    else:
        size = Sizing(max_running_requests, f"--max-running-requests {max_running_requests}")
    if states is not None and states < size.amount:
        size = Sizing(states, f"one for each of {states} states")
    if own_states is not None and own_states < size.amount:
        size = Sizing(own_states, f"one for each of {own_states} states of requests")
    table_bytes = _SLOT_BYTES * context_len * size.amount
    if table_bytes > available_bytes:
        raise ValueError(
            f"the table of slots of {size.amount} requests ({size.reason}) with contexts of "
            f"{context_len} tokens needs {table_bytes / GIB:.2f} GiB, and "
            f"{available_bytes / GIB:.2f} GiB of memory are left: lower --max-running-requests or "
            "--context-length"
        )
    return size
