"""Alerts about drafts fire for the fault of their name, and not without it: a real server whose
requests reject drafts, or decode in batches that are too large for verifications."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final

import pytest

from rigs.drafts.guesses import guess_in_rank
from rigs.servers.engine_server import EngineServer
from rigs.servers.forked_servers import ForkedServer
from rigs.views.alert_rules import firing, scrape
from sglang.srt.constants import BUILTIN_HYBRID_MODEL_DIR
from sglang.srt.environ import envs
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=9, suite="base-b-test-cpu")

STEPS: Final = 8
TOO_MANY: Final = 256 // (STEPS + 1) + 4
"""Requests whose verification would have more than 256 tokens (docs/speculation.md)."""
NAMES: Final = {"DraftsRejected", "DraftsStayOff"}
IDS: Final = list(range(300, 340))
FLAGS: Final = (
    "--max-running-requests", str(TOO_MANY), "--max-total-tokens", "16384",
    "--max-mamba-cache-size", "256",
)  # fmt: skip
MODEL: Final = str(BUILTIN_HYBRID_MODEL_DIR)


@pytest.fixture(scope="module")
def server() -> Iterator[EngineServer]:
    """Its drafts for IDS are mostly right, and the speed of this machine switches none off."""
    with ForkedServer(*FLAGS, model=MODEL) as plain:
        texts = [[*IDS, *ask(plain)[0]["output_ids"]]]
    with ForkedServer(
        "--speculative-algorithm", "NEXTN", "--speculative-num-steps", str(STEPS),
        "--enable-metrics", *FLAGS, model=MODEL, in_rank=partial(guess_in_rank, texts, 0.9),
        env={envs.SGLANG_SPECULATE_ALWAYS.name: "1"},
    ) as running:  # fmt: skip
        yield running


def ask(server: EngineServer, count: int = 1, **params: Any) -> list[dict[str, Any]]:
    sampling = {"temperature": 0, "max_new_tokens": 60, "ignore_eos": True, **params}
    body = {"input_ids": [IDS] * count, "sampling_params": sampling}
    reply = server.request("POST", "/generate", body)
    assert reply.status == 200, reply
    answers: list[dict[str, Any]] = reply.body
    return answers


def alerts(server: EngineServer, work: Callable[[], object]) -> set[str]:
    """Alerts about drafts that fire if `work` goes on."""
    before = scrape(server)
    work()
    return NAMES & set(firing(before, scrape(server)))


def test_rejected_drafts_raise_an_alert(server: EngineServer) -> None:
    assert alerts(server, lambda: ask(server)) == set()
    assert alerts(server, lambda: ask(server, frequency_penalty=0.5)) == {"DraftsRejected"}


def test_batches_without_drafts_raise_an_alert(server: EngineServer) -> None:
    assert alerts(server, lambda: ask(server, 4)) == set()
    assert alerts(server, lambda: ask(server, TOO_MANY)) == {"DraftsStayOff"}


def test_requests_of_one_token_have_no_drafts(server: EngineServer) -> None:
    """A prefill server has such requests."""
    ask(server)
    assert alerts(server, lambda: ask(server, 8, max_new_tokens=1)) == set()
