"""Forecasts of recorded runs of `gpu-hicache agents`, from the rates in their lines.

Lines of 2026-11-30 lack some rates, for which there are options. By default Mooncake's copying
thread takes 0.67 of a read (benchmark/results/2026-11-30-gpu-agents.md says why), loads from L2 run
at the rate of PCIe, client and server take 1 us for a token of a prompt, and attention 1.2 us more
for a token before new ones: 36 layers of 8,192 tokens after 24,576 (5.943 ms) and of 2,048 after
30,000 (2.391) in 2026-11-21-gpu-attention-backends.jsonl give that. Writes are taken to be as fast
as reads. About a minute.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from benchmark.command import Command, Refused
from benchmark.gpu_hicache.agents import FULL, Size
from benchmark.gpu_hicache.agents_forecast import ORDERS, forecast
from benchmark.gpu_hicache.agents_rates import Rates
from benchmark.report import Report
from sglang.planning.served_costs import ServerSizes
from sglang.srt.constants import GB
from sglang.srt.mem_cache.l3.prefetch_table import PrefetchPolicy

RUNS: Final = Path(__file__).parents[1] / "results" / "2026-11-30-gpu-agents.jsonl"
_FIGURES: Final = {
    "hit_rate": "share", "mean_ttft": "s", "median_ttft": "s", "output_throughput": "token/s",
}  # fmt: skip


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--lines", type=Path, default=RUNS, help="what `gpu-hicache agents --out` wrote")
    add("--runs", type=int, help="the first so many")
    add("--orders", type=int, default=ORDERS, help="random orders of each forecast")
    add("--policy", choices=list(PrefetchPolicy), help="instead of the recorded one")
    add("--copied", type=float, default=0.67, help="share of a read that the copying thread takes")
    add("--load-gb-s", type=float, default=55.0, help="rate of loads from L2 to L1")
    add("--before-us", type=float, default=1.2, help="of attention, for a token before new ones")
    add("--prompt-token-us", type=float, default=1.0, help="of client and server, for each token")


@dataclass(slots=True)
class Recorded:
    """The lines of servers with or without L3."""

    arguments: Mapping[str, Any]
    rates: dict[tuple[str, int], float] = field(default_factory=dict)
    """Values by metric, and tokens (0: none)."""
    figures: dict[str, float] = field(default_factory=dict)


def read_runs(lines: Sequence[str]) -> list[Recorded]:
    """The runs in a file of lines, servers with L3 and without apart."""
    runs: list[Recorded] = []
    for line in map(json.loads, lines):
        case = line["case"]
        if line["metric"] == "start":
            runs.append(Recorded(line["arguments"]))
        elif runs and line["metric"] in _FIGURES and set(case) == {"servers"}:
            runs[-1].figures[line["metric"]] = line["value"]
        elif runs:
            at = case.get("tokens", case.get("context", 0))
            runs[-1].rates[line["metric"], 0 if "_rate" in line["metric"] else at] = line["value"]
    return [run for run in runs if len(run.figures) == len(_FIGURES)]


def size_of(run: Recorded) -> Size:
    """The sizes of a run on GPUs."""
    answer, sessions = run.arguments["answer"], run.arguments["sessions"]
    size = FULL
    if answer is not None:
        size = replace(size, talk=replace(size.talk, output_len=answer))
    return size if sessions is None else size.of_sessions(sessions)


def rates_of(run: Recorded, args: argparse.Namespace) -> Rates:
    """The measured rates, and what the lines lack from options."""
    probe, quarter = FULL.probe, FULL.probe // 4
    known = run.rates
    seconds = {
        name: FULL.kv_bytes / GB / known[f"{name}_rate", 0]
        for name in ("read", "both_read", "write", "load")
        if (f"{name}_rate", 0) in known
    }
    by_prompt_token = args.prompt_token_us * 1e-6
    load = FULL.kv_bytes / GB / args.load_gb_s
    read = seconds.get("read")
    if read is not None and "both_read" not in seconds:
        # It was the time until the first token.
        read -= load + by_prompt_token
        seconds |= {"load": load, "write": read, "both_read": 2 * args.copied * read}
    step = known["step", FULL.page_size] * 1e-3
    together = [name for name, _ in known if name.startswith("step_of_")]
    return Rates(
        probe=probe,
        chunk=FULL.chunk,
        turn_prefill=known.get(("turn_prefill", probe // 16), 0.0) * 1e-3,
        prefill=known["prefill", probe] * 1e-3,
        quarter_prefill=known["prefill", quarter] * 1e-3,
        repeated=known.get(("repeated", probe), 1e3 * (step + probe * by_prompt_token)) * 1e-3,
        step=step,
        long_step=known["step", probe] * 1e-3,
        together=int(together[0].rsplit("_", 1)[1]) if together else 2,
        joint_step=known[together[0], FULL.page_size] * 1e-3 if together else step,
        read=read,
        both_read=seconds.get("both_read", 0.0),
        write=seconds.get("write", 0.0),
        load=seconds.get("load", load),
    )


def run(args: argparse.Namespace, report: Report) -> None:
    runs = read_runs(args.lines.read_text().splitlines())[: args.runs]
    if not runs:
        raise Refused(f"--lines {args.lines}: it has no run of `gpu-hicache agents`")
    for number, one in enumerate(runs):
        size, rates = size_of(one), rates_of(one, args)
        policy = PrefetchPolicy(args.policy or one.arguments.get("policy", "wait_complete"))
        sizes = ServerSizes(
            page_size=size.page_size, l1=size.l1, l2=size.l1, chunk=size.chunk, policy=policy
        )
        said = forecast(
            size.talk, rates.costs(args.before_us * 1e-6), sizes, servers=2, orders=args.orders
        )
        case = {"run": number, "l3": rates.read is not None, "policy": policy.value}
        for metric, value in one.figures.items():
            mean, least, most = said.of(metric)
            report.add(metric, value, _FIGURES[metric], case, expected=mean, least=least, most=most,
                       ratio=mean / value)  # fmt: skip
        turns = zip(said.hit_rates(), said.ttfts(), strict=True)
        for turn, (hits, ttft) in enumerate(turns):
            of_turn = {**case, "turn": turn + 1}
            report.add("expected_hit_rate", hits, "share", of_turn)
            report.add("expected_mean_ttft", ttft, "s", of_turn)


COMMAND: Final = Command(run=run, add_options=add_options, quick={"runs": 1, "orders": 1})
