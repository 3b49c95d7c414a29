"""A prefill and a decode server under attack by strangers, beside honest traffic.

    python -m rigs.disaggregation.pd_attacks --minutes 10 [--rate 4] [--secret] [--backend nixl]

The servers, the router, and a second prefill server that is stopped run on loopback, with the
built-in model. Honest requests come through the router at a fixed rate, first undisturbed for a
while, then beside all attacks of `strangers`, or beside some. The exit status is 1 if an honest
request fails, or if memory or open files do not come back to what they were.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import secrets
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import httpx
import psutil

from rigs.disaggregation.pd_servers import TCP, decode_server, prefill_server, router
from rigs.disaggregation.strangers import ATTACKS, Targets, under_attack
from rigs.servers.engine_server import EXACT, EngineServer
from sglang.srt.arg_groups.disaggregation import TransferBackend
from sglang.srt.environ import envs
from sglang.srt.utils.network import wait_until

MAX_MEMORY_MIB: Final = 128
MAX_FILES: Final = 24
"""How much more memory and how many more files a server may have a while after the attacks. Honest
traffic goes on meanwhile, and takes some."""
_REST_S: Final = 90.0
_TIMEOUT_S: Final = 60.0
"""Time limit of an honest request."""
_ALONE: Final = 0.25
"""Seconds without attacks, as a share of the seconds with them, but not fewer than `_LEAST_S`."""
_LEAST_S: Final = 5.0
_MAX_RUNNING: Final = 16
"""Requests that the decode server decodes at once: fewer than strangers send."""
_NUM_KNOWN: Final = 24
"""Prompts whose words are known. Every second request has one of them, the others have new ones."""
_NUM_WORDS: Final = 12


@dataclass(slots=True)
class Usage:
    """Memory and open files of a server's processes together."""

    memory_mib: float
    num_files: int

    @classmethod
    def of(cls, server: EngineServer) -> Usage:
        tree = processes_of(server)
        memory = sum(one.memory_info().rss for one in tree) / (1 << 20)
        return cls(memory, sum(one.num_fds() for one in tree))

    def is_back(self, before: Usage) -> bool:
        """True if memory and open files are about what they were before the attack."""
        return (
            self.memory_mib <= before.memory_mib + MAX_MEMORY_MIB
            and self.num_files <= before.num_files + MAX_FILES
        )


@dataclass(slots=True)
class Report:
    """Outcomes of the honest requests and of the servers."""

    alone: list[float] = field(default_factory=list)
    attacked: list[float] = field(default_factory=list)
    """Times to the first token, in seconds, without and with attacks."""
    failed: list[str] = field(default_factory=list)
    deeds: dict[str, int] = field(default_factory=dict)
    """Bytes, connections or requests of each attack."""
    usage: dict[str, tuple[Usage, Usage, Usage]] = field(default_factory=dict)
    """Usage of each server: before, the most during, and after the attacks."""

    @property
    def not_back(self) -> list[str]:
        """Servers that have not come back to the memory and files they had."""
        return [
            name for name, (before, _, after) in self.usage.items() if not after.is_back(before)
        ]

    @property
    def idle_attacks(self) -> list[str]:
        """Attacks that have done nothing, so that the run proves nothing about them."""
        return [name for name, count in self.deeds.items() if not count]

    @property
    def is_good(self) -> bool:
        return not (self.failed or self.not_back or self.idle_attacks)

    def lines(self) -> Iterator[str]:
        ratio = p99(self.attacked) / p99(self.alone)
        for name, times in (("alone", self.alone), ("attacked", self.attacked)):
            middle = sorted(times)[len(times) // 2]
            yield (
                f"TTFT {name:9} {len(times):5} requests  p50 {1000 * middle:6.0f} ms"
                f"  p99 {1000 * p99(times):6.0f} ms"
            )
        yield f"TTFT p99 under attack: {ratio:.2f} of that alone"
        for name, count in self.deeds.items():
            yield f"{name:15} {count:14,} deeds"
        for name, three in self.usage.items():
            memory = " / ".join(f"{one.memory_mib:.0f}" for one in three)
            files = " / ".join(str(one.num_files) for one in three)
            yield f"{name:8} before / most / after: {memory} MiB, {files} files"
        yield "failed: none" if not self.failed else f"failed: {len(self.failed)}"
        for text, count in Counter(self.failed).most_common():
            yield f"{count:7} {text}"
        yield f"not back: {self.not_back or 'none'}; without a deed: {self.idle_attacks or 'none'}"


@dataclass(slots=True)
class Deployment:
    """Running servers, and the router in front of the honest ones."""

    prefill: EngineServer
    decode: EngineServer
    url: str
    targets: Targets


@contextmanager
def deployed(*, has_secret: bool, backend: str) -> Iterator[Deployment]:
    """The servers, the second prefill server stopped."""
    flags = (*EXACT, "--disaggregation-transfer-backend", backend)
    env = dict(TCP)
    if has_secret:
        env[envs.SGLANG_DISAGGREGATION_SECRET.name] = secrets.token_hex(32)
    with ExitStack() as stack:
        prefill, bootstrap = prefill_server(*flags, env=env)
        other, other_port = prefill_server(*flags, env=env)
        decode = decode_server(*flags, "--max-running-requests", str(_MAX_RUNNING), env=env)
        for server in (prefill, other, decode):
            stack.enter_context(server)
        url = stack.enter_context(router([(prefill, bootstrap)], [decode]))
        for process in processes_of(other):
            process.suspend()
        route = prefill.request("GET", "/server_info").body["routes"][0]
        control = int(route["endpoint"].rpartition(":")[2])
        known = {control, bootstrap, port_of(prefill), port_of(decode)}
        data = sorted((ports_of(prefill) | ports_of(decode)) - known)
        assert data, f"{backend} listens"
        targets = Targets(control, bootstrap, data, decode.url, other_port)
        yield Deployment(prefill, decode, url, targets)


def processes_of(server: EngineServer) -> list[psutil.Process]:
    root = psutil.Process(server.process.pid)
    return [root, *root.children(recursive=True)]


def port_of(server: EngineServer) -> int:
    return int(server.url.rpartition(":")[2])


def ports_of(server: EngineServer) -> set[int]:
    """TCP ports that its processes listen on."""
    return {
        connection.laddr.port
        for process in processes_of(server)
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }


def p99(times: Sequence[float]) -> float:
    return sorted(times)[min(len(times) - 1, round(0.99 * len(times)))]


class Traffic:
    """Honest requests through the router, in the thread that runs the event loop.

    Args:
        url: The router's.
        rate: Requests a second.
    """

    def __init__(self, url: str, rate: float) -> None:
        self._url = url
        self._rate = rate
        self._rng = random.Random(1)
        self._known: list[tuple[dict[str, Any], list[int]]] = []
        """Bodies, each with the words of its answer."""
        self.failed: list[str] = []

    async def learn(self) -> None:
        """Learn the words of some prompts, one after the other."""
        async with self._client() as client:
            for _ in range(_NUM_KNOWN):
                body = self._new_body()
                _, words = await self._ask(client, body)
                self._known.append((body, words))

    async def run(self, seconds: float) -> list[float]:
        """Send requests for `seconds`; the times to the first token of those that succeeded."""
        async with self._client() as client, asyncio.TaskGroup() as group:
            tasks = []
            end = time.monotonic() + seconds
            due = time.monotonic()
            while due < end:
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                due += 1 / self._rate
                tasks.append(group.create_task(self._one(client)))
        return [took for task in tasks if (took := task.result()) is not None]

    async def _one(self, client: httpx.AsyncClient) -> float | None:
        body, expected = self._new_body(), None
        if self._rng.random() < 0.5:
            body, expected = self._rng.choice(self._known)
        try:
            took, words = await self._ask(client, body)
        except (httpx.HTTPError, RuntimeError, ValueError) as error:
            self.failed.append(f"{type(error).__name__}: {error}"[:300])
            return None
        if expected not in (None, words):
            self.failed.append(f"other words: {words} for {expected}")
            return None
        return took

    async def _ask(
        self, client: httpx.AsyncClient, body: dict[str, Any]
    ) -> tuple[float, list[int]]:
        """Seconds to the first token, and the words."""
        began = time.monotonic()
        took, words = None, []
        async with client.stream("POST", f"{self._url}/generate", json=body) as answer:
            if answer.status_code != 200:
                text = (await answer.aread()).decode(errors="replace")
                raise RuntimeError(f"status {answer.status_code}: {text}")
            async for line in answer.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                event = json.loads(line.removeprefix("data: "))
                if "output_ids" not in event:
                    raise RuntimeError(line)
                if took is None:
                    took = time.monotonic() - began
                words = event["output_ids"]
        if took is None or len(words) != _NUM_WORDS:
            raise RuntimeError(f"{len(words)} words for {_NUM_WORDS}")
        return took, words

    def _new_body(self) -> dict[str, Any]:
        rng = self._rng
        return {
            "input_ids": [rng.randrange(300, 2000) for _ in range(rng.randint(50, 400))],
            "sampling_params": {
                "temperature": 0,
                "max_new_tokens": _NUM_WORDS,
                "ignore_eos": True,
            },
            "stream": True,
        }

    @staticmethod
    def _client() -> httpx.AsyncClient:
        return httpx.AsyncClient(timeout=_TIMEOUT_S, limits=httpx.Limits(max_connections=None))


async def attack(servers: Deployment, seconds: float, rate: float, names: Sequence[str]) -> Report:
    """Serve honest requests, first alone, then for `seconds` beside the attacks."""
    report, traffic = Report(), Traffic(servers.url, rate)
    both = {"prefill": servers.prefill, "decode": servers.decode}

    def usage() -> dict[str, Usage]:
        return {name: Usage.of(server) for name, server in both.items()}

    await traffic.learn()
    await traffic.run(3.0)
    report.alone = await traffic.run(max(_LEAST_S, _ALONE * seconds))
    assert not traffic.failed, f"without any attack: {traffic.failed}"
    before = most = usage()
    with under_attack(names, servers.targets) as deeds:
        # On a busy machine the strangers' processes take seconds to start.
        wait_until(lambda: all(deed.count for deed in deeds.values()), _REST_S, 0.1)
        watching = asyncio.create_task(traffic.run(seconds))
        while not (await asyncio.wait([watching], timeout=0.5))[0]:
            now = usage()
            most = {
                name: Usage(
                    max(most[name].memory_mib, now[name].memory_mib),
                    max(most[name].num_files, now[name].num_files),
                )
                for name in both
            }
        report.attacked = watching.result()
        report.deeds = {name: deed.count for name, deed in deeds.items()}
    wait_until(lambda: all(u.is_back(before[n]) for n, u in usage().items()), _REST_S, 0.5)
    after = usage()
    report.usage = {name: (before[name], most[name], after[name]) for name in both}
    report.failed = traffic.failed
    return report


def run_attacks(
    seconds: float,
    rate: float = 4.0,
    names: Sequence[str] = tuple(ATTACKS),
    *,
    has_secret: bool,
    backend: str = TransferBackend.MOONCAKE,
) -> Report:
    """One run on servers of its own."""
    with deployed(has_secret=has_secret, backend=backend) as servers:
        return asyncio.run(attack(servers, seconds, rate, names))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--rate", type=float, default=4.0, help="honest requests a second [4]")
    parser.add_argument("--secret", action="store_true", help="the servers share a secret")
    parser.add_argument(
        "--attacks", nargs="+", default=list(ATTACKS), choices=list(ATTACKS), help="[all]"
    )
    parser.add_argument(
        "--backend",
        default=TransferBackend.MOONCAKE,
        choices=(TransferBackend.MOONCAKE, TransferBackend.NIXL),
        help="transport [mooncake]",
    )
    args = parser.parse_args(argv)
    report = run_attacks(
        60 * args.minutes,
        args.rate,
        args.attacks,
        has_secret=args.secret,
        backend=args.backend,
    )
    print("\n".join(report.lines()))
    return 0 if report.is_good else 1


if __name__ == "__main__":
    raise SystemExit(main())
