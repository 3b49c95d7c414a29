"""Hit rates and times that `gpu-hybrid turns` should give, with L2 and without.

Conversations of clients that wait for each other after each round, with a model that has recurrent
states. L1 bounds the requests that run at once: it holds prompts and answers. Hits come from the
engine's trees. Times come from figures that were measured on an H200 with 12 of Qwen3-Next's 48
layers: one server prefills the waiting requests for which there is room, and otherwise decodes. A
few seconds.
"""

from __future__ import annotations

import argparse
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

from benchmark.command import Command, Refused
from benchmark.multiturn import add_round
from benchmark.report import Report
from benchmark.simulate.talk import Exchange, Talk, replay_talk
from rigs.bench.cache_simulation import Arrangement, CacheSizes
from rigs.bench.multiturn import round_figures
from rigs.bench.state_simulation import SimulatedStateCache, StateSettings
from sglang.benchmark.api_backends import RequestResult
from sglang.planning.served_costs import Costs

ALIGNMENT: Final = 64
"""Tokens between possible snapshots: a page, and a chunk of the delta rule."""
CHUNK: Final = 8192
"""Most prompt tokens of a pass on a GPU."""
LAYERS: Final = 12


def add_talk(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--clients", type=int, default=10)
    add("--rounds", type=int, default=12)
    add("--request-length", type=int, default=1024, help="new prompt tokens of a round")
    add("--output-length", type=int, default=1024, help="tokens of an answer")
    add("--request-rate", type=float, default=16.0, help="most requests per second")
    add("--l1", type=int, default=65536, help="tokens of L1")
    add("--hicache-ratio", type=float, default=2.0, help="size of L2 over that of L1")
    add("--states", type=int, default=64, help="recurrent states in L1")
    add("--track-interval", type=int, default=256, help="tokens between snapshots of an answer")
    add("--layers", type=int, default=LAYERS, help="of Qwen3-Next's 48")
    add("--seed", type=int, default=5)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchCosts(Costs):
    """Seconds of one server whose passes and steps have several requests."""

    by_pass: float
    """Of a prefill pass: reading all weights, and its request."""


def h200_costs(layers: int) -> BatchCosts:
    """Costs of the first `layers` layers on an H200, in bf16.

    Prefills of 128, 8,192 and 32,768 tokens take 9.4, 40.4 and 179 ms, a decode step of one 0.74,
    one of 64 requests of 2,048 tokens 7.6; the latter grows with the experts that are chosen, so
    steps of at most 10 take 0.19 ms for each request. A load of 8,192 tokens adds 6.8 ms. Two
    milliseconds of a pass are HTTP's. (results: 2026-11-29-gpu-hybrid-repeats,
    2026-11-26-gpu-formats-and-repeats)
    """
    part = layers / LAYERS
    return BatchCosts(
        by_pass=2e-3 + 9e-3 * part,
        linear=3.85e-6 * part,
        by_pair=4.3e-11 * part,
        load=8.3e-7 * part,
        step=0.15e-3 + 0.4e-3 * part,
        by_request=0.19e-3 * part,
        by_context=2e-9 * part,
    )


def exchanges(args: argparse.Namespace, *, l2: bool) -> list[list[Exchange]]:
    """The prompts of each round in order, with what the tiers have of them.

    Raises:
        Refused: A conversation does not fit into L1, or sizes are no whole pages.
    """
    turn = args.request_length + args.output_length
    if turn * args.rounds > args.l1 or args.l1 % ALIGNMENT:
        raise Refused(
            f"--l1 {args.l1}: it must be whole pages of {ALIGNMENT} tokens that hold a "
            f"conversation of {turn * args.rounds}; lower --rounds"
        )
    pages = args.l1 // ALIGNMENT
    states = StateSettings(
        num_states=args.states, alignment=ALIGNMENT, track_interval=args.track_interval
    )
    cache = SimulatedStateCache(
        CacheSizes(l1_pages=pages, l2_pages=round(pages * args.hicache_ratio) if l2 else 0),
        states,
        page_size=ALIGNMENT,
        arrangement=Arrangement.WRITE_THROUGH if l2 else Arrangement.ONE_TIER,
        max_tokens=turn * args.rounds,
        chunk_tokens=CHUNK,
        max_requests=args.clients,
    )
    shape = args.clients, args.rounds * turn
    texts = np.random.default_rng(1).integers(0, 1 << 17, shape, dtype=np.uint32)
    talk = Talk(
        f"{args.clients}:random", args.seed, clients=args.clients, rounds=args.rounds, barrier=True
    )
    rounds: list[list[Exchange]] = [[] for _ in range(args.rounds)]
    lengths = args.request_length, args.output_length
    for one in replay_talk(cache, talk, texts, *lengths, room=args.l1):
        rounds[one.turn].append(one)
    cache.close()
    return rounds


@dataclass(frozen=True, slots=True)
class Talked:
    """The results of each round, and the seconds of all; 0: a forecast without times."""

    rounds: list[list[RequestResult]]
    seconds: float

    def figures(self, part: slice) -> dict[str, Any]:
        """`round_figures` of some rounds."""
        every = round_figures(0, [one for turn in self.rounds[part] for one in turn])
        return {name: one for name, one in every.items() if self.seconds or "_ms" not in name}

    def rates(self) -> dict[str, tuple[float, str]]:
        """Seconds and throughput, with units."""
        if not self.seconds:
            return {}
        every = [one for turn in self.rounds for one in turn]
        prompts = sum(one.prompt_tokens for one in every)
        answers = sum(one.completion_tokens for one in every)
        return {
            "duration": (self.seconds, "s"),
            "input_throughput": (prompts / self.seconds, "token/s"),
            "output_throughput": (answers / self.seconds, "token/s"),
        }


@dataclass(slots=True)
class _Decoding:
    context: int
    left: int
    """Tokens of the answer."""
    result: RequestResult


def timed(
    rounds: Sequence[Sequence[Exchange]],
    costs: BatchCosts | None,
    *,
    l1: int,
    output_len: int,
    request_rate: float = math.inf,
) -> Talked:
    """What one server gives. Without costs all times are 0."""
    results, now, scheduled = [], 0.0, 0.0
    for exchanged in rounds:
        found = [
            RequestResult(
                prompt_tokens=one.prompt,
                completion_tokens=output_len,
                cached_tokens=one.device + one.host,
                cached_details={"device": one.device, "host": one.host},
            )
            for one in exchanged
        ]
        results.append(found)
        if costs is None:
            continue
        sent = []
        for _ in found:
            # As the client does: a late request is sent at once.
            sent.append(max(now, scheduled))
            scheduled += 1 / request_rate
        now = _run_round(deque(zip(sent, found, strict=True)), costs, l1, now)
    return Talked(results, now)


def _run_round(
    waiting: deque[tuple[float, RequestResult]], costs: BatchCosts, l1: int, now: float
) -> float:
    """Serve a round from `now` on, and set TTFT and latency. Returns the time of its end."""
    decoding: list[_Decoding] = []
    arrived: dict[int, float] = {id(result): at for at, result in waiting}
    used = 0
    while waiting or decoding:
        batch: list[RequestResult] = []
        new = 0
        while waiting and new < CHUNK:
            at, result = waiting[0]
            needed = result.prompt_tokens + result.completion_tokens
            if at > now and (decoding or batch):
                break
            if (decoding or batch) and used + needed > l1:
                break
            now = max(now, at)
            waiting.popleft()
            batch.append(result)
            used += needed
            new += result.prompt_tokens - result.cached_tokens
        if batch:
            now += math.ceil(new / CHUNK) * costs.by_pass
            for one in batch:
                known, host = one.cached_tokens, one.cached_details["host"]
                now += costs.prefill(one.prompt_tokens - known, known) + host * costs.load
            for one in batch:
                one.ttft = now - arrived[id(one)]
                decoding.append(_Decoding(one.prompt_tokens, one.completion_tokens - 1, one))
        else:
            now += costs.decode([one.context for one in decoding])
            for running in decoding:
                running.context += 1
                running.left -= 1
        for running in decoding:
            if not running.left:
                running.result.latency = now - arrived[id(running.result)]
                used -= running.result.prompt_tokens + running.result.completion_tokens
        decoding = [running for running in decoding if running.left]
    return now


def expected(args: argparse.Namespace, costs: BatchCosts | None, *, l2: bool) -> Talked:
    """The figures expected of a server, with L2 or without."""
    return timed(
        exchanges(args, l2=l2), costs,
        l1=args.l1, output_len=args.output_length, request_rate=args.request_rate,
    )  # fmt: skip


def add_talk_figures(
    report: Report, server: str, measured: Talked, said: Talked | None = None
) -> None:
    """Add the figures of each round and of all of them, beside those of a forecast."""
    case = {"server": server}
    rounds: list[tuple[int | str, slice]] = [
        (number + 1, slice(number, number + 1)) for number in range(len(measured.rounds))
    ]
    for name, part in [*rounds, ("all", slice(None))]:
        forecast = {} if said is None else said.figures(part)
        add_round(report, {**measured.figures(part), "round": name}, case, forecast)
    case["round"] = "all"
    rates = {} if said is None else said.rates()
    for metric, (value, unit) in measured.rates().items():
        report.add(metric, value, unit, case, expected=rates.get(metric, (None,))[0])


def run(args: argparse.Namespace, report: Report) -> None:
    torch.set_num_threads(1)
    for server, l2 in (("GPU only", False), ("+ L2", True)):
        add_talk_figures(report, server, expected(args, h200_costs(args.layers), l2=l2))


_QUICK: Final = {"clients": 4, "rounds": 4, "l1": 8192}
COMMAND: Final = Command(run=run, add_options=add_talk, quick=_QUICK)
