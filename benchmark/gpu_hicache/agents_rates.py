"""Rates of servers that have no other work, as the forecast of agents' conversations needs them.

Rates of flows come from the servers' own metrics, all others from times that a client sees. What
servers share when all of them work, as the cores of a small host, is in the rates: prefills and
steps are those of all servers at once.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Final, TypeVar

from benchmark.report import Report
from benchmark.servers import ask, load
from rigs.servers.engine_server import EngineServer
from sglang.benchmark.api_backends import RequestResult
from sglang.planning.served_costs import Costs
from sglang.srt.constants import GB

T = TypeVar("T")
_STEPS: Final = 64
"""Tokens of answers by which steps are measured."""
_FLOWS: Final = {
    "read": ('sglang:hicache_transfer_seconds_sum{kind="prefetch"}', "prefetched"),
    "write": ('sglang:hicache_transfer_seconds_sum{kind="backup"}', "backuped"),
    "load": ("sglang:load_back_duration_seconds_sum", "load_back"),
}
"""Samples with the seconds of each flow, and the counters of its tokens."""


@dataclass(slots=True, kw_only=True)
class Rates:
    """Seconds that were measured on idle servers."""

    probe: int
    """Tokens of the prompts by which they were measured."""
    chunk: int
    """Most prompt tokens of a pass."""
    prefill: float
    """First token of a new prompt of `probe` tokens."""
    quarter_prefill: float
    """The same of a quarter of them."""
    repeated: float
    """First token of a prompt of `probe` tokens that L1 has."""
    step: float
    """A decode step of a request with few tokens."""
    long_step: float
    """The same with `probe` tokens."""
    together: int
    joint_step: float
    """A step of so many requests with few tokens."""
    turn_prefill: float = 0.0
    """First token of `turn` new tokens behind `probe` that L1 has; 0: not measured."""
    read: float | None = None
    """A token that one server reads from L3; None: there is no L3."""
    both_read: float = 0.0
    """The same while two servers read."""
    write: float = 0.0
    """A token that is written to L3."""
    load: float = 0.0
    """A token that is loaded from L2 to L1."""

    @property
    def turn(self) -> int:
        return self.probe // 16

    def costs(self, by_before: float = 0.0) -> Costs:
        """The costs that give these times.

        Args:
            by_before: Seconds; taken if `turn_prefill` was not measured.
        """
        probe, quarter = self.probe, self.probe // 4
        by_prompt_token = max(0.0, self.repeated - self.step) / probe

        def compute(by_before: float) -> Costs:
            """The costs that give the times of new prompts."""
            # Tokens before all passes of a prompt.
            long, short = (
                sum(range(0, length, self.chunk)) * by_before for length in (probe, quarter)
            )
            bend = self.prefill - long - 4 * (self.quarter_prefill - short)
            by_pair = max(0.0, 2 * bend / (probe * probe - 4 * quarter * quarter))
            each = (self.quarter_prefill - short) / quarter
            linear = max(0.0, each - quarter / 2 * by_pair - by_prompt_token)
            return Costs(
                linear=linear, by_pair=by_pair, by_before=by_before, step=0.0, by_context=0.0
            )

        if self.turn_prefill:
            turn = self.turn_prefill - (probe + self.turn) * by_prompt_token
            least, more = (compute(one).prefill(self.turn, probe) for one in (0.0, 1e-6))
            by_before = max(0.0, 1e-6 * (turn - least) / (more - least))
        found = compute(by_before)
        by_request = max(0.0, self.joint_step - self.step) / (self.together - 1)
        return replace(
            found,
            step=max(0.0, self.step - by_request),
            by_request=by_request,
            by_context=max(0.0, self.long_step - self.step) / probe,
            read=self.read,
            write=self.write,
            # Two servers that read keep the copying thread busy, unless they do not notice it.
            copied=self.both_read / 2,
            load=self.load,
            by_prompt_token=by_prompt_token,
        )


def measure_rates(
    servers: Sequence[EngineServer],
    prompt: Callable[[int, int], list[int]],
    report: Report,
    *,
    probe: int,
    chunk: int,
    page_size: int,
    kv_bytes: int,
    clients: int,
    l3: bool,
) -> Rates:
    """Measure and report the rates of `servers`, which have just started.

    Args:
        prompt: A random prompt of a seed and a length.
        probe: Tokens of the prompts by which rates are measured, and of a quarter of them.
        chunk: Most prompt tokens of a pass.
        kv_bytes: Of a token.
        clients: Requests that run at once.
    """
    quarter = probe // 4
    # Kernels are compiled, and connections made, on first use.
    for server in servers:
        ask(server, [prompt(0, probe), prompt(0, probe), prompt(1, page_size)], 8)
        load(server.url, [prompt(2 + i, quarter // 4) for i in range(clients)], 8)
    _wait(servers)

    def mean(one: Callable[[EngineServer], float]) -> float:
        return statistics.mean(_at_once(servers, one).values())

    def ttft(seeds: Mapping[EngineServer, Sequence[int]], length: int) -> float:
        return mean(
            lambda server: statistics.median(
                _one(server, prompt(seed, length)).ttft for seed in seeds[server]
            )
        )

    def step(length: int, requests: int = 1) -> float:
        prompts = [prompt(80 + length % 7 + nth, length) for nth in range(requests)]

        def seconds(server: EngineServer) -> float:
            results = load(server.url, prompts, _STEPS).results
            return statistics.median(one.tpot for one in results if one.tpot is not None)

        return mean(seconds)

    # Each server has prompts of its own, which the others read later.
    own = {server: (20 + 2 * nth, 21 + 2 * nth) for nth, server in enumerate(servers)}
    long = ttft(own, probe)
    repeated = ttft(own, probe)
    short = ttft(
        {server: (60 + 2 * nth, 61 + 2 * nth) for nth, server in enumerate(servers)}, quarter
    )
    turn = mean(
        lambda server: statistics.median(
            _one(server, prompt(seed, probe) + prompt(70 + seed, probe // 16)).ttft
            for seed in own[server]
        )
    )
    together = max(2, clients // len(servers))
    rates = Rates(
        probe=probe, chunk=chunk, turn_prefill=turn,
        prefill=long, quarter_prefill=short, repeated=repeated,
        step=step(page_size), long_step=step(probe),
        together=together, joint_step=step(page_size, together),
    )  # fmt: skip
    if l3:
        last, first = servers[-1], servers[0]
        before = _flows(servers)
        _one(first, prompt(40, probe))
        rates.write = _per_token(_flows(servers, before), "write")
        start = _flows(servers)
        for place, (one, other) in enumerate(((first, last), (last, first))):
            before = _flows(servers)
            _read(one, prompt(own[other][0], probe), page_size)
            alone = _per_token(_flows(servers, before), "read")
            report.add("server_read_rate", kv_bytes / alone / GB, "GB/s", {"server": place})
        read = _flows(servers, start)
        rates.read, rates.load = _per_token(read, "read"), _per_token(read, "load")
        before = _flows(servers)
        pairs = {last: own[first][1], first: own[last][1]}
        _at_once(list(pairs), lambda one: _read(one, prompt(pairs[one], probe), page_size))
        rates.both_read = _per_token(_flows(servers, before), "read")
    case = {"l3": l3}
    for name in ("read", "both_read", "write", "load"):
        if seconds := getattr(rates, name):
            report.add(f"{name}_rate", kv_bytes / seconds / GB, "GB/s", case)
    for metric, tokens, seconds in (
        ("prefill", probe, long),
        ("prefill", quarter, short),
        ("repeated", probe, repeated),
        ("turn_prefill", rates.turn, turn),
        ("step", page_size, rates.step),
        ("step", probe, rates.long_step),
        (f"step_of_{together}", page_size, rates.joint_step),
    ):
        report.add(metric, seconds * 1e3, "ms", {**case, "tokens": tokens})
    return rates


def _one(server: EngineServer, prompt: list[int]) -> RequestResult:
    return ask(server, [prompt], 2)[0]


def _read(server: EngineServer, prompt: list[int], page_size: int) -> None:
    """Have a server read a prompt from L3, which another has written."""
    result = _one(server, prompt)
    read = result.cached_details.get("storage", 0)
    assert read >= len(prompt) - 2 * page_size, result


def _at_once(
    servers: Sequence[EngineServer], one: Callable[[EngineServer], T]
) -> dict[EngineServer, T]:
    with ThreadPoolExecutor(len(servers)) as pool:
        return dict(zip(servers, pool.map(one, servers), strict=True))


def _wait(servers: Sequence[EngineServer]) -> None:
    """Wait until the servers have ended all transfers."""
    deadline = time.monotonic() + 60
    for server in servers:
        while server.request("GET", "/server_info").body["internal_states"][0]["busy"]:
            assert time.monotonic() < deadline, "a server writes to L3 for a minute"
            time.sleep(0.05)


def _flows(
    servers: Sequence[EngineServer], before: Mapping[str, tuple[float, float]] | None = None
) -> dict[str, tuple[float, float]]:
    """Seconds and tokens of each flow of all servers, since `before`. Waits for their ends."""
    _wait(servers)
    samples = [server.metrics() for server in servers]
    found = {}
    for flow, (seconds, tokens) in _FLOWS.items():
        names = seconds, f"sglang:{tokens}_tokens_total"
        sums = tuple(sum(one.get(name, 0.0) for one in samples) for name in names)
        earlier = (0.0, 0.0) if before is None else before[flow]
        found[flow] = sums[0] - earlier[0], sums[1] - earlier[1]
    return found


def _per_token(flows: Mapping[str, tuple[float, float]], flow: str) -> float:
    seconds, tokens = flows[flow]
    assert tokens, f"the servers' metrics tell of no {flow}"
    return seconds / tokens
