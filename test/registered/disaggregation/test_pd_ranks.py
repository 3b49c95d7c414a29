"""Real servers of several ranks, over Mooncake's TCP on loopback.

They say the words of one server of one rank, and end what is lost when a rank dies. Some models
draft: those words are what a server without speculation says, and acceptance is that of one server.
"""

from __future__ import annotations

import functools
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

from rigs.disaggregation.pd_servers import TCP, ask_both, router
from rigs.drafts.guesses import guess_in_rank, guessed
from rigs.models.tiny_models import save_tiny_checkpoint
from rigs.nightly_cases import nightly
from rigs.schedulers.scheduler_rig import SchedulerRig, prompt
from rigs.servers.engine_server import EXACT, EngineServer
from rigs.servers.forked_servers import ForkedServer
from sglang.srt.constants import BUILTIN_HYBRID_MODEL_DIR, BUILTIN_MODEL_DIR
from sglang.srt.utils.network import get_free_port, wait_until
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=59, suite="base-b-test-cpu")

HEADS: Final[dict[str, Any]] = {"num_attention_heads": 8, "vocab_size": 2176, "eos_token_id": 2}
FAMILIES: Final[dict[str, dict[str, Any]]] = {
    "qwen3": HEADS,
    "qwen3_moe": HEADS,
    "deepseek_v32": {**HEADS, "num_key_value_heads": 8, "mtp": True},
}
"""Settings of tiny models."""
HYBRID: Final = "the built-in hybrid"
DRAFTS: Final = ("--speculative-algorithm", "NEXTN", "--speculative-num-steps", "3")
MODES: Final[dict[str, tuple[str, ...]]] = {
    "deepseek_v32": DRAFTS,
    HYBRID: (*DRAFTS, *EXACT, "--max-mamba-cache-size", "24"),
}
"""Flags of the prefill and decode servers of models that draft."""
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
NEW_TOKENS: Final = 16


@pytest.fixture(scope="module", params=[*FAMILIES, nightly(HYBRID)])
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@dataclass(frozen=True)
class Prefill:
    """A prefill server, and where its ranks are found."""

    server: ForkedServer
    port: int


class Fleet:
    """Servers of one model, started when they are first asked for.

    Args:
        mode: Flags of the prefill and decode servers.

    Attributes:
        texts, right: See `guessed`; at first the drafts are the layer's own.
    """

    def __init__(self, model: Path, mode: tuple[str, ...], stack: ExitStack) -> None:
        self.model = model
        self._mode = mode
        self._stack = stack
        self.texts: list[list[int]] = []
        self.right = 1.0
        self._prefill: dict[tuple[str, ...], Prefill] = {}
        self._decode: dict[int, ForkedServer] = {}

    def start(self, *flags: str) -> ForkedServer:
        server = ForkedServer(
            "--device", "cpu", "--tokenizer-path", str(BUILTIN_MODEL_DIR), "--page-size", "16",
            "--max-total-tokens", "2048", "--max-running-requests", "8",
            "--chunked-prefill-size", "64", *flags, env=ENV, model=str(self.model),
            in_rank=functools.partial(guess_in_rank, self.texts, self.right),
        )  # fmt: skip
        return self._stack.enter_context(server)

    def prefill(self, *flags: str) -> Prefill:
        if flags not in self._prefill:
            port = get_free_port()
            mode = ("--disaggregation-mode", "prefill", *self._mode)
            of_port = ("--disaggregation-bootstrap-port", str(port))
            self._prefill[flags] = Prefill(self.start(*mode, *of_port, *flags), port)
        return self._prefill[flags]

    def decode(self, size: int) -> ForkedServer:
        if size not in self._decode:
            flags = ("--disaggregation-mode", "decode", "--tp-size", str(size))
            self._decode[size] = self.start(*flags, *self._mode)
        return self._decode[size]

    def verifications(self) -> int:
        """Verifications for all of IDS by a scheduler of one rank."""
        rig = SchedulerRig(
            self.model,
            pool_tokens=2048,
            page_size=16,
            dtype="float32",
            speculative_algorithm="NEXTN",
            speculative_num_steps=3,
        )
        with guessed(self.texts, self.right):
            for ids in IDS:
                rig.generate([ids], NEW_TOKENS)
        lasts = [got.last for got in rig.results.values()]
        return sum(one.verifications.count for one in lasts if one and one.verifications)


@contextmanager
def fleet_of(path: Path, family: str) -> Iterator[Fleet]:
    model = BUILTIN_HYBRID_MODEL_DIR
    if family != HYBRID:
        model = path / family
        save_tiny_checkpoint(model, family, **FAMILIES[family])
    with ExitStack() as stack:
        yield Fleet(model, MODES.get(family, ()), stack)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, family: str) -> Iterator[Fleet]:
    with fleet_of(tmp_path_factory.mktemp("models"), family) as fleet:
        yield fleet


@pytest.fixture
def dense(tmp_path: Path) -> Iterator[Fleet]:
    """Servers of a test that kills them."""
    with fleet_of(tmp_path, "qwen3") as fleet:
        yield fleet


def body_of(ids: list[int], wanted: int = NEW_TOKENS) -> dict[str, Any]:
    sampling = {"temperature": 0, "max_new_tokens": wanted, "ignore_eos": True}
    return {"input_ids": ids, "sampling_params": sampling, "return_logprob": True}


def both_servers(
    prefill: Prefill, decode: EngineServer, ids: list[int], wanted: int = NEW_TOKENS
) -> tuple[httpx.Response, httpx.Response]:
    """Answers of both servers to a request."""
    return ask_both(prefill.server, ("127.0.0.1", prefill.port), decode, body_of(ids, wanted))


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
    HYBRID: [((), 1), (("--tp-size", "2"), 2), (("--tp-size", "2"), 1)],
}
"""Flags of the prefill server, ranks of the decode server."""


def test_the_output_is_that_of_one_rank(fleet: Fleet, family: str) -> None:
    whole = fleet.start(*EXACT)
    wanted = [said(httpx.post(f"{whole.url}/generate", json=body_of(ids))) for ids in IDS]
    whole.kill()
    drafts = family in MODES
    if drafts and family != HYBRID:
        # A random model's own drafts are hardly ever right.
        fleet.texts = [[*ids, *tokens] for ids, (tokens, _) in zip(IDS, wanted, strict=True)]
        fleet.right = 0.7
        plain = fleet.start("--disaggregation-mode", "decode")
        assert_no_pair(fleet.prefill(*PAIRS[family][0][0]), plain)
        plain.kill()
    if drafts:
        count = fleet.verifications()
        assert count < 0.8 * len(IDS) * (NEW_TOKENS - 1), "many drafts are right"
    for flags, size in PAIRS[family]:
        prefill, decode = fleet.prefill(*flags), fleet.decode(size)
        for turn in ("cold, or cached by another pair", "cached on both sides"):
            with ThreadPoolExecutor(len(IDS)) as pool:
                answers = list(pool.map(lambda ids: both_servers(prefill, decode, ids)[1], IDS))  # noqa: B023
            if drafts:
                metas = [answer.json()["meta_info"] for answer in answers]
                found = sum(meta["spec_verify_ct"] for meta in metas)
                assert found == pytest.approx(count, rel=0.02), f"{flags} to {size}, {turn}"
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


def assert_no_pair(prefill: Prefill, decode: EngineServer) -> None:
    """Assert that a server that does not draft takes no pages of one that does."""
    for answer in both_servers(prefill, decode, IDS[1]):
        assert answer.status_code == 503
        assert "start both with the same" in answer.text and DRAFTS[0] in answer.text
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
