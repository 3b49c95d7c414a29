"""Checks of the server's arguments that need neither machine nor model, and the ranks of a machine.

Each yields a line for every mistake that it finds; a line names the flag and the remedy.
`mistakes_of` makes all of them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from itertools import permutations
from typing import TYPE_CHECKING, Any

from sglang.srt.arg_groups.cli import Mistake, check_choices, flag_name, lines_of, refuse_ignored
from sglang.srt.arg_groups.disaggregation import DisaggregationMode, may_decode, may_prefill
from sglang.srt.arg_groups.disaggregation_checks import check_disaggregation, check_machines
from sglang.srt.arg_groups.extra_config import FLAG, check_extra_config_keys
from sglang.srt.arg_groups.model_pages import cache_and_page_size
from sglang.srt.arg_groups.observability import check_observability
from sglang.srt.arg_groups.remote_weights import check_remote_weights, offers_weights
from sglang.srt.arg_groups.server_flags import ServerFlags
from sglang.srt.arg_groups.speculative import check_speculative
from sglang.srt.constants import (
    FOLLOW_ROOM,
    MAX_PREFILL_GROUPS,
)
from sglang.srt.function_call.gpt_oss_detector import GPT_OSS
from sglang.srt.hardware_backend.device_kinds import DEVICE_KINDS, device_kind
from sglang.srt.parser.reasoning_parser import AUTO

if TYPE_CHECKING:
    from sglang.srt.hardware_backend.device_kinds import DeviceKind


_LONGEST_SESSION_S = 86400.0
"""Longest `--keep-session-seconds`, a day: hints are for agents that come back soon."""


def check_device(args: ServerFlags, kind: DeviceKind) -> Iterator[str]:
    """Refuse settings that this kind of device does not support, or that have no effect there."""
    if args.kv_cache_dtype not in kind.kv_cache_dtypes:
        yield (
            f"--kv-cache-dtype {args.kv_cache_dtype} does not work on {kind.title}; "
            f"use {' or '.join(kind.kv_cache_dtypes)}"
        )
    backend = args.attention_backend
    if backend is not None and backend not in kind.attention_backends:
        yield (
            f"--attention-backend {backend} does not run on {kind.title}; "
            f"use {' or '.join(kind.attention_backends)}"
        )


def without_effect(args: ServerFlags) -> Iterator[str]:
    """The flags of `args` that have no effect beside the others, and never one on answers. On
    `auto` those of every device are left out."""
    kind = DEVICE_KINDS.get(args.device)
    has_graphs = kind is None or kind.captures_graphs
    if args.cuda_graph_max_bs is not None and (args.disable_cuda_graph or not has_graphs):
        yield "--cuda-graph-max-bs"
    if may_decode(args) and not may_prefill(args):  # Prefill servers listen there.
        field = "disaggregation_bootstrap_port"
        yield from (flag_name(field) for _ in refuse_ignored(args, field, ""))
    if may_decode(args) and not cache_and_page_size(args)[0]:
        field = "disaggregation_decode_retraction_backup"  # It copies to L2.
        yield from (flag_name(field) for _ in refuse_ignored(args, field, ""))


def check_numbers(args: ServerFlags) -> Iterator[Mistake]:
    for field, is_right, expected in _ranges(args):
        if not is_right:
            yield field, f"{flag_name(field)} {getattr(args, field)}: must be {expected}"


def _ranges(args: ServerFlags) -> Iterator[tuple[str, bool, str]]:
    """Fields, whether the value of each is in its range, and the range in words."""
    for field in ("context_length", "max_total_tokens"):
        value = getattr(args, field)
        yield field, value is None or value >= 2, "at least 2: one token of prompt, one of output"
    for field in (
        "max_mamba_cache_size",
        "mamba_track_interval",
        "max_running_requests",
        "max_queued_requests",
        "max_prefill_tokens",
        "page_size",
        "stream_interval",
        "cuda_graph_max_bs",
        "tp_size",
        "attn_cp_size",
        "attn_dp_size",
        "dp_size",
        "ep_size",
        "nnodes",
    ):
        value = getattr(args, field)
        yield field, value is None or value >= 1, "at least 1"
    for field in (
        "port",
        "disaggregation_bootstrap_port",
        "remote_instance_weight_loader_seed_instance_service_port",
    ):
        value = getattr(args, field)
        yield field, value is None or 1 <= value <= 65535, "from 1 to 65535"
    yield "base_gpu_id", args.base_gpu_id >= 0, "0 or more"
    yield "random_seed", 0 <= args.random_seed < 2**63, "from 0 to 2^63 - 1"
    for field in (
        "watchdog_timeout",
        "schedule_conservativeness",
        "hicache_ratio",
        "mamba_full_memory_ratio",
        "target_inter_token_latency",
    ):
        value = getattr(args, field)
        yield field, value is None or (math.isfinite(value) and value > 0), "a number above 0"
    yield "keep_session_share", 0 <= args.keep_session_share <= 1, "from 0 to 1"
    seconds = args.keep_session_seconds
    yield "keep_session_seconds", 0 <= seconds <= _LONGEST_SESSION_S, "from 0 to 86400"
    drain = args.drain_seconds
    yield "drain_seconds", math.isfinite(drain) and drain >= 0, "0 or more"
    yield "hicache_size", math.isfinite(args.hicache_size) and args.hicache_size >= 0, "0 or more"
    attempts = args.hicache_storage_prefetch_retry_max_attempts
    expected = "from 0 to 1000"
    right = attempts is None or 0 <= attempts <= 1000
    yield "hicache_storage_prefetch_retry_max_attempts", right, expected
    pause = args.hicache_storage_prefetch_retry_poll_interval
    right = pause is None or 1 <= pause <= 1000
    yield "hicache_storage_prefetch_retry_poll_interval", right, "from 1 to 1000"
    share = args.hicache_host_memory_fraction
    yield "hicache_host_memory_fraction", share is None or 0 < share <= 1, "above 0, at most 1"
    fraction = args.mem_fraction_static
    yield "mem_fraction_static", fraction is None or 0 < fraction < 1, "between 0 and 1"
    chunk = args.chunked_prefill_size
    limit = args.mamba_max_states_per_path
    yield "mamba_max_states_per_path", limit == -1 or limit >= 1, "-1 or at least 1"
    yield "chunked_prefill_size", chunk is None or chunk == -1 or chunk >= 1, "-1 or at least 1"


def check_not_empty(args: ServerFlags) -> Iterator[Mistake]:
    """Refuse empty text, which usually comes from an unset shell variable."""
    for field in dataclasses.fields(args):
        if getattr(args, field.name) == "":
            yield field.name, f"{flag_name(field.name)} is empty; give it a value or leave it out"


def check_pages(args: ServerFlags, page_size: int) -> Iterator[str]:
    """Refuse sizes that do not match the page size. A chunk of -1 means whole prompts.

    Prompts are cut between pages. If a pass could not compute one page, a prompt would wait for
    ever.
    """
    chunk = args.chunked_prefill_size
    if chunk not in (None, -1) and chunk % page_size:
        yield (
            f"--chunked-prefill-size {chunk}: must be a multiple of --page-size {page_size}, "
            f"e.g. {max(chunk // page_size, 1) * page_size}"
        )
    if chunk != -1 and args.max_prefill_tokens < page_size:
        yield (
            f"--max-prefill-tokens {args.max_prefill_tokens} is less than --page-size {page_size}, "
            f"and prompts are cut at whole pages: make it at least {page_size}, the pages smaller, "
            "or leave prompts whole with --chunked-prefill-size -1"
        )
    if args.max_total_tokens is not None and args.max_total_tokens < page_size:
        yield (
            f"--max-total-tokens {args.max_total_tokens} is less than one page, --page-size "
            f"{page_size}: raise it, or make the pages smaller"
        )


def check_parallelism(args: ServerFlags) -> Iterator[str]:
    """Refuse numbers of ranks and machines that do not fit each other: a line for each mistake,
    with the flag and the remedy."""
    if args.dp_size != 1 and not args.enable_dp_attention:
        yield (
            f"--dp-size {args.dp_size}: a server has 1. python -m sglang_router.launch_server "
            "starts several, and a router in front of them; --enable-dp-attention divides the "
            "ranks of one server"
        )
    yield from _check_dp(args)
    yield from _check_ep(args)
    if num_dp_groups(args) == 1 and args.tp_size % args.attn_cp_size:
        yield (
            f"--attn-cp-size {args.attn_cp_size} does not divide --tp-size {args.tp_size}: the "
            "ranks of context parallelism are among those of --tp-size"
        )
    if args.enable_prefill_context_parallel and args.attn_cp_size == 1:
        yield (
            "--enable-prefill-context-parallel needs --attn-cp-size N, the ranks over which the "
            "tokens of a prefill are split: at least 2, and a divisor of --tp-size"
        )
    if args.tp_size % args.nnodes:
        yield (
            f"--nnodes {args.nnodes} does not divide --tp-size {args.tp_size}: each machine has "
            "equally many ranks"
        )
    if not 0 <= args.node_rank < args.nnodes:
        yield (
            f"--node-rank {args.node_rank}: with --nnodes {args.nnodes} it is from 0 to "
            f"{args.nnodes - 1}"
        )
    if args.nnodes > 1 and args.dist_init_addr is None:
        yield (
            f"--nnodes {args.nnodes} needs --dist-init-addr HOST:PORT, the same on all machines: "
            "an address of the first one, where the ranks meet"
        )
    if args.tp_size == 1:
        yield from refuse_ignored(args, "dist_init_addr", "with --tp-size 1")
    elif args.dist_init_addr is not None:
        try:
            meeting_host, _ = meeting_address(args)
        except ValueError as error:
            yield str(error)
        else:
            yield from check_machines(args, meeting_host)


def num_dp_groups(args: ServerFlags) -> int:
    """Groups of ranks with a cache and requests of their own; `resolve` makes it `attn_dp_size`."""
    by_other_name = args.dp_size if args.enable_dp_attention else 1
    return by_other_name if args.attn_dp_size == 1 else args.attn_dp_size


def reports_held_pages(args: ServerFlags) -> bool:
    """True if the DP groups of resolved arguments tell the server process which pages they have, so
    that it chooses groups by prefix."""
    return (
        args.attn_dp_size > 1
        and args.load_balance_method == "auto"
        and not args.disable_radix_cache
    )


def _check_dp(args: ServerFlags) -> Iterator[str]:
    """Refuse sizes of data-parallel attention that do not fit the others, and the features that do
    not work with it yet."""
    size = num_dp_groups(args)
    if size == 1:
        where = "without --attn-dp-size above 1"
        yield from refuse_ignored(args, "enable_dp_attention", where)
        yield from refuse_ignored(args, "load_balance_method", where)
        return
    given = f"--attn-dp-size {size}"
    if args.attn_dp_size == 1:
        given = f"--enable-dp-attention --dp-size {size}"
    if args.dp_size not in (1, size):
        yield f"{given} and --dp-size {args.dp_size}: give one of them, or both the same"
    each = size * args.attn_cp_size
    if args.tp_size % each:
        yield _sizes_that_work(args, size, given)
    for is_used, feature in (
        (args.nnodes > 1, f"--nnodes {args.nnodes}"),
        (offers_weights(args), "weights that one server reads from another"),
    ):
        if is_used:
            yield f"{given} does not work with {feature} yet: leave one of them out"
    if may_prefill(args):
        if size > MAX_PREFILL_GROUPS:
            yield (
                f"{given}: a prefill server has at most {MAX_PREFILL_GROUPS} groups, which decode "
                "servers ask: start several servers"
            )
    elif args.load_balance_method == FOLLOW_ROOM:
        yield (
            f"--load-balance-method {FOLLOW_ROOM}: it is for prefill servers, whose requests have "
            f"rooms: add --disaggregation-mode {DisaggregationMode.PREFILL}, or use another method"
        )


def _check_ep(args: ServerFlags) -> Iterator[str]:
    """Refuse sizes of expert parallelism other than all ranks, and what does not work with it."""
    size = args.ep_size
    if size == 1:
        return
    if size != args.tp_size:
        yield (
            f"--ep-size {size}: experts are whole on all ranks or on none: give 1, or as many as "
            f"--tp-size, {args.tp_size}"
        )
    for is_used, feature in (
        (args.attn_cp_size > 1, f"--attn-cp-size {args.attn_cp_size}"),
        (offers_weights(args), "weights that one server reads from another"),
    ):
        if is_used:
            yield f"--ep-size {size} does not work with {feature} yet: leave one of them out"


def _sizes_that_work(args: ServerFlags, size: int, given: str) -> str:
    """The line about sizes that do not divide each other."""
    tp_size, cp_size = args.tp_size, args.attn_cp_size
    works = [str(one) for one in range(2, tp_size + 1) if tp_size % (one * cp_size) == 0]
    also = f" times --attn-cp-size {cp_size}" if cp_size > 1 else ""
    remedy = f"give a multiple of {size * cp_size} as --tp-size"
    if works:
        remedy += f", or {' or '.join(works[:8])} groups"
    return f"{given}{also} does not divide --tp-size {tp_size}, the ranks of all groups: {remedy}"


def ranks_per_node(args: ServerFlags) -> int:
    return args.tp_size // args.nnodes


def meeting_address(args: ServerFlags) -> tuple[str, int]:
    """Host and port where the ranks meet; port 0: a free one. Raises ValueError if
    `--dist-init-addr` is not HOST:PORT."""
    if args.dist_init_addr is None:
        return "127.0.0.1", 0
    host, _, port = args.dist_init_addr.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isascii() or not port.isdigit() or not 1 <= int(port) <= 65535:
        raise ValueError(
            f"--dist-init-addr {args.dist_init_addr}: must be HOST:PORT with a port from 1 to 65535"
        )
    return host, int(port)


def mistakes_of(args: ServerFlags, malformed: Sequence[str] = ()) -> list[str]:
    """A line for each mistake, with the flag and the remedy. The fields `malformed` have their
    defaults, because their flags could not be read."""
    wrong: dict[str, str] = {}
    for find in (check_choices, check_numbers, check_not_empty):
        for field, line in find(args):
            wrong.setdefault(field, line)
    # The other fields are checked against each other too, with stand-ins for the wrong ones.
    others = dataclasses.replace(args, **{name: _stand_in(args, name) for name in wrong})
    lines = [
        *lines_of(_check_config, others),
        *lines_of(_check_tls, others),
        *lines_of(_check_parsers, others),
        *lines_of(check_remote_weights, others, others.host, others.port),
        *lines_of(check_parallelism, others),
        *lines_of(check_disaggregation, others),
        *lines_of(check_observability, others),
        *lines_of(check_speculative, others, others.attention_backend),
        *lines_of(_check_cache, others),
    ]
    if others.device != "auto":
        lines += check_device(others, device_kind(others.device))
    flags = [flag_name(field) for field in (*wrong, *malformed)]
    return [*wrong.values(), *(line for line in lines if not any(f in line for f in flags))]


def _stand_in(args: ServerFlags, name: str) -> Any:
    """A value in place of a wrong one: the default, or a choice if the default is None."""
    field = next(one for one in dataclasses.fields(args) if one.name == name)
    choices = field.metadata["choices"]
    return choices[0] if field.default is None and choices else field.default


def _check_config(args: ServerFlags) -> Iterator[str]:
    if args.config is not None:
        yield (
            "--config is read on the command line of `sglang serve` and its tools alone: give the "
            "settings themselves"
        )


def _check_tls(args: ServerFlags) -> Iterator[str]:
    """Refuse halves of a certificate's settings, and features that would need https of a peer."""
    if (args.ssl_certfile is None) != (args.ssl_keyfile is None):
        there, missing = "--ssl-certfile", "--ssl-keyfile"
        if args.ssl_certfile is None:
            there, missing = missing, there
        yield f"{there} needs {missing}: give the certificate and its private key"
    if args.ssl_certfile is None:
        yield from refuse_ignored(args, "ssl_keyfile_password", "without --ssl-certfile")
    elif offers_weights(args):
        yield (
            "--ssl-certfile: other servers ask a seed of weights over http: leave it out, and put "
            "a proxy with TLS in front for clients"
        )


def _check_parsers(args: ServerFlags) -> Iterator[str]:
    """Refuse another parser beside the one that reads reasoning and calls together."""
    names = {
        "--tool-call-parser": args.tool_call_parser,
        "--reasoning-parser": args.reasoning_parser,
    }
    for one, other in permutations(names):
        if names[one] == GPT_OSS and names[other] not in (None, AUTO, GPT_OSS):
            yield (
                f"{other} {names[other]} contradicts {one} {GPT_OSS}, which reads reasoning and "
                f"calls: give {other} {GPT_OSS} too, or leave it out"
            )


def _check_events(args: ServerFlags) -> Iterator[str]:
    try:
        config = args.kv_events()
        if config is not None:
            config.check_groups(num_dp_groups(args))
    except ValueError as error:
        yield str(error)
        return
    if args.disable_radix_cache and config is not None:
        yield (
            "--kv-events-config has no effect with --disable-radix-cache, since no block is kept: "
            "leave one of them out"
        )


def _check_buffer(args: ServerFlags) -> Iterator[str]:
    """Refuse what a buffer between L1 and L3 cannot do."""
    mode = "--hicache-host-memory-mode buffer_only"
    if args.hicache_storage_backend is None:
        yield (
            f"{mode} needs --hicache-storage-backend: no page stays in host memory, so there must "
            "be a store behind it; or leave the mode out"
        )
    if args.hicache_write_policy == "write_back":
        yield (
            f"{mode} does not work with --hicache-write-policy write_back: L1 evicts when it "
            "needs the room at once, and would wait for L3 or lose what the buffer cannot hold; "
            "give write_through or write_through_selective"
        )


def _check_cache(args: ServerFlags) -> Iterator[str]:
    """Refuse settings of the cache that have no effect or contradict each other."""
    hierarchical, page_size = cache_and_page_size(args)
    yield from _check_events(args)
    if args.disable_radix_cache:
        if hierarchical:
            yield (
                "--disable-radix-cache contradicts the hierarchical cache, whose tiers are "
                "indexed by the radix tree; drop one of them"
            )
        for field in (
            "schedule_policy",
            "radix_eviction_policy",
            "radix_cache_backend",
            "mamba_max_states_per_path",
            "mamba_scheduler_strategy",
            "mamba_track_interval",
        ):
            yield from refuse_ignored(args, field, "with --disable-radix-cache")
    if args.mamba_scheduler_strategy == "no_buffer":
        where = "with --mamba-scheduler-strategy no_buffer"
        yield from refuse_ignored(args, "mamba_track_interval", where)
    for field in (f.name for f in dataclasses.fields(args) if f.name.startswith("hicache_")):
        if not hierarchical:
            yield from refuse_ignored(args, field, "without --enable-hierarchical-cache")
        elif args.hicache_storage_backend is None and flag_name(field) == FLAG:
            yield from refuse_ignored(args, field, "without --hicache-storage-backend")
    if hierarchical and args.hicache_host_memory_mode == "buffer_only":
        yield from _check_buffer(args)
    if args.nnodes > 1 and args.hicache_host_memory_fraction is not None:
        yield (
            f"--hicache-host-memory-fraction does not work with --nnodes {args.nnodes}, since the "
            "machines may have different memory: give --hicache-size"
        )
    yield from check_pages(args, page_size)
    if args.hicache_storage_backend is not None:
        check_extra_config_keys(args.hicache_storage_backend, args.extra_config())
