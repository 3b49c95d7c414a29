"""Plans the cache of a server before it starts: `python -m sglang.hicache_plan --help`.

Shows the bytes of a token in each pool and tier, the size of each tier, the prompts that are faster
to read than to compute, and the flags that follow. Loads no weights: config.json is enough. A trace
of requests gives the share of the prompts that each tier brings.

The engine's own code gives the sizes: states, pools and the prefetch cost model are those of the
server. Prefill rates are estimates unless `--prefill-tokens-s` is given. Exit status: 0; 2 if the
arguments do not work.
"""

from __future__ import annotations

from sglang.srt.utils.process import spin_briefly

if __name__ == "__main__":
    spin_briefly()  # before torch is imported

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Sequence
from typing import Any, Final

from sglang.benchmark.workload import read_trace
from sglang.planning.hit_rates import stack_distances
from sglang.planning.machine import (
    ASSUMED,
    HERE,
    MACHINES,
    Machine,
    find_machine,
    with_given,
)
from sglang.planning.model_costs import (
    config_of_files,
    costs_of_rank,
    experts_of,
    kept_formats,
    parameters_of,
)
from sglang.planning.plan_text import RANKS, Plan, to_text, weights_text
from sglang.planning.prefill_cost import PrefillCost
from sglang.planning.store_reads import tokens_read
from sglang.planning.tiers import (
    ReadOrCompute,
    Tier,
    device_tier,
    host_tier,
    is_buffer,
    pool_cost,
    read_or_compute,
    store_bytes_per_token,
    store_tier,
)
from sglang.planning.trace_picture import Curve, check_plot_file, draw
from sglang.srt.arg_groups.checks import mistakes_of, ranks_per_node
from sglang.srt.arg_groups.cli import flag_name, parse_flags, raise_errors, tool_parser
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.constants import GB
from sglang.srt.entrypoints.local_model import with_local_model
from sglang.srt.layers.weight_format import FormatOf
from sglang.srt.mem_cache.device.pool_registry import resolve_kv_dtype
from sglang.srt.mem_cache.l3.prefetch_table import PrefetchPolicy
from sglang.srt.mem_cache.l3.storage_prefetch import PREFETCH_SHARE
from sglang.srt.mem_cache.l3.storage_settings import StorageSettings
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.logging_utils import configure_logger

_NUMBERS: Final = (
    "device_memory", "host_memory", "l2_gb_s", "l3_gb_s", "l3_size", "prefill_tokens_s",
)  # fmt: skip
_L2_FACTORS: Final = (1, 2, 4)
_FRACTIONS: Final = (1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0)


def parse_args(
    argv: Sequence[str] | None = None,
) -> tuple[argparse.Namespace, ServerArgs]:
    """Parse the tool's own flags and the engine's, and resolve the engine's.

    Raises:
        ValueError: A line for each mistake, with the flag and the remedy.
        SystemExit: `--help` was given and has been printed.
    """
    parser = _own_parser()
    own, rest = parser.parse_known_args(sys.argv[1:] if argv is None else argv)
    if own.help:
        parser.print_help()
        print("\nand of the engine's, such as --model-path, --tp-size, --kv-cache-dtype:\n")
    parsed = parse_flags(
        ServerArgs,
        ["--help"] if own.help else rest,
        prog="python -m sglang.hicache_plan",
        description="Flags of the engine that do not change a size have no effect.",
    )
    lines = list(parsed.lines)
    for name in _NUMBERS:
        value = getattr(own, name)
        if value is not None and not (math.isfinite(value) and value > 0):
            lines.append(f"{flag_name(name)} {value}: must be a number above 0")
    args = dataclasses.replace(
        ServerArgs(**parsed.values), enable_hierarchical_cache=True, log_level="warning"
    )
    raise_errors([*lines, *mistakes_of(args, parsed.malformed)])
    if own.plot is not None:
        if own.trace is None:
            raise ValueError("--plot shows a trace: give --trace FILE too")
        check_plot_file(own.plot)
    configure_logger("warning")
    own.hicache_ratio = args.hicache_ratio if "hicache_ratio" in parsed.given else None
    return own, with_local_model(args.resolve())


def _own_parser() -> argparse.ArgumentParser:
    parser = tool_parser("sglang.hicache_plan", __doc__)
    add = parser.add_argument
    add(
        "--machine",
        default=HERE,
        help=f"{HERE}: this machine, whose rates are measured; or {', '.join(MACHINES)} [{HERE}]",
    )
    number: dict[str, Any] = {"type": float, "metavar": "N"}
    add("--device-memory", **number, help="GB of each device")
    add("--host-memory", **number, help="GB of the host for the engine")
    add("--l2-gb-s", **number, help="GB/s of each rank's copies from host memory")
    add("--l3-gb-s", **number, help="GB/s of each rank's reads from the store")
    add("--l3-size", **number, help="GB of the store; absent: no limit")
    add("--prefill-tokens-s", **number, help="measured tokens/s that the server computes")
    add("--trace", metavar="FILE", help="requests: what --record-trace wrote, or Mooncake's format")
    add("--plot", metavar="FILE", help="write the trace's hit rates here: .png or .svg")
    add("--weights-only", action="store_true", help="print only what the weights take")
    add("--json", action="store_true", help="print one JSON object")
    return parser


def make_plan(own: argparse.Namespace, args: ServerArgs) -> Plan:
    """Compute all figures. Raises ValueError if the model does not work or fit."""
    config = config_of_files(ModelConfig.from_args(args))
    machine = _machine(own, args, config)
    kind = machine.kind
    args = dataclasses.replace(args, device=kind.name).resolve()
    assert args.page_size is not None, "resolved"
    split = args.tp_size // (args.attn_cp_size * args.attn_dp_size)
    kv_dtype = resolve_kv_dtype(args.kv_cache_dtype, config.dtype, kind)
    formats = kept_formats(config) if kind.captures_graphs else None
    experts = experts_of(config, args)
    costs = costs_of_rank(config, kv_dtype, tp_size=split, formats=formats, experts=experts)
    parameters = parameters_of(config)
    device, memory = device_tier(
        args, machine, costs, context_len=config.context_len, vocab_size=config.vocab_size
    )
    host = host_tier(
        args, machine, device, ratio=own.hicache_ratio, ranks_here=ranks_per_node(args)
    )
    store = store_tier(math.inf if own.l3_size is None else own.l3_size * GB, costs, args.page_size)
    given, cost = own.prefill_tokens_s, PrefillCost(config)
    flop_per_s = args.tp_size * machine.flop_per_s.value

    def prefill_s(tokens: int) -> float:
        return cost.operations(tokens) / flop_per_s if given is None else tokens / float(given)

    reads = read_or_compute(machine, costs, prefill_s=prefill_s)
    tiers = [device, host, store]
    server_bytes = store_bytes_per_token(costs, args.page_size)
    return Plan(
        model=args.served_model_name or config.model_path,
        architecture=config.architecture,
        machine=_machine_figures(machine),
        tp_size=args.tp_size,
        page_size=args.page_size,
        parameters=parameters,
        weight_bytes=costs.weight_bytes,
        weights=weights_by_ranks(config),
        pools=[pool_cost(spec, args.page_size) for spec in costs.specs],
        memory=memory,
        tiers=tiers,
        reads=reads,
        flags=_flags(args, host),
        notes=_notes(own, args, machine, device, host, reads, config.context_len),
        trace=None if own.trace is None else _trace(own, tiers, args, reads, server_bytes),
    )


def _machine(own: argparse.Namespace, args: ServerArgs, config: ModelConfig) -> Machine:
    found = find_machine(
        own.machine, config.dtype, device=args.device, num_ranks=ranks_per_node(args)
    )
    scaled = {
        "device_bytes": own.device_memory,
        "host_bytes": own.host_memory,
        "l2_bytes_per_s": own.l2_gb_s,
        "l3_bytes_per_s": own.l3_gb_s,
    }
    return with_given(found, **{k: None if v is None else v * GB for k, v in scaled.items()})


def _machine_figures(machine: Machine) -> dict[str, Any]:
    figures = dataclasses.asdict(machine)
    return {**figures, "kind": machine.kind.name}


def weights_by_ranks(config: ModelConfig) -> list[dict[str, Any]]:
    """Bytes of the first rank's weights, by format and number of ranks that split the layers.

    Formats: that of the files, and, if it is quantized, its weights dequantized. `bytes` has None
    where a model cannot be split over so many ranks.
    """
    kept = kept_formats(config)
    plain = str(config.dtype).removeprefix("torch.")
    kinds: list[tuple[str, FormatOf | None]] = [(plain, None)]
    if kept is not None:
        kinds = [(str(config.quantization), kept), (f"dequantized, {plain}", None)]
    rows = []
    for name, formats in kinds:
        sizes: dict[int, int | None] = {}
        for ranks in RANKS:
            try:
                costs = costs_of_rank(config, config.dtype, tp_size=ranks, formats=formats)
            except ValueError:
                sizes[ranks] = None
            else:
                sizes[ranks] = costs.weight_bytes
        rows.append({"format": name, "bytes": sizes})
    return rows


def _flags(args: ServerArgs, host: Tier) -> list[str]:
    size = host.rank_bytes / GB
    flags = ["--enable-hierarchical-cache", f"--hicache-size {int(size)}"]
    if is_buffer(args):
        mode = f"--hicache-host-memory-mode {args.hicache_host_memory_mode}"
        flags[1:] = [f"--hicache-size {size:.3g}", mode]
    sizes = {"tp_size": args.tp_size, "attn_dp_size": args.attn_dp_size, "ep_size": args.ep_size}
    flags[:0] = [f"{flag_name(name)} {size}" for name, size in sizes.items() if size > 1]
    return flags


def _notes(
    own: argparse.Namespace,
    args: ServerArgs,
    machine: Machine,
    device: Tier,
    host: Tier,
    reads: ReadOrCompute,
    context_len: int,
) -> list[str]:
    """Consequences of the figures, a sentence each."""
    notes = []
    if is_buffer(args):
        notes.append("L2 is a buffer: it adds no tokens, and what L1 lacks is read from L3")
    elif host.tokens < 2 * device.tokens and args.hicache_write_policy == "write_through":
        notes.append(
            "L2 is less than twice L1, which it duplicates under write_through: "
            "--hicache-write-policy write_back keeps each page in one of them"
        )
    longest, readable = min(context_len, int(device.tokens)), int(PREFETCH_SHARE * host.tokens)
    if not is_buffer(args) and readable < longest:
        notes.append(
            f"prompts have up to {longest:,} tokens, and L3 brings {readable:,} of them, half of "
            "L2: --hicache-host-memory-mode buffer_only reads all, in parts"
        )
    if int(host.rank_bytes // GB) == 0 and not is_buffer(args):
        notes.append("L2 is below 1 GB: give --hicache-ratio in place of --hicache-size")
    least = reads.break_even_bytes_per_s / GB
    rate = f"L3 at {machine.l3_bytes_per_s.value / GB:.3g} GB/s a rank"
    even = f"it breaks even at {least:.3g} GB/s"
    if reads.longest_kept is None:
        notes.append(f"{rate}: reads of any length are kept; {even}")
    else:
        begun = "all begin"
        if reads.longest_begun is not None:
            begun = f"none above {reads.longest_begun:,} begins"
        notes.append(
            f"{rate}: {even}. On an idle server computing overtakes reads above "
            f"{reads.longest_kept:,} tokens, and {begun}; while prompts queue, some are read all "
            "the same. --hicache-storage-prefetch-policy wait_complete reads always, to save "
            "device time"
        )
    if machine.l3_bytes_per_s.source == ASSUMED:
        notes.append("the rate of L3 is that of Mooncake over TCP: give --l3-gb-s for another")
    if machine.host_bytes.source == ASSUMED:
        notes.append("the host's memory is assumed: give --host-memory")
    if own.trace is not None and args.hicache_storage_prefetch_policy == PrefetchPolicy.BEST_EFFORT:
        notes.append("under best_effort no request waits for a read: L3's share is at most this")
    if device.states:
        notes.append(
            "shares of a trace count pages alone; a prefix also needs a recurrent state at its end"
        )
    if own.prefill_tokens_s is None:
        notes.append(
            "prefills are estimated from shapes and the rate of a large product, as efficient as "
            "an H200's in bf16, with ranks that divide all work (fp8 is up to 1.4 times as fast; "
            "sums of ranks take time): sglang.bench_one_batch measures them, --prefill-tokens-s "
            "takes a rate"
        )
    return notes


def _trace(
    own: argparse.Namespace,
    tiers: Sequence[Tier],
    args: ServerArgs,
    reads: ReadOrCompute,
    server_bytes: float,
) -> dict[str, Any]:
    """Hit rates of the trace by tier and by size; writes the plot."""
    trace = read_trace(own.trace)
    if not trace:
        raise ValueError(f"--trace {own.trace}: there are no requests")
    if len({request.share for request in trace}) > 1:
        raise ValueError(f"--trace {own.trace}: its lines are samples of different shares")
    page_size = args.page_size
    assert page_size is not None, "resolved"
    settings = StorageSettings.from_extra_config(args.extra_config())
    distances = stack_distances(trace, page_size)
    # A sample of the prompts needs that share of each tier.
    sampled = trace[0].share
    arrivals_s = [request.timestamp_ms / 1e3 for request in trace]
    # With write_back a page is in L1 or in L2; otherwise L2 has L1's pages too, and L3 those of L2.
    adds = args.hicache_write_policy == "write_back"

    def by_tier(l2_factor: int) -> tuple[list[dict[str, Any]], float]:
        """Hit rates of the tiers, and the share that is computed though L3 has it."""
        found = unread = size = 0.0
        rows = []
        for tier in tiers:
            own = sampled * tier.tokens * (l2_factor if tier.name == "L2" else 1)
            is_sum = adds and tier.name == "L2"
            if tier.name == "L2" and is_buffer(args):
                own = 0.0
            above, size = size, size + own if is_sum else max(size, own)
            rate = distances.hit_rate(size)
            share = rate - found
            if tier.name == "L3" and share:
                read = tokens_read(
                    distances,
                    arrivals_s,
                    l2_tokens=above,
                    l3_tokens=size,
                    reads=reads,
                    threshold=settings.threshold_pages(page_size) * page_size,
                    always=args.hicache_storage_prefetch_policy == PrefetchPolicy.WAIT_COMPLETE,
                )
                unread = share - read / distances.prompt_tokens
            rows.append({"tier": tier.name, "tokens": size / sampled, "hit_rate": share - unread})
            found = rate
        return rows, unread

    rows, unread = by_tier(1)
    marks = [
        (row["tier"], row["tokens"] * server_bytes / GB)
        for row in rows
        if math.isfinite(row["tokens"])
    ]
    (l2,) = (tier for tier in tiers if tier.name == "L2")
    by_l2 = []
    for factor in _L2_FACTORS:
        more, _ = by_tier(factor)
        shares = {row["tier"]: row["hit_rate"] for row in more}
        by_l2.append(
            {
                "factor": factor,
                "rank_gb": factor * l2.rank_bytes / GB,
                "by_tier": shares,
                "hit_rate": sum(shares.values()),
            }
        )
    sizes = [distances.distinct_tokens * fraction for fraction in _FRACTIONS]
    rates = [distances.hit_rate(size) for size in sizes]
    limit = distances.hit_rate(math.inf)
    if own.plot is not None:
        curve = Curve(
            title=f"{own.trace.rsplit('/', 1)[-1]}: {len(trace)} requests, "
            f"{distances.distinct_tokens:,} different tokens",
            sizes_gb=[size / sampled * server_bytes / GB for size in sizes],
            hit_rates=rates,
            limit=limit,
            marks=marks,
        )
        draw(curve, own.plot)
    return {
        "requests": len(trace),
        "prompt_tokens": distances.prompt_tokens,
        "distinct_tokens": distances.distinct_tokens,
        "unlimited_hit_rate": limit,
        "share": sampled,
        "by_tier": rows,
        "by_l2": by_l2,
        "stored_but_computed": unread,
        "by_size": [
            {
                "tokens": int(size / sampled),
                "gb": size / sampled * server_bytes / GB,
                "hit_rate": rate,
            }
            for size, rate in zip(sizes, rates, strict=True)
        ],
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Print the plan and return the exit status."""
    try:
        own, args = parse_args(argv)
        if own.weights_only:
            rows = weights_by_ranks(config_of_files(ModelConfig.from_args(args)))
            print(json.dumps(rows) if own.json else weights_text(rows))
            return 0
        plan = make_plan(own, args)
    except (ValueError, OSError) as error:
        sys.stderr.write("".join(f"error: {line}\n" for line in str(error).splitlines()))
        return 2
    print(json.dumps(_finite(dataclasses.asdict(plan))) if own.json else to_text(plan))
    return 0


def _finite(value: Any) -> Any:
    """The value with null in place of infinity, which JSON does not have."""
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and math.isinf(value) else value


if __name__ == "__main__":
    raise SystemExit(main())
