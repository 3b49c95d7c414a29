"""Real servers of several ranks, over Mooncake's TCP on loopback.

They say the words of one server of one rank, and end what is lost when a rank dies.
"""

from __future__ import annotations

import itertools
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx
import psutil
import pytest

from rigs.disaggregation.pd_servers import TCP, router
from rigs.models.tiny_models import save_tiny_checkpoint
from rigs.schedulers.scheduler_rig import prompt
from rigs.servers.engine_server import EngineServer
from rigs.servers.forked_servers import ForkedServer
from sglang.srt.constants import BUILTIN_MODEL_DIR
from sglang.srt.utils.network import get_free_port, wait_until
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=60, suite="base-b-test-cpu")

HEADS: Final[dict[str, Any]] = {"num_attention_heads": 8, "vocab_size": 2176, "eos_token_id": 2}
DELTA: Final[dict[str, Any]] = {**HEADS, "linear_num_key_heads": 4, "linear_num_value_heads": 8}
FAMILIES: Final[dict[str, dict[str, Any]]] = {
    "qwen3": HEADS,
    "qwen3_moe": HEADS,
    "deepseek_v32": {**HEADS, "num_key_value_heads": 8},
    "qwen3_next": DELTA,
}
CP: Final = ("--tp-size", "2", "--attn-cp-size", "2")
"""Flags of a prefill server that splits prompts, not heads."""
TIERS: Final = ("--tp-size", "2", "--enable-hierarchical-cache", "--hicache-ratio", "2")
ENV: Final = {
    **TCP,
    "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": "15",
    "SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL": "1",
    "SGLANG_DISAGGREGATION_HEARTBEAT_MAX_FAILURE": "6",  # A busy machine may pause for seconds.
}
IDS: Final = [prompt(seed, length) for seed, length in enumerate((1, 40, 100, 200))]
rooms = itertools.count(1)


@pytest.fixture(scope="module", params=list(FAMILIES))
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@dataclass(frozen=True)
class Prefill:
    """A prefill server, and where its ranks are found."""

    server: ForkedServer
    port: int


class Fleet:
    """Servers of one model, started when they are first asked for."""

    def __init__(self, model: Path, stack: ExitStack) -> None:
        self._model = model
        self._stack = stack
        self._prefill: dict[tuple[str, ...], Prefill] = {}
        self._decode: dict[int, ForkedServer] = {}

    def start(self, *flags: str) -> ForkedServer:
        states = ("--max-mamba-cache-size", "24") if "qwen3_next" in str(self._model) else ()
        server = ForkedServer(
            "--device", "cpu", "--tokenizer-path", str(BUILTIN_MODEL_DIR), "--page-size", "16",
            "--max-total-tokens", "2048", "--max-running-requests", "8",
            "--chunked-prefill-size", "64", *states, *flags, env=ENV, model=str(self._model),
        )  # fmt: skip
        return self._stack.enter_context(server)

    def prefill(self, *flags: str) -> Prefill:
        if flags not in self._prefill:
            port = get_free_port()
            mode = ("--disaggregation-mode", "prefill")
            of_port = ("--disaggregation-bootstrap-port", str(port))
            self._prefill[flags] = Prefill(self.start(*mode, *of_port, *flags), port)
        return self._prefill[flags]

    def decode(self, size: int) -> ForkedServer:
        if size not in self._decode:
            flags = ("--disaggregation-mode", "decode", "--tp-size", str(size))
            self._decode[size] = self.start(*flags)
        return self._decode[size]


@contextmanager
def fleet_of(path: Path, family: str) -> Iterator[Fleet]:
    model = path / family
    save_tiny_checkpoint(model, family, **FAMILIES[family])
    with ExitStack() as stack:
        yield Fleet(model, stack)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, family: str) -> Iterator[Fleet]:
    with fleet_of(tmp_path_factory.mktemp("models"), family) as fleet:
        yield fleet


@pytest.fixture
def dense(tmp_path: Path) -> Iterator[Fleet]:
    """Servers of a test that kills them."""
    with fleet_of(tmp_path, "qwen3") as fleet:
        yield fleet


def body_of(ids: list[int], wanted: int = 16) -> dict[str, Any]:
    sampling = {"temperature": 0, "max_new_tokens": wanted, "ignore_eos": True}
    return {"input_ids": ids, "sampling_params": sampling, "return_logprob": True}


def both_servers(
    prefill: Prefill, decode: EngineServer, ids: list[int], wanted: int = 16
) -> tuple[httpx.Response, httpx.Response]:
    """Answers of both servers to a request, sent as a router would send it."""
    bootstrap = {
        "bootstrap_host": "127.0.0.1",
        "bootstrap_port": prefill.port,
        "bootstrap_room": next(rooms),
    }
    body = {**body_of(ids, wanted), **bootstrap}

    def post(url: str) -> httpx.Response:
        try:
            return httpx.post(f"{url}/generate", json=body, timeout=60)
        except httpx.TransportError as error:
            return httpx.Response(599, text=str(error))

    with ThreadPoolExecutor(2) as pool:
        first, second = (pool.submit(post, url) for url in (prefill.server.url, decode.url))
        return first.result(), second.result()


def said(answer: httpx.Response) -> tuple[list[int], list[float]]:
    assert answer.status_code == 200, answer.text
    found = answer.json()
    logprobs = [row[0] for row in found["meta_info"]["output_token_logprobs"]]
    return found["output_ids"], logprobs


def assert_given_back(*servers: EngineServer) -> None:
    """Assert that nothing is held, and no slot is lost."""

    def info(server: EngineServer) -> dict[str, Any]:
        state: dict[str, Any] = server.request("GET", "/server_info").body["internal_states"][0]
        return state

    for server in servers:
        assert wait_until(lambda server=server: not info(server)["busy"], 30)  # type: ignore[misc]
        state = info(server)
        assert state["free_tokens"] + state["evictable_tokens"] == state["max_total_num_tokens"]


PAIRS: Final[dict[str, list[tuple[tuple[str, ...], int]]]] = {
    "qwen3": [(("--tp-size", "2"), 2), (("--tp-size", "2"), 1), ((), 2), (CP, 1)],
    "qwen3_moe": [(TIERS, 1)],
    "deepseek_v32": [(("--tp-size", "2"), 2)],
    "qwen3_next": [((), 1), (("--tp-size", "2"), 2), (("--tp-size", "2"), 1)],
}
"""Flags of the prefill server, ranks of the decode server."""


def test_the_output_is_that_of_one_rank(fleet: Fleet, family: str) -> None:
    whole = fleet.start()
    wanted = [said(httpx.post(f"{whole.url}/generate", json=body_of(ids))) for ids in IDS]
    whole.kill()
    for flags, size in PAIRS[family]:
        prefill, decode = fleet.prefill(*flags), fleet.decode(size)
        for turn in ("cold, or cached by another pair", "cached on both sides"):
            with ThreadPoolExecutor(len(IDS)) as pool:
                answers = pool.map(lambda ids: both_servers(prefill, decode, ids)[1], IDS)  # noqa: B023
            for answer, want in zip(answers, wanted, strict=True):
                tokens, logprobs = said(answer)
                assert tokens == want[0], f"{flags} to {size}, {turn}"
                assert logprobs == pytest.approx(want[1], abs=1e-3)
        assert_given_back(prefill.server, decode)
    if family == "qwen3":
        prefill, decode = fleet.prefill("--tp-size", "2"), fleet.decode(2)
        with router([(prefill.server, prefill.port)], [decode]) as url:
            answer = httpx.post(f"{url}/generate", json=body_of(IDS[2]), timeout=60)
            assert said(answer)[0] == wanted[2][0]
        assert_given_back(prefill.server, decode)


# ---- a rank dies -------------------------------------------------------------------------------


def kill_rank(server: EngineServer, rank: int) -> None:
    (child,) = [
        child
        for child in psutil.Process(server.process.pid).children(recursive=True)
        if " ".join(child.cmdline()).strip() == f"sglang::scheduler_TP{rank}"
    ]
    child.send_signal(signal.SIGKILL)


def is_in_flight(server: EngineServer) -> bool:
    return bool(server.request("GET", "/server_info").body["internal_states"][0]["busy"])


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_rank_of_one_side_is_killed(dense: Fleet, side: str) -> None:
    """Its server ends. The other fails what needs it, says why, and serves on."""
    prefill, decode = dense.prefill("--tp-size", "2"), dense.decode(2)
    victim, other = prefill.server, decode
    if side == "decode":
        victim, other = other, victim
    prompts = [prompt(50 + n, 150) for n in range(24)]
    with ThreadPoolExecutor(len(prompts)) as pool:
        futures = [pool.submit(both_servers, prefill, decode, ids, 200) for ids in prompts]
        assert wait_until(lambda: is_in_flight(victim) and is_in_flight(other), 30)
        kill_rank(victim, 1)
        ended = [future.result(90) for future in futures]
    assert victim.process.wait(60) == 1
    answers = [pair[1 if side == "prefill" else 0] for pair in ended]
    failed = [answer for answer in answers if answer.status_code != 200]
    assert failed, "some needed the server that is gone"
    for answer in failed:
        assert answer.status_code == 503, answer.text
        named = (
            ("has not answered for 6 s", "is not found", "reading from the", "no slots were free")
            if side == "prefill"
            else ("the decode server has not been heard of for", "no decode server has asked")
        )
        assert any(name in answer.text for name in named), answer.text
    assert_given_back(other)
    if side == "prefill":
        prefill = dense.prefill()
    else:
        decode = dense.decode(1)
    said(both_servers(prefill, decode, IDS[2])[1])
    assert_given_back(other)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q", "-x"]))
