"""Conversations of many clients over many rounds: benefit of the prefix cache by round and tier.

Uses /generate of a running server. The prompt of each round is the conversation so far and
`--request-length` new tokens. Clients that may ask wait in a ready queue. While fewer than
`--max-parallel` requests are under way, `--ready-queue-policy` chooses the next client. If every
client has a slot, the queue stays empty, and clients come in turn with any policy.

Prints TTFT, hit rate and cached tokens by tier for each round. `--flush-between-rounds` empties L1
and L2 before every round except the first, so hits come from L3. `--fixed-answers` continues
conversations with random tokens in place of the model's answers, so two runs with one seed send the
same prompts. Exits with 1 if a request failed, and with 2 if the server or the flags do not work.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from tqdm import tqdm

from benchmark.command import Command, Failed, Refused
from benchmark.report import Report
from rigs.bench.multiturn import (
    Conversations,
    Distribution,
    ReadyQueuePolicy,
    converse,
    round_figures,
)
from sglang.benchmark.api_backends import (
    TIERS,
    RequestOptions,
    RequestResult,
    fetch_model_info,
    flush_cache,
    load_tokens,
)
from sglang.benchmark.report import writable_file
from sglang.benchmark.serving_metrics import error_counts, open_session


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=30000)
    parser.add_argument("--base-url", help="instead of --host and --port")
    parser.add_argument("--api-key")
    parser.add_argument("--admin-api-key", help="for --flush-between-rounds")
    parser.add_argument("--tokenizer", help="directory; absent: the server's")
    parser.add_argument("--num-clients", type=int, default=256)
    parser.add_argument("--num-rounds", type=int, default=5)
    parser.add_argument("--request-length", type=int, default=512, help="new tokens per round")
    parser.add_argument("--output-length", type=int, default=64)
    parser.add_argument("--max-parallel", type=int, default=128, help="most requests under way")
    parser.add_argument(
        "--request-rate", type=float, default=1.0, help="most requests per second; inf: no limit"
    )
    parser.add_argument(
        "--distribution", type=Distribution, choices=list(Distribution), default="poisson",
        help="distribution of the times between requests",
    )  # fmt: skip
    parser.add_argument(
        "--ready-queue-policy", type=ReadyQueuePolicy, choices=list(ReadyQueuePolicy),
        default="random", help="choice of the next client in the ready queue",
    )  # fmt: skip
    parser.add_argument(
        "--enable-round-barrier", "--round-barrier", action="store_true",
        dest="round_barrier", help="no client runs ahead",
    )  # fmt: skip
    parser.add_argument("--fixed-answers", action="store_true", help="two runs ask the same")
    parser.add_argument("--flush-between-rounds", action="store_true")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--tag", help="kept in the JSON lines")
    parser.add_argument("--plot", type=writable_file, help="write a PNG here")


async def ask_all(args: argparse.Namespace, url: str) -> list[list[RequestResult]]:
    """Run all rounds. Returns their results. Raises ValueError."""
    shape = Conversations(
        clients=args.num_clients,
        rounds=args.num_rounds,
        request_len=args.request_length,
        output_len=args.output_length,
        parallel=args.max_parallel,
        request_rate=args.request_rate,
        distribution=args.distribution,
        ready_queue_policy=args.ready_queue_policy,
        fixed_answers=args.fixed_answers,
        seed=args.seed,
    )
    async with open_session(args.api_key) as session:
        tokenizer = args.tokenizer
        if tokenizer is None:
            info = await fetch_model_info(session, url)
            tokenizer = info.get("tokenizer_path") or info["model_path"]
        vocabulary = load_tokens(tokenizer).vocabulary

        async def between() -> None:
            if args.flush_between_rounds:
                await flush_cache(session, url, args.admin_api_key or args.api_key)

        total = shape.clients * shape.rounds
        with tqdm(total=total, unit="req", disable=None) as bar:
            return await converse(
                session,
                vocabulary,
                shape,
                RequestOptions(base_url=url),
                between_rounds=between if args.round_barrier or args.flush_between_rounds else None,
                on_done=lambda result: bar.update(),
            )


def add_round(
    report: Report,
    one: Mapping[str, Any],
    of: Mapping[str, Any] | None = None,
    expected: Mapping[str, Any] | None = None,
) -> None:
    """Add the figures of a round; times and rates only if a request succeeded.

    Args:
        one: The round, by `round_figures`.
        of: Fields of the case before the round.
        expected: The round of a forecast, which may lack times.
    """
    case = {**(of or {}), "round": one["round"]}
    forecast = _figures(expected) if expected else {}
    for metric, (value, unit) in _figures(one).items():
        if value is not None:
            said, _ = forecast.get(metric, (None, unit))
            raw = {"raw": one["ttfts_ms"]} if metric == "mean_ttft" else {}
            report.add(metric, value, unit, case, expected=said, **raw)


def _figures(one: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
    """Value and unit of each figure that is reported."""
    units = dict.fromkeys(("completed", "failed", "prompt_tokens", "cached_tokens"), "count")
    found = {name: (one[name], unit) for name, unit in units.items()}
    for tier in TIERS:
        found[f"cached_from_{tier}"] = one["cached_tokens_details"].get(tier, 0), "tokens"
    found["hit_rate"] = one["hit_rate"], "share"
    return found | {
        name.removesuffix("_ms"): (ms, "ms")
        for name, ms in one.items()
        if name.endswith("_ms") and name != "ttfts_ms"
    }


def draw(rounds: Sequence[dict[str, Any]], path: str) -> None:
    """Plot TTFT over the rounds, and the cached tokens by tier."""
    import matplotlib  # Not on GPU hosts.

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.6))
    numbers = [one["round"] for one in rounds]
    for name, style in (("median", "o-"), ("p99", "o--")):
        times = [one[f"{name}_ttft_ms"] for one in rounds]
        # A round without successful requests is a gap.
        left.plot(numbers, [math.nan if t is None else t for t in times], style, label=name)
    left.set_ylabel("TTFT (ms)")
    left.set_ylim(bottom=0)
    left.legend()
    below = [0.0] * len(rounds)
    for tier in TIERS:
        shares = [
            one["cached_tokens_details"][tier] / max(1, one["prompt_tokens"]) for one in rounds
        ]
        right.bar(numbers, shares, bottom=below, label=tier)
        below = [low + share for low, share in zip(below, shares, strict=True)]
    right.set_ylabel("cached share of the prompts")
    right.set_ylim(0, 1)
    right.legend()
    for panel in (left, right):
        panel.set_xlabel("round")
        panel.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
        panel.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=80)
    pyplot.close(figure)


def run(args: argparse.Namespace, report: Report) -> None:
    url = (args.base_url or f"http://{args.host}:{args.port}").rstrip("/")
    started = time.perf_counter()
    try:
        results = asyncio.run(ask_all(args, url))
    except ValueError as error:
        raise Refused(str(error)) from None
    report.add("duration", time.perf_counter() - started, "s")
    rounds = [round_figures(number, one) for number, one in enumerate(results, 1)]
    for one in rounds:
        add_round(report, one)
    if args.plot:
        draw(rounds, args.plot)
    errors = error_counts([one for turn in results for one in turn])
    if errors:
        causes = [f"{count} requests failed: {cause}" for cause, count in errors.items()]
        raise Failed("; ".join(causes))


_QUICK: Final = {
    "num_clients": 2,
    "num_rounds": 2,
    "request_length": 64,
    "output_length": 8,
    "request_rate": math.inf,
}
COMMAND: Final = Command(run=run, add_options=add_options, quick=_QUICK)
