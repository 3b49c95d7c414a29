"""Conversations of many clients over many rounds: benefit of the prefix cache by round and tier.

    python benchmark/hicache/bench_multiturn.py --port 30000 --num-clients 80 --num-rounds 10 \\
        --request-length 2048 --output-length 1 --max-parallel 4 --request-rate 16 \\
        [--ready-queue-policy fifo] [--enable-round-barrier] [--flush-between-rounds] \\
        [--log-file multiturn.jsonl] [--plot multiturn.png]

Uses /generate of a running server. The prompt of each round is the conversation so far and
`--request-length` new tokens. Clients that may ask wait in a ready queue. While fewer than
`--max-parallel` requests are under way, `--ready-queue-policy` chooses the next client. With as
many slots as clients the queue is empty, and clients come in turn with any policy.

Prints one JSON line for each round (TTFT, hit rate, cached tokens by tier), and a readable line on
stderr. With `--flush-between-rounds`, L1 and L2 are emptied before every round except the first, so
that hits come from L3. With `--fixed-answers`, conversations continue with random tokens in place
of the model's answers, so that two runs with one seed send the same prompts. Exits with 1 if a
request failed, and with 2 if the server or the flags do not work.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import sys
import time
from collections.abc import Sequence
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot, ticker
from tqdm import tqdm

from rigs.bench.multiturn import (
    Conversations,
    Distribution,
    ReadyQueuePolicy,
    converse,
    round_figures,
)
from sglang.benchmark.api_backends import RequestOptions
from sglang.benchmark.load_generator import open_session
from sglang.benchmark.report import emit, provenance, writable_file
from sglang.benchmark.request_result import TIERS, RequestResult
from sglang.benchmark.server_facts import fetch_model_info, flush_cache, load_tokens
from sglang.benchmark.serving_metrics import error_counts


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
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
    parser.add_argument(
        "--log-file",
        "--output-file",
        dest="output_file",
        type=writable_file,
        help="also append the JSON lines here",
    )
    parser.add_argument("--plot", type=writable_file, help="write a PNG here")
    parser.add_argument("--disable-tqdm", action="store_true")
    args = parser.parse_args(argv)
    args.base_url = (args.base_url or f"http://{args.host}:{args.port}").rstrip("/")
    return args


async def run(args: argparse.Namespace) -> tuple[list[list[RequestResult]], float]:
    """Run all rounds. Returns their results and the seconds. Raises ValueError."""
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
        if args.tokenizer is None:
            info = await fetch_model_info(session, args.base_url)
            args.tokenizer = info.get("tokenizer_path") or info["model_path"]
        vocabulary = load_tokens(args.tokenizer).vocabulary

        async def between() -> None:
            if args.flush_between_rounds:
                await flush_cache(session, args.base_url, args.admin_api_key or args.api_key)

        started = time.perf_counter()
        total = shape.clients * shape.rounds
        with tqdm(total=total, unit="req", disable=args.disable_tqdm or None) as bar:
            results = await converse(
                session,
                vocabulary,
                shape,
                RequestOptions(base_url=args.base_url),
                between_rounds=between if args.round_barrier or args.flush_between_rounds else None,
                on_done=lambda result: bar.update(),
            )
        return results, time.perf_counter() - started


def summary(one: dict[str, Any]) -> str:
    """The figures of a round in one line."""
    head = f"round {one['round']}: {one['completed']} completed, {one['failed']} failed"
    if not one["completed"]:
        return head
    cached = ", ".join(f"{tier} {one['cached_tokens_details'][tier]}" for tier in TIERS)
    return (
        f"{head}; TTFT median {one['median_ttft_ms']:.1f} ms, p99 {one['p99_ttft_ms']:.1f} ms; "
        f"{one['hit_rate']:.1%} of {one['prompt_tokens']} prompt tokens cached ({cached})"
    )


def draw(rounds: Sequence[dict[str, Any]], path: str) -> None:
    """Plot TTFT over the rounds, and the cached tokens by tier."""
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


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    try:
        results, seconds = asyncio.run(run(args))
    except ValueError as error:
        print(f"bench_multiturn: {error}", file=sys.stderr)
        return 2
    setting = {
        "benchmark": "multiturn",
        **provenance(),
        "tag": args.tag,
        "clients": args.num_clients,
        "request_length": args.request_length,
        "output_length": args.output_length,
        "max_parallel": args.max_parallel,
        "request_rate": args.request_rate,
        "ready_queue_policy": args.ready_queue_policy.value,
        "round_barrier": args.round_barrier or args.flush_between_rounds,
        "seconds": round(seconds, 3),
    }
    rounds = [round_figures(number, one) for number, one in enumerate(results, 1)]
    for one in rounds:
        emit(setting | one, args.output_file)
    for one in rounds:
        print(summary(one), file=sys.stderr)
    if args.plot:
        draw(rounds, args.plot)
    errors = error_counts([one for turn in results for one in turn])
    for cause, count in errors.items():
        print(f"bench_multiturn: {count} requests failed: {cause}", file=sys.stderr)
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
