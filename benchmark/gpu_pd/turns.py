"""Conversations before a prefill and a decode server (1P1D): bytes between the servers, and TTFT by
turn, with tiers on the decode server and without.

More conversations than the decode server's L1 holds take turns behind the router, one request at a
time: a first prompt of `--first` tokens, then the answer and `--new` tokens more each turn. The
prompts are the same with tiers and without, and all other flags.
`moved_of_new`: bytes that the decode server read in the turns after the first, over those of their
new tokens; target with tiers: at most 1.1. `last_ttft_ratio`: median TTFT of the last turn with
tiers over that without; target: at most 0.3, where moving a history takes longer than computing a
turn. Answers have to be equal.

`--device cpu` runs the built-in model over TCP. There `--link`, e.g. 100mbit, slows the way to the
decode server: the servers get network namespaces of their own, which needs root and Linux.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from benchmark.command import Command, Refused
from benchmark.gpu_pd.servers import FULL, TINY, Size, routed
from benchmark.prompts import random_prompt
from benchmark.report import Report
from benchmark.servers import load, started
from rigs.machines.networks import Host, Network, why_no_hosts
from rigs.models.qwen3_8b import dummy_model
from rigs.servers.engine_server import EXACT, EngineServer
from sglang.embedded_mooncake import LOOPBACK
from sglang.srt.environ import envs
from sglang.srt.utils.network import get_free_port, wait_until

_MOST_BYTES: Final = 1.1
_MOST_TTFT: Final = 0.3
_IDLE_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Talk:
    """Conversations; numbers are tokens unless they say otherwise."""

    conversations: int
    turns: int
    first: int
    new: int
    answer: int

    @property
    def longest(self) -> int:
        """Tokens of a conversation at its end."""
        return self.first + (self.turns - 1) * self.new + self.turns * self.answer

    def prompt(self, seed: int, turn: int, vocab_size: int) -> list[int]:
        """The new tokens of a turn of a conversation."""
        return random_prompt(
            seed * self.turns + turn, self.first if turn == 0 else self.new, 10, vocab_size
        )


@dataclass(frozen=True, slots=True)
class Place:
    """Where a server runs; without a host, on this machine's loopback address."""

    address: str = LOOPBACK
    host: Host | None = None

    def inside(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self.host is None else self.host.inside()


class PlacedServer(EngineServer):
    """An `EngineServer` at a place."""

    def __init__(self, place: Place, *args: str, **more: Any) -> None:
        super().__init__(*args, host=place.address, **more)
        self._place = place

    def start(self, timeout: float = 300.0) -> None:
        with self._place.inside():
            super().start(timeout)


@contextlib.contextmanager
def places(link: str | None) -> Iterator[tuple[Place, Place]]:
    """Places of a prefill and a decode server. Inside the block this thread reaches both."""
    if link is None:
        yield Place(), Place()
        return
    with Host() as switch, Host() as first, Host() as second, Host() as client:
        network = Network(switch, "10.214.0")
        network.join(client, "pages", 1)
        network.join(first, "pages", 2)
        network.join(second, "pages", 3).slow(link)
        with client.inside():
            yield Place(network.address(2), first), Place(network.address(3), second)


def read_mb(decode: EngineServer) -> float:
    """MB of pages that a decode server has read since its start."""
    return decode.metrics().get("sglang:kv_transfer_total_mb_sum", 0.0)


def is_idle(server: EngineServer) -> bool:
    return not server.request("GET", "/server_info").body["internal_states"][0]["busy"]


def run_turns(
    name: str, url: str, decode: EngineServer, talk: Talk, vocab_size: int, report: Report
) -> tuple[list[list[int]], float, float]:
    """All turns of all conversations. Returns the conversations at their end, the median TTFT of
    the last turn in seconds, and the bytes read after the first turn over those of new tokens."""
    # Kernels are compiled, and connections made, on first use.
    load(url, [random_prompt(10**6, 64, 10, vocab_size)], 2)
    texts: list[list[int]] = [[] for _ in range(talk.conversations)]
    mb_a_token, moved, ttft = 0.0, 0.0, 0.0
    for turn in range(talk.turns):
        before = read_mb(decode)
        for seed, text in enumerate(texts):
            text += talk.prompt(seed, turn, vocab_size)
        results = load(url, texts, talk.answer, concurrency=1).results
        for text, result in zip(texts, results, strict=True):
            text += result.output_ids
        assert wait_until(lambda: is_idle(decode), _IDLE_S), "backups have not ended"
        read = read_mb(decode) - before
        raw = [one.ttft * 1e3 for one in results]
        ttft = statistics.median(raw)
        case = {"decode": name, "turn": turn + 1, "tokens": results[0].prompt_tokens}
        report.add("ttft", ttft, "ms", case, raw=raw)
        report.add("read", read, "MB", case)
        if turn == 0:
            mb_a_token = read / sum(one.prompt_tokens for one in results)
        else:
            moved += read
            tokens = sum(one.prompt_tokens for one in results)
            report.add("read_of_prompt", read / mb_a_token / tokens, "share", case)
    of_new = moved / mb_a_token / (talk.conversations * (talk.turns - 1) * talk.new)
    return texts, ttft, of_new


@contextlib.contextmanager
def routed_pair(
    args: argparse.Namespace,
    size: Size,
    model: str | None,
    tokens: tuple[int, int],
    tiers: list[str],
    report: Report,
) -> Iterator[tuple[str, EngineServer]]:
    """The URL of the router, and the decode server.

    Args:
        tokens: Sizes of the L1 of the prefill and of the decode server.
        tiers: Flags of the decode server's tiers.
    """
    port = get_free_port()
    mode, total = "--disaggregation-mode", "--max-total-tokens"
    keeps = size.flags[: size.flags.index(total)] if total in size.flags else size.flags
    with places(args.link) as (here, there):
        env = dict(size.env)
        both = [*keeps, *EXACT]
        hosts = []
        if args.link is not None:
            del env[envs.MOONCAKE_LOCAL_HOSTNAME.name]
            both.append("--disaggregation-allow-no-secret")
            hosts = ["--disaggregation-prefill-hosts", here.address]
        prefill = PlacedServer(
            here, *both, mode, "prefill", "--disaggregation-bootstrap-port", str(port),
            total, str(tokens[0]), env=env, model=model,
        )  # fmt: skip
        decode = PlacedServer(
            there, *both, *hosts, *tiers, mode, "decode", total, str(tokens[1]), "--enable-metrics",
            "--base-gpu-id", "0" if args.device == "cpu" else "1", env=env, model=model,
        )  # fmt: skip
        servers = {"prefill": prefill, "decode": decode}
        with started(servers, report), routed([(prefill.url, port)], [decode.url]) as url:
            yield url, decode


def measure(args: argparse.Namespace, size: Size, model: str | None, report: Report) -> None:
    talk = Talk(args.conversations, args.turns, args.first, args.new, args.answer)
    all_tokens, l1 = talk.conversations * talk.longest, 2 * talk.longest
    ratio = 1.25 * max(1.0, all_tokens / l1)
    page = int(size.flags[size.flags.index("--page-size") + 1])
    in_pages = ((all_tokens + talk.longest) // page * page, l1 // page * page)
    found = {}
    for name, tiers in {
        "with tiers": ["--enable-hierarchical-cache", "--hicache-ratio", str(ratio)],
        "without tiers": [],
    }.items():
        with routed_pair(args, size, model, in_pages, tiers, report) as (url, decode):
            found[name] = run_turns(name, url, decode, talk, size.vocab_size, report)
    tiers_texts, tiers_ttft, tiers_bytes = found["with tiers"]
    texts, ttft, num_bytes = found["without tiers"]
    assert tiers_texts == texts, "a tier changes words"
    case = {"of": f"{talk.conversations} conversations", "turns": talk.turns}
    prompts = [talk.first + turn * (talk.new + talk.answer) for turn in range(1, talk.turns)]
    all_of_new = sum(prompts) / (len(prompts) * talk.new)
    report.add(
        "moved_of_new", tiers_bytes, "ratio", {**case, "decode": "with tiers"},
        expected="1.0 to 1.1", target=f"at most {_MOST_BYTES}",
    )  # fmt: skip
    report.add(
        "moved_of_new", num_bytes, "ratio", {**case, "decode": "without tiers"}, limit=all_of_new
    )
    target = f"at most {_MOST_TTFT}" if args.device == "cuda" else None
    report.add("last_ttft_ratio", tiers_ttft / ttft, "ratio", case, target=target)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--conversations", type=int, default=8)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--first", type=int, default=10_000, help="tokens of the first prompt")
    parser.add_argument("--new", type=int, default=2048, help="new tokens of each further turn")
    parser.add_argument("--answer", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--link", help="rate of the way to the decode server, on a CPU")


def run(args: argparse.Namespace, report: Report) -> None:
    if args.link is not None and args.device != "cpu":
        raise Refused("--link is for --device cpu")
    if args.link is not None and (why := why_no_hosts()) is not None:
        raise Refused(f"--link: {why}")
    with contextlib.ExitStack() as stack:
        is_cpu = args.device == "cpu"
        model = None if is_cpu else stack.enter_context(dummy_model())
        measure(args, TINY if is_cpu else FULL, model, report)


COMMAND: Final = Command(
    run=run,
    add_options=add_options,
    devices=("cuda", "cpu"),
    gpus=2,
    quick={
        "device": "cpu",
        "conversations": 3,
        "turns": 3,
        "first": 400,
        "new": 128,
        "answer": 8,
    },
)
