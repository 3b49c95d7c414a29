"""Times and hits of agents' conversations on several servers, from the rates of an idle one.

`sglang.planning.served_load` simulates the servers. Chance decides how sessions are dealt to the
servers, since requests go to them in turn: a forecast is the mean over several random orders, and
says how far they differ.
"""

from __future__ import annotations

import itertools
import statistics
from dataclasses import dataclass
from typing import Final

import numpy as np

from rigs.bench.multiturn import Conversations
from sglang.planning.served_costs import Clock, CopyThread, Costs, ServerSizes
from sglang.planning.served_load import ServedRequest, SimulatedServer

ORDERS: Final = 8
"""Random orders that a forecast is the mean of."""


@dataclass(frozen=True, slots=True)
class Served:
    """One run: the requests of each turn, and the seconds until the last answer ends."""

    turns: list[list[ServedRequest]]
    seconds: float

    @property
    def requests(self) -> list[ServedRequest]:
        return [one for turn in self.turns for one in turn]

    @property
    def hit_rate(self) -> float:
        return hit_rate(self.requests)

    @property
    def mean_ttft(self) -> float:
        return statistics.mean(one.ttft for one in self.requests)

    @property
    def median_ttft(self) -> float:
        return statistics.median(one.ttft for one in self.requests)

    @property
    def mean_tpot(self) -> float:
        """Seconds of a token after the first."""
        return statistics.mean(
            ((one.ended or 0.0) - one.sent - one.ttft) / max(1, one.answer - 1)
            for one in self.requests
        )

    @property
    def output_throughput(self) -> float:
        """Tokens per second."""
        return sum(one.answer for one in self.requests) / self.seconds


def hit_rate(requests: list[ServedRequest]) -> float:
    """Share of the prompts' tokens that was found."""
    return sum(one.cached for one in requests) / sum(one.prompt for one in requests)


@dataclass(frozen=True, slots=True)
class Forecast:
    """Runs of several random orders."""

    runs: list[Served]

    def of(self, figure: str) -> tuple[float, float, float]:
        """Mean, least and most of a property of `Served`."""
        found = [float(getattr(run, figure)) for run in self.runs]
        return statistics.mean(found), min(found), max(found)

    def hit_rates(self) -> list[float]:
        """Of each turn."""
        by_turn = zip(*(run.turns for run in self.runs), strict=True)
        return [statistics.mean(map(hit_rate, turn)) for turn in by_turn]

    def ttfts(self) -> list[float]:
        """Mean seconds of each turn."""
        by_turn = zip(*(run.turns for run in self.runs), strict=True)
        return [statistics.mean(one.ttft for run in turn for one in run) for turn in by_turn]


def serve(
    talk: Conversations, costs: Costs, sizes: ServerSizes, *, servers: int, seed: int
) -> Served:
    """The load of `talk`. Its requests go to `servers` in turn; a client takes between half and one
    and a half times `Costs.by_prompt_token` to send one.

    `talk` has no limit of requests under way, and a `first_len`.
    """
    assert talk.first_len is not None and talk.parallel is None
    clock, rng = Clock(), np.random.default_rng(seed)
    copier = CopyThread(clock)
    store: set[object] | None = None if costs.read is None else set()
    parts = [SimulatedServer(clock, costs, sizes, copier, store) for _ in range(servers)]
    next_server = itertools.cycle(parts)
    turns: list[list[ServedRequest]] = [[] for _ in range(talk.rounds)]
    shared = talk.shared_len // sizes.page_size
    first, growth = talk.shared_len + talk.first_len, talk.output_len + talk.request_len

    def ask(client: int, turn: int) -> None:
        prompt = first + turn * growth
        whole = (prompt + talk.output_len - 1) // sizes.page_size
        request = ServedRequest(
            prompt=prompt,
            answer=talk.output_len,
            pages=[(-1 if page < shared else client, page) for page in range(whole)],
            on_end=lambda _: ask(client, turn + 1) if turn + 1 < talk.rounds else None,
            sent=clock.now,
        )
        turns[turn].append(request)
        seconds = prompt * costs.by_prompt_token * rng.uniform(0.5, 1.5)
        clock.after(seconds, lambda: next(next_server).send(request))

    for client in range(talk.clients):
        ask(client, 0)
    clock.run()
    return Served(turns, max(one.ended or 0.0 for turn in turns for one in turn))


def forecast(
    talk: Conversations, costs: Costs, sizes: ServerSizes, *, servers: int, orders: int = ORDERS
) -> Forecast:
    """What `serve` gives for random orders."""
    seeds = range(orders)
    return Forecast([serve(talk, costs, sizes, servers=servers, seed=seed) for seed in seeds])
