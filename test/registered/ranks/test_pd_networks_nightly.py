"""Prefill and decode servers of two machines each, whose hosts have two networks: the ranks of a
server meet on one, pages and requests travel on the other. Links are slowed, cut and restored.

A cut of the first network ends the server with the name of the lost rank. A cut of the second fails
the requests that need it, within the limits of docs/pd.md; the same servers answer after it.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from rigs.disaggregation.pd_servers import ask_both
from rigs.machines.networks import Host, Link, Network, why_no_hosts
from rigs.machines.two_nodes import Machine, Nodes, state_of
from rigs.schedulers.scheduler_rig import prompt
from rigs.servers.engine_server import EXACT, EngineServer
from rigs.servers.forked_servers import ForkedServer
from sglang.srt.constants import BUILTIN_MODEL_DIR
from sglang.srt.environ import envs
from sglang.srt.utils.network import wait_until
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=200, suite="nightly-test-cpu", nightly=True)
_WHY_NOT: Final = why_no_hosts()
pytestmark = pytest.mark.skipif(_WHY_NOT is not None, reason=str(_WHY_NOT))

FLAGS: Final = (
    "--device", "cpu", "--tokenizer-path", str(BUILTIN_MODEL_DIR), "--served-model-name", "tiny",
    "--max-total-tokens", "4096", "--page-size", "16", "--chunked-prefill-size", "64", *EXACT,
)  # fmt: skip
NAMES: Final = ("p0", "p1", "d0", "d1")
"""The hosts of the prefill server and of the decode server."""
CLIENT: Final = 9
BOOTSTRAP_PORT: Final = 8998
MEETING_PORT: Final = 20000
SILENCE_S: Final = 6.0
LIMIT_S: Final = 60.0
"""Seconds within which every request ends, and a pair answers again after a cut."""
ENV: Final = {
    "MOONCAKE_PROTOCOL": "tcp",
    "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": "15",
    "SGLANG_DISAGGREGATION_WAITING_TIMEOUT": "15",
    "SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL": "1",
    "SGLANG_DISAGGREGATION_HEARTBEAT_MAX_FAILURE": str(int(SILENCE_S)),
    envs.SGLANG_DISAGGREGATION_SECRET.name: secrets.token_hex(32),
}
LOST: Final = (
    "has not answered for 6 s",
    "is not found: the bootstrap server at http://10.214.0.1",
)
"""Texts of a decode server that does not reach a prefill server."""
PROMPTS: Final = [prompt(seed, length) for seed, length in enumerate((1, 40, 100, 400))]


@dataclass
class Site:
    """The hosts, and the servers that run on them."""

    model: Path
    stack: ExitStack
    hosts: dict[str, Host] = field(default_factory=dict)
    machines: dict[str, Machine] = field(default_factory=dict)
    to_ranks: dict[str, Link] = field(default_factory=dict)
    to_pages: dict[str, Link] = field(default_factory=dict)

    def __post_init__(self) -> None:
        ranks, pages = (
            Network(self.stack.enter_context(Host()), prefix) for prefix in ("10.213.0", "10.214.0")
        )
        self.ranks = ranks
        for number, name in enumerate(NAMES, 1):
            host = self.hosts[name] = self.stack.enter_context(Host())
            self.to_ranks[name] = ranks.join(host, "ranks", number)
            self.to_pages[name] = pages.join(host, "pages", number)
            self.machines[name] = Machine(pages.address(number), ENV, host.namespace)
        client = self.stack.enter_context(Host())
        pages.join(client, "pages", CLIENT)
        self.stack.enter_context(client.inside())

    def start(self, mode: str, size: int) -> Nodes | ForkedServer:
        """Start a server of `size` ranks, each on a machine of its own."""
        first, second = NAMES[:2] if mode == "prefill" else NAMES[2:]
        flags = [*FLAGS, "--tp-size", str(size), "--disaggregation-mode", mode]
        if mode == "decode":
            where = f"{self.machines[NAMES[0]].host}:{BOOTSTRAP_PORT}"
            flags += ["--disaggregation-prefill-hosts", where]
        here, there = self.machines[first], self.machines[second]
        if size == 1:
            return self.stack.enter_context(
                ForkedServer(
                    *flags,
                    env=here.env,
                    model=str(self.model),
                    host=here.host,
                    namespace=here.namespace,
                )
            )
        meeting = f"{self.ranks.address(NAMES.index(first) + 1)}:{MEETING_PORT}"
        nodes = Nodes(self.model, flags, machines=(here, there), meeting=meeting)
        self.stack.callback(nodes.kill)
        nodes.await_ready()
        return nodes


@pytest.fixture(scope="module")
def model(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model("qwen3", num_attention_heads=8, vocab_size=2176, eos_token_id=2)


@pytest.fixture(scope="module")
def words(model: Path) -> list[list[int]]:
    """What one rank says."""
    with ForkedServer(*FLAGS, model=str(model)) as server:
        return [server.generate(ids).output_ids for ids in PROMPTS]


@pytest.fixture
def site(model: Path, words: list[list[int]]) -> Iterator[Site]:
    with ExitStack() as stack:
        yield Site(model, stack)


class Pair:
    """A prefill and a decode server of a site."""

    def __init__(self, site: Site, prefill: int = 2, decode: int = 2) -> None:
        self.site = site
        self.prefill = site.start("prefill", prefill)
        self.decode = site.start("decode", decode)

    def servers(self) -> tuple[EngineServer, EngineServer]:
        first, second = (
            one.server if isinstance(one, Nodes) else one for one in (self.prefill, self.decode)
        )
        return first, second

    def ask(self, ids: list[int], **sampling: Any) -> tuple[httpx.Response, httpx.Response]:
        """Both answers, which come within `LIMIT_S`."""
        prefill, decode = self.servers()
        bootstrap = self.site.machines[NAMES[0]].host, BOOTSTRAP_PORT
        params = {"temperature": 0, "max_new_tokens": 16, **sampling}
        body = {"input_ids": ids, "sampling_params": params}
        return ask_both(prefill, bootstrap, decode, body, LIMIT_S)

    def ask_all(self) -> list[tuple[httpx.Response, httpx.Response]]:
        with ThreadPoolExecutor(len(PROMPTS)) as pool:
            return list(pool.map(self.ask, PROMPTS))

    def assert_says(self, words: Sequence[list[int]]) -> None:
        for (prefill, decode), expected in zip(self.ask_all(), words, strict=True):
            assert (prefill.status_code, decode.status_code) == (200, 200), decode.text
            assert decode.json()["output_ids"] == expected
        self.assert_given_back()

    def assert_given_back(self) -> None:
        """Assert that nothing is held, and no slot is lost."""
        for server in self.servers():
            assert wait_until(lambda server=server: not state_of(server)["busy"], LIMIT_S)  # type: ignore[misc]
            state = state_of(server)
            free = state["free_tokens"] + state["evictable_tokens"]
            assert free == state["max_total_num_tokens"]

    def answers_again(self, words: Sequence[list[int]]) -> None:
        """Assert that requests are answered within `LIMIT_S`, and rightly."""
        begin = time.monotonic()

        def is_answered() -> bool:
            _, decode = self.ask(PROMPTS[-1])
            assert decode.status_code in (200, 503), decode.text
            return decode.status_code == 200

        assert wait_until(is_answered, LIMIT_S, 1.0)
        print(f"answered again after {time.monotonic() - begin:.1f} s")
        self.assert_says(words)


@pytest.mark.parametrize(("prefill", "decode"), [(2, 2), (2, 1), (1, 2)])
def test_they_say_what_one_rank_says(
    site: Site, words: list[list[int]], prefill: int, decode: int
) -> None:
    pair = Pair(site, prefill, decode)
    pair.assert_says(words)
    for link in site.to_pages.values():
        link.slow("4mbit")
    for server in pair.servers():
        assert server.request("POST", "/flush_cache?timeout=30", admin=True).status == 200
    pair.assert_says(words)


@pytest.mark.parametrize("name", ["p0", "p1", "d1"])
def test_a_cut_between_the_servers_fails_what_needs_it(
    site: Site, words: list[list[int]], name: str
) -> None:
    """Host p0 has the bootstrap server and the prefill server's HTTP, so its client waits there."""
    pair = Pair(site)
    pair.assert_says(words)
    fresh = [prompt(100 + seed, 400) for seed in range(4)]
    with ThreadPoolExecutor(len(fresh)) as pool:
        for link in site.to_pages.values():
            link.slow("2mbit")
        begun = [pool.submit(pair.ask, ids) for ids in fresh]
        assert wait_until(lambda: bool(state_of(pair.servers()[1])["busy"]), 30)
        site.to_pages[name].cut()
        begin = time.monotonic()
        ended = [one.result() for one in begun]
        print(f"all ended after {time.monotonic() - begin:.1f} s")
    failed = [(prefill, decode) for prefill, decode in ended if decode.status_code != 200]
    assert failed, "some were under way"
    for prefill, decode in failed:
        assert decode.status_code == 503, decode.text
        assert any(text in decode.text for text in LOST), decode.text
        assert prefill.status_code == (599 if name == "p0" else 503), prefill.text
    for link in site.to_pages.values():
        link.unslow()
    site.to_pages[name].restore()
    pair.answers_again(words)


@pytest.mark.parametrize(("mode", "name"), [("prefill", "p1"), ("decode", "d1"), ("prefill", "p0")])
def test_a_cut_between_the_ranks_ends_their_server(
    site: Site, words: list[list[int]], mode: str, name: str
) -> None:
    pair = Pair(site)
    pair.assert_says(words)
    ended, other = pair.prefill, pair.decode
    if mode == "decode":
        ended, other = other, ended
    assert isinstance(ended, Nodes) and isinstance(other, Nodes)
    site.to_ranks[name].cut()
    assert ended.ends() == (1, 1)
    assert "rank 1 has given no sign of life" in ended.first.log_tail(5)
    assert "rank 0 is " in ended.second.log_tail(5)
    for answer in pair.ask(PROMPTS[-1]):
        assert answer.status_code in (503, 599), answer.text
    assert wait_until(lambda: not state_of(other.server)["busy"], LIMIT_S)
    site.to_ranks[name].restore()
    again = site.start(mode, 2)
    if mode == "prefill":
        pair.prefill = again
    else:
        pair.decode = again
    pair.answers_again(words)
