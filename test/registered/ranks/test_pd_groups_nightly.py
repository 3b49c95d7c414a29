"""Prefill and decode servers with DP groups: all kinds of state, more sizes, and lost ranks."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Final

import psutil
import pytest

from rigs.disaggregation.pd_groups import (
    HOST,
    GroupedPair,
    Side,
    states,
    tiny,
    words_of_one_rank,
)
from rigs.schedulers.scheduler_rig import prompt
from rigs.servers.engine_server import EngineServer
from sglang.srt.utils.network import get_free_port, wait_until
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=200, suite="nightly-test-cpu", nightly=True)

EP: Final = ("--ep-size", "2")
STATES: Final = ("--max-mamba-cache-size", "24")
DRAFTS: Final = ("--speculative-algorithm", "NEXTN", "--speculative-num-steps", "3", *STATES)
TIERS: Final = ("--enable-hierarchical-cache", "--hicache-ratio", "2")
FOLLOW: Final = ("--load-balance-method", "follow_bootstrap_room")
PAIRS: Final = {
    "qwen3": (
        (Side(dp=2, tp=2, more=FOLLOW), Side(dp=2)),
        (Side(dp=2), Side(dp=2, tp=2)),
        (Side(dp=4), Side(dp=2, more=TIERS)),
    ),
    "qwen3_moe": (
        (Side(dp=2, more=EP), Side()),
        (Side(dp=2, tp=2, more=("--ep-size", "4")), Side(dp=2, more=EP)),
        (Side(tp=2), Side(dp=2, more=(*EP, *TIERS))),
    ),
    "deepseek_v32": (
        (Side(dp=2, more=EP), Side()),
        (Side(dp=2), Side(dp=2)),
        (Side(tp=2), Side(dp=2, more=EP)),
    ),
    "qwen3_next": (
        (Side(dp=2, more=(*EP, *STATES)), Side(more=STATES)),
        (Side(tp=2, more=STATES), Side(dp=2, more=(*EP, *STATES))),
    ),
    "gpt_oss": ((Side(dp=2, more=(*EP, *STATES)), Side(dp=2, more=STATES)),),
}


@pytest.mark.parametrize("family", list(PAIRS))
def test_the_words_are_those_of_one_rank(tmp_path: Path, family: str) -> None:
    model = tiny(tmp_path, family)
    wanted = words_of_one_rank(model)
    for sides in PAIRS[family]:
        with GroupedPair(model, *sides) as pair:
            pair.assert_words(wanted)


def test_drafts_begin_with_a_hidden_state_of_another_group(tmp_path: Path) -> None:
    model = tiny(tmp_path, "qwen3_5", mtp=True)
    wanted = words_of_one_rank(model)
    with GroupedPair(model, Side(dp=2, more=DRAFTS), Side(dp=2, more=DRAFTS)) as pair:
        pair.assert_words(wanted)


def test_all_groups_of_both_servers_change_their_role(tmp_path: Path) -> None:
    model = tiny(tmp_path, "qwen3_moe")
    wanted = words_of_one_rank(model)
    more = ("--enable-pd-role-switch", *EP)
    port = ("--disaggregation-bootstrap-port", str(get_free_port()))
    sides = Side(dp=2, more=more), Side(dp=2, more=(*more, *port))
    with GroupedPair(model, *sides) as pair:
        for _ in range(2):
            pair.assert_words(wanted)
            for server, role in ((pair.prefill, "decode"), (pair.decode, "prefill")):
                answer = server.request("POST", "/pd_role_switch", {"new_role": role}, admin=True)
                assert answer.status == 200, answer.body
            pair.prefill, pair.decode = pair.decode, pair.prefill
            pair.bootstrap, port = (HOST, int(port[-1])), ("", str(pair.bootstrap[1]))
        pair.assert_words(wanted)


def kill_group(server: EngineServer, dp_rank: int) -> None:
    """Kill the only rank of a group."""
    name = f"sglang::scheduler_DP{dp_rank}_TP{dp_rank}"
    (child,) = [
        child
        for child in psutil.Process(server.process.pid).children(recursive=True)
        if " ".join(child.cmdline()).strip() == name
    ]
    child.send_signal(signal.SIGKILL)


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_lost_group_ends_its_server_and_the_other_one_serves_on(
    tmp_path: Path, side: str
) -> None:
    model = tiny(tmp_path, "qwen3")
    with GroupedPair(model, Side(dp=2), Side(dp=2)) as pair:
        victim, other = pair.prefill, pair.decode
        if side == "decode":
            victim, other = other, victim
        prompts = [prompt(50 + n, 150) for n in range(24)]
        long: dict[str, Any] = {
            "sampling_params": {"temperature": 0, "max_new_tokens": 200, "ignore_eos": True}
        }
        with ThreadPoolExecutor(len(prompts)) as pool:
            futures = [pool.submit(partial(pair.ask, ids, **long)) for ids in prompts]
            assert wait_until(lambda: all(state["busy"] for state in states(other)), 30)
            kill_group(victim, 1)
            ended = [future.result(90) for future in futures]
        assert victim.process.wait(60) == 1
        answers = [both[1 if side == "prefill" else 0] for both in ended]
        failed = [answer for answer in answers if answer.status_code != 200]
        assert failed, "some needed the server that is gone"
        assert {answer.status_code for answer in failed} == {503}
        assert wait_until(lambda: not any(state["busy"] for state in states(other)), 60)
        victim.start()
        with ThreadPoolExecutor(4) as pool:
            again = list(pool.map(lambda ids: pair.words(ids, (None, None)), prompts[:4]))
        assert all(again)
        pair.assert_given_back()
