"""Agents' conversations on two servers, with a store that both share and without.

The workload that vLLM and Mooncake published in May 2026, on fewer servers: sessions share a long
prefix, each adds a first prompt, then tool results and answers in turns. Requests go to the servers
in turn. Qwen3-8B's shape in fp8 blocks with random weights; L3 is a Mooncake Store on this host.
L1 holds two or three sessions, and L2 as much: reads of two whole prompts find room there.

`hit_rate` with L3 and `wait_complete`: at least 0.92 (new tokens are the rest). `expected`: what
`agents_forecast` simulates from the rates that were measured before the load; `forecast_*`: its
ratio to what the load took; target: within 10%. The order in which sessions come to the servers is
chance; lines say how far it moves the forecast.

`--device cpu` tries it with the built-in model. `--l3-only` leaves out the servers without a store.
"""

from __future__ import annotations

import argparse
import statistics
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from benchmark.command import Command
from benchmark.gpu_hicache.agents_forecast import Forecast, forecast
from benchmark.gpu_hicache.agents_rates import measure_rates
from benchmark.gpu_hicache.local_store import L3, Store, add_store_option, clear_store
from benchmark.prompts import random_prompt
from benchmark.report import Report
from benchmark.servers import started, talk
from rigs.bench.multiturn import Conversations
from rigs.models.qwen3_8b import DUMMY_FLAGS, KV_BYTES, VOCAB_SIZE, dummy_model
from rigs.servers.engine_server import EngineServer
from sglang.benchmark.api_backends import TIERS, RequestResult
from sglang.planning.served_costs import ServerSizes
from sglang.srt.constants import GB
from sglang.srt.mem_cache.l3.prefetch_table import PrefetchPolicy

SERVERS: Final = 2
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
    chunk: int
    """Most prompt tokens of a pass; the default of `--chunked-prefill-size`."""

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
    chunk=8_192,
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
    chunk=2_048,
)  # fmt: skip


def measure(
    name: str, servers: list[EngineServer], size: Size, policy: str, report: Report
) -> None:
    """One load, and its forecast; `policy`: `--hicache-storage-prefetch-policy`."""
    l3 = name == "with L3"
    rates = measure_rates(
        servers, lambda seed, length: random_prompt(_SEED + seed, length, 3, size.vocab_size),
        report, probe=size.probe, chunk=size.chunk, page_size=size.page_size,
        kv_bytes=size.kv_bytes, clients=size.talk.clients, l3=l3,
    )  # fmt: skip
    for server in servers:
        server.flush(timeout=120)
    if l3:
        clear_store(servers[0], report)
        for server in servers:
            _set_policy(server, policy)
    sizes = ServerSizes(page_size=size.page_size, l1=size.l1, l2=size.l1, chunk=size.chunk,
                        policy=PrefetchPolicy(policy))  # fmt: skip
    expected = forecast(size.talk, rates.costs(), sizes, servers=len(servers))
    vocabulary = np.arange(3, size.vocab_size, dtype=np.uint32)
    rounds, seconds = talk([server.url for server in servers], vocabulary, size.talk)
    results = [one for turn in rounds for one in turn]
    failed = [one.error for one in results if not one.success]
    assert not failed, f"{len(failed)} failed: {failed[0]}"
    assert len(results) == size.talk.clients * size.talk.rounds
    case = {"servers": name}
    found = {f"cached_from_{tier}": count for tier, count in _by_tier(results).items()}
    report.add_all("tokens", found, case)
    add_figures(report, case, rounds, seconds, expected, l3=l3)


def add_figures(
    report: Report,
    case: dict[str, str],
    rounds: list[list[RequestResult]],
    seconds: float,
    expected: Forecast,
    *,
    l3: bool,
) -> None:
    """Add what was measured, of each turn and of all, beside the forecast."""
    hits, ttfts = expected.hit_rates(), expected.ttfts()
    for turn, results in enumerate(rounds):
        one = {**case, "turn": str(turn + 1)}
        # A session that comes to another server reads its own prompt from L3.
        report.add("hit_rate", _hit_rate(results), "share", one, expected=hits[turn],
                   **_by_tier(results))  # fmt: skip
        report.add("mean_ttft", statistics.mean(result.ttft for result in results), "s", one,
                   expected=ttfts[turn])  # fmt: skip
    results = [one for turn in rounds for one in turn]
    ttft = [one.ttft for one in results]
    answers = sum(one.completion_tokens for one in results)
    for metric, unit, value in (
        ("hit_rate", "share", _hit_rate(results)),
        ("mean_ttft", "s", statistics.mean(ttft)),
        ("median_ttft", "s", statistics.median(ttft)),
        ("mean_tpot", "s", statistics.mean(one.tpot or 0.0 for one in results)),
        ("output_throughput", "token/s", answers / seconds),
    ):
        said, least, most = expected.of(metric)
        target = "at least 0.92" if l3 and metric == "hit_rate" else None
        report.add(metric, value, unit, case, expected=said, target=target,
                   least_expected=least, most_expected=most)  # fmt: skip
        if metric in ("mean_ttft", "output_throughput"):
            report.add(f"forecast_{metric}", said / value, "ratio", case, target="0.9 to 1.1")


def _by_tier(results: list[RequestResult]) -> dict[str, int]:
    """Tokens found in each tier."""
    return {tier: sum(one.cached_details.get(tier, 0) for one in results) for tier in TIERS}


def _hit_rate(results: list[RequestResult]) -> float:
    return sum(one.cached_tokens for one in results) / sum(one.prompt_tokens for one in results)


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
    layouts: dict[str, tuple[str, ...]] = {
        # Rates are measured by reads that end, whatever the policy.
        "with L3": (*L3, "--hicache-storage-prefetch-policy", "wait_complete")
    }
    if not args.l3_only:
        layouts["without"] = ()
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
                measure(name, list(servers.values()), size, args.policy, report)


def _set_policy(server: EngineServer, policy: str) -> None:
    """`policy`: of reads from L3."""
    body = {"hicache_storage_backend": "mooncake", "hicache_storage_prefetch_policy": policy}
    reply = server.request("PUT", "/hicache/storage-backend", body, admin=True)
    assert reply.status == 200, reply


def _gpus(device: str) -> list[tuple[str, ...]]:
    """The flags that give each server a GPU of its own."""
    if device == "cpu":
        return [()] * SERVERS
    return [("--base-gpu-id", str(index)) for index in range(SERVERS)]


def add_options(parser: argparse.ArgumentParser) -> None:
    add_store_option(parser)
    parser.add_argument("--policy", choices=list(PrefetchPolicy), default="wait_complete",
                        help="of reads from L3")  # fmt: skip
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
