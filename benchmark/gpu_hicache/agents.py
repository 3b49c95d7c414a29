"""Agents' conversations on two servers, with a store that both share and without.

The workload that vLLM and Mooncake published in May 2026, on fewer servers: sessions share a long
prefix, each adds a first prompt, then tool results and answers in turns. Requests go to the servers
in turn. Qwen3-8B's shape in fp8 blocks with random weights; L3 is a Mooncake Store on this host.
L1 holds two or three sessions, and L2 as much: reads of two whole prompts find room there.

`hit_rate` with L3 and `wait_complete`: at least 0.92 (new tokens are the rest). `forecast_*`: what
`agents_forecast` says from the rates that were measured before the load: prefills, steps, and
reads of a stored prompt; target: within 10% of what the load took.

`--device cpu` tries it with the built-in model. `--l3-only` leaves out the servers without a store.
"""

from __future__ import annotations

import argparse
import statistics
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from benchmark.command import Command
from benchmark.gpu_hicache.agents_forecast import Costs, forecast
from benchmark.gpu_hicache.local_store import L3, Store, add_store_option, clear_store
from benchmark.prompts import random_prompt
from benchmark.report import Report
from benchmark.servers import ask, load, started, talk
from rigs.bench.multiturn import Conversations
from rigs.models.qwen3_8b import DUMMY_FLAGS, KV_BYTES, VOCAB_SIZE, dummy_model
from rigs.servers.engine_server import EngineServer
from sglang.benchmark.api_backends import TIERS
from sglang.srt.constants import GB

SERVERS: Final = 2
_WAIT: Final = ("--hicache-storage-prefetch-policy", "wait_complete")
_SEED: Final = 20_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Sizes of a run; lengths are tokens."""

    flags: tuple[str, ...]
    talk: Conversations
    l1: int
    page_size: int
    kv_bytes: int
    """Of a token."""
    vocab_size: int
    probe: int
    """Tokens of the prompts by which rates are measured, and a quarter of them."""

    @property
    def longest(self) -> int:
        """A conversation at its end."""
        return self.talk.shared_len + self._own

    @property
    def l2_gb(self) -> float:
        return self.l1 * self.kv_bytes / GB

    @property
    def store_bytes(self) -> int:
        tokens = self.talk.shared_len + self.talk.clients * self._own
        return max(_LEAST_STORE, int(1.35 * tokens * self.kv_bytes))

    @property
    def _own(self) -> int:
        talk = self.talk
        first = talk.request_len if talk.first_len is None else talk.first_len
        return first + (talk.rounds - 1) * talk.request_len + talk.rounds * talk.output_len

    def of_sessions(self, sessions: int) -> Size:
        """The same with an L1 in proportion to the number of sessions, where one fits."""
        l1 = max(self.longest + self.page_size, self.l1 * sessions // self.talk.clients)
        talk = replace(self.talk, clients=sessions)
        return replace(self, talk=talk, l1=l1 // self.page_size * self.page_size)


_LEAST_STORE: Final = 128 << 20
_TALK: Final = Conversations(
    clients=12, rounds=10, shared_len=20_000, first_len=10_000, request_len=2_048, output_len=900,
    seed=7,
)  # fmt: skip
FULL: Final = Size(
    flags=("--device", "cuda", *DUMMY_FLAGS,
           "--json-model-override-args", '{"max_position_embeddings": 65536}'),
    talk=_TALK,
    l1=147_456,
    page_size=64,
    kv_bytes=KV_BYTES,
    vocab_size=VOCAB_SIZE,
    probe=32_768,
)  # fmt: skip
TINY: Final = Size(
    flags=(),
    talk=replace(_TALK, clients=3, rounds=3, shared_len=256, first_len=320, request_len=320,
                 output_len=16),
    l1=2_048,
    page_size=16,
    kv_bytes=1_024,
    vocab_size=2_000,
    probe=512,
)  # fmt: skip


def measure_costs(servers: list[EngineServer], size: Size, report: Report, *, l3: bool) -> Costs:
    """Rates of one server that has no other work. All but reads are of one request."""
    first, rest = servers[0], servers[1:]
    probe, quarter = size.probe, size.probe // 4

    def prompt(seed: int, length: int) -> list[int]:
        return random_prompt(_SEED + seed, length, 3, size.vocab_size)

    # Kernels are compiled, and connections made, on first use.
    for server in servers:
        ask(server, [prompt(0, probe), prompt(0, probe), prompt(1, size.page_size)], 8)
        load(server.url, [prompt(2 + i, quarter // 4) for i in range(size.talk.clients)], 8)
    long, short = (
        statistics.median(
            one.ttft for one in ask(first, [prompt(at + i, length) for i in (0, 1)], 2)
        )
        for at, length in ((20, probe), (22, quarter))
    )
    steps = []
    for at, length in ((24, probe), (25, size.page_size)):
        tpot = ask(first, [prompt(at, length)], 64)[0].tpot
        assert tpot is not None
        steps.append(tpot)
    read_s = None
    if l3:
        # Another server has not seen the prompt, and reads it.
        stored = prompt(20, probe)
        wait_stored(first)
        result = ask(rest[0], [stored], 2)[0]
        tokens = result.cached_details.get("storage", 0)
        assert tokens >= probe - 2 * size.page_size, result
        read_s = result.ttft / tokens
        report.add("read_rate", size.kv_bytes / read_s / GB, "GB/s", {"tokens": tokens})
    # Seconds of n tokens: n * linear + n * n / 2 * by_pair.
    by_pair = max(0.0, 2 * (long - 4 * short) / (probe * probe - 4 * quarter * quarter))
    costs = Costs(
        linear=short / quarter - quarter / 2 * by_pair,
        by_pair=by_pair,
        step=steps[1],
        by_context=max(0.0, steps[0] - steps[1]) / probe,
        read=read_s,
    )
    case = {"l3": l3}
    report.add("prefill", long * 1e3, "ms", {**case, "tokens": probe})
    report.add("prefill", short * 1e3, "ms", {**case, "tokens": quarter})
    report.add("step", steps[1] * 1e3, "ms", {**case, "context": size.page_size})
    report.add("step", steps[0] * 1e3, "ms", {**case, "context": probe})
    return costs


def wait_stored(server: EngineServer) -> None:
    """Wait until the server has written all pages."""
    deadline = time.monotonic() + 60
    while server.request("GET", "/server_info").body["internal_states"][0]["busy"]:
        assert time.monotonic() < deadline, "the server writes to L3 for a minute"
        time.sleep(0.05)


def measure(name: str, servers: list[EngineServer], size: Size, report: Report) -> None:
    """One load, and its forecast."""
    l3 = name == "with L3"
    costs = measure_costs(servers, size, report, l3=l3)
    for server in servers:
        server.flush(timeout=120)
    if l3:
        clear_store(servers[0], report)
    expected = forecast(size.talk, costs, servers=len(servers), l1=size.l1,
                        page_size=size.page_size)  # fmt: skip
    vocabulary = np.arange(3, size.vocab_size, dtype=np.uint32)
    rounds, seconds = talk([server.url for server in servers], vocabulary, size.talk)
    results = [one for turn in rounds for one in turn]
    failed = [one.error for one in results if not one.success]
    assert not failed, f"{len(failed)} failed: {failed[0]}"
    assert len(results) == size.talk.clients * size.talk.rounds
    prompts = sum(one.prompt_tokens for one in results)
    case = {"servers": name}
    found = {tier: sum(one.cached_details.get(tier, 0) for one in results) for tier in TIERS}
    report.add_all("tokens", {f"cached_from_{tier}": count for tier, count in found.items()}, case)
    by_round = [
        round(sum(one.cached_tokens for one in turn) / sum(one.prompt_tokens for one in turn), 3)
        for turn in rounds
    ]
    report.add("hit_rate", sum(found.values()) / prompts, "share", case, by_round=by_round,
               expected=expected.hit_rate, target="at least 0.92" if l3 else None)  # fmt: skip
    ttft = [one.ttft for one in results]
    answers = sum(one.completion_tokens for one in results)
    for metric, unit, value, said in (
        ("mean_ttft", "s", statistics.mean(ttft), statistics.mean(expected.ttft)),
        ("median_ttft", "s", statistics.median(ttft), statistics.median(expected.ttft)),
        ("output_throughput", "token/s", answers / seconds, answers / expected.seconds),
    ):
        report.add(metric, value, unit, case, expected=said)
        if metric != "median_ttft":
            report.add(f"forecast_{metric}", said / value, "ratio", case, target="0.9 to 1.1")


def run(args: argparse.Namespace, report: Report) -> None:
    size = FULL if args.device == "cuda" else TINY
    if args.answer is not None:
        size = replace(size, talk=replace(size.talk, output_len=args.answer))
    if args.sessions is not None:
        size = size.of_sessions(args.sessions)
    common = (
        *size.flags,
        *("--page-size", str(size.page_size), "--max-total-tokens", str(size.l1)),
        *("--enable-hierarchical-cache", "--hicache-size", f"{size.l2_gb:f}", "--enable-metrics"),
    )
    layouts = {"with L3": (*L3, *_WAIT)} | ({} if args.l3_only else {"without": ()})
    with ExitStack() as stack:
        model = stack.enter_context(dummy_model("fp8")) if args.device == "cuda" else None
        store = Store(
            standalone=args.store == "standalone",
            stack=stack,
            num_bytes=size.store_bytes // (1 if args.store == "standalone" else SERVERS),
        )
        if store.is_standalone:
            store.touch(report)
        for name, more in layouts.items():
            servers = {
                f"{name} {index}": EngineServer(*common, *gpu, *more, model=model, env=store.env)
                for index, gpu in enumerate(_gpus(args.device))
            }
            with started(servers, report):
                measure(name, list(servers.values()), size, report)


def _gpus(device: str) -> list[tuple[str, ...]]:
    """The flags that give each server a GPU of its own."""
    if device == "cpu":
        return [()] * SERVERS
    return [("--base-gpu-id", str(index)) for index in range(SERVERS)]


def add_options(parser: argparse.ArgumentParser) -> None:
    add_store_option(parser)
    parser.add_argument("--l3-only", action="store_true", help="no servers without a store")
    parser.add_argument("--sessions", type=int, help="fewer of them, with tiers in proportion")
    parser.add_argument("--answer", type=int, help="tokens of an answer, instead of 900")


COMMAND: Final = Command(
    run=run,
    add_options=add_options,
    devices=("cuda", "cpu"),
    gpus=SERVERS,
    quick={"device": "cpu", "store": "own"},
)
