"""Requests of prefill and decode servers that are refused, share a room, or come in floods."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from rigs.disaggregation.pd_rig import LocalMover, PdRig, RoleRig
from rigs.schedulers import checkable_model
from rigs.schedulers.scheduler_rig import greedy, prompt
from sglang.srt.constants import BUILTIN_MODEL_DIR
from sglang.srt.disaggregation.prefill import REMEMBER_S, PrefillRole
from sglang.srt.messages.first_token import sampling_digest
from sglang.srt.messages.io_struct import DeclineRoomReq
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=1, suite="base-a-test-cpu")

IDS = prompt(1, 18)


def make_pair(**args: Any) -> PdRig:
    return PdRig(BUILTIN_MODEL_DIR, LocalMover(), checkable=True, page_size=4, **args)


@pytest.fixture
def pair() -> Iterator[PdRig]:
    with make_pair() as pair:
        yield pair


def sampled(seed: int | None) -> SamplingParams:
    params = SamplingParams(temperature=1.2, max_new_tokens=6, ignore_eos=True, sampling_seed=seed)
    params.normalize()
    return params


def why(rig: RoleRig, rid: str) -> tuple[int | None, str]:
    """Status and message of its end."""
    reason = rig.results[rid].finish_reason
    assert reason is not None
    return reason.status_code, reason.message or ""


# ---- two requests in one room ------------------------------------------------------------------


def swap(pair: PdRig, first: SamplingParams, second: SamplingParams) -> None:
    """Two requests for one prompt in one room, which come to the servers in different orders.

    The model's keys depend on the message's seed, which is the same, and not on that of the
    parameters.
    """
    a, b = (pair.request(rid, IDS, one, room=4) for rid, one in (("a", first), ("b", second)))
    pair.step([a], [b])
    pair.step([b], [])
    pair.until(lambda: all(rig.scheduler.is_idle() for rig in pair.rigs))
    pair.step([], [a])
    pair.until(lambda: all(rig.scheduler.is_idle() for rig in pair.rigs))
    assert why(pair.prefill, "b")[0] == 400, "prefill had given the room to the other"


def test_the_first_token_of_another_request_is_not_used(pair: PdRig) -> None:
    """Else each would go on from a token that was drawn with the other's seed."""
    swap(pair, sampled(1), sampled(2))
    status, message = why(pair.decode, "b")
    assert status == 503 and "was sent another request" in message
    assert pair.decode.results["b"].output_ids == []
    pair.assert_clean()


def test_requests_that_ask_for_the_same_may_be_taken_for_each_other(pair: PdRig) -> None:
    swap(pair, greedy(6), greedy(6))
    assert len(pair.decode.results["b"].output_ids) == 6


@pytest.mark.parametrize(
    "change",
    [
        {"temperature": 0.5},
        {"top_p": 0.5},
        {"top_k": 3},
        {"min_p": 0.1},
        {"sampling_seed": 3},
        {"min_new_tokens": 1},
        {"repetition_penalty": 1.1},
        {"logit_bias": {"7": 1.0}},
        {"regex": "a"},
        {"ebnf": "a"},
        {"json_schema": "{}"},
        {"structural_tag": "{}"},
    ],
)
def test_whatever_changes_the_first_token_is_in_the_digest(change: dict[str, Any]) -> None:
    plain: dict[str, Any] = {"temperature": 1.0, "max_new_tokens": 6}
    assert sampling_digest(SamplingParams(**plain)) != sampling_digest(
        SamplingParams(**{**plain, **change})
    )


def test_what_does_not_change_it_is_not() -> None:
    assert sampling_digest(greedy(3, stop=["x"])) == sampling_digest(greedy(9)) == ""
    assert sampling_digest(SamplingParams(temperature=0.0, top_p=0.3)) == ""
    bias = {"1": 2.0, "3": 4.0}
    assert sampling_digest(SamplingParams(logit_bias=bias)) == sampling_digest(
        SamplingParams(logit_bias=dict(reversed(bias.items())))
    )


# ---- what prefill refuses ----------------------------------------------------------------------


def test_a_full_queue_of_prefill_is_reported_at_once() -> None:
    with make_pair(prefill={"max_queued_requests": 1}) as pair:
        pair.step([pair.request("fills the queue", IDS)], [])
        pair.until(lambda: "a" in pair.decode.results, pair.request("a", IDS))
        status, message = why(pair.decode, "a")
        assert status == 503
        assert "the prefill server ended the request: the request queue is full" in message
        pair.step([pair.prefill.abort("fills the queue")], [])
        pair.until(lambda: all(rig.scheduler.is_idle() for rig in pair.rigs))
        pair.assert_clean()


@pytest.mark.parametrize("order", ["before", "after"])
def test_what_the_server_process_of_prefill_refuses_is_reported_at_once(
    pair: PdRig, order: str
) -> None:
    message = pair.request("a", IDS)
    assert message.bootstrap is not None
    decline = DeclineRoomReq(bootstrap=message.bootstrap, reason="top_p is wrong")
    if order == "before":
        pair.step([decline], [])
    pair.step([], [message])
    pair.step([decline], [])
    pair.until(lambda: all(rig.scheduler.is_idle() for rig in pair.rigs))
    assert why(pair.decode, "a") == (503, "the prefill server ended the request: top_p is wrong")
    pair.assert_clean()


def test_what_the_server_process_of_decode_refuses_is_reported_at_once(pair: PdRig) -> None:
    message = pair.request("a", IDS)
    assert message.bootstrap is not None
    pair.step([message], [DeclineRoomReq(bootstrap=message.bootstrap, reason="top_p is wrong")])
    pair.until(lambda: "a" in pair.prefill.results)
    assert why(pair.prefill, "a") == (503, "the decode server gave it up: top_p is wrong")
    pair.assert_clean()


def test_a_refused_request_does_not_end_anothers_room(pair: PdRig) -> None:
    message = pair.request("a", IDS)
    assert message.bootstrap is not None
    decline = DeclineRoomReq(bootstrap=message.bootstrap, reason="top_p is wrong")
    pair.run(message, decline)
    assert len(pair.decode.results["a"].output_ids) == 8


def test_prompts_one_after_another_share_a_connection(pair: PdRig) -> None:
    for number in range(5):
        pair.run(pair.request(f"a{number}", IDS))
    assert len(pair.prefill.rooms._listener.peers) == 2, "one asks about rooms, one about prompts"


def test_a_flood_of_refused_requests_leaves_nothing_behind() -> None:
    """Prefill refuses three of four. The others get their words, and no room stays."""
    with make_pair(prefill={"pool_tokens": 64}, decode={"pool_tokens": 256}) as pair:
        good, bad = [], []
        for number in range(60):
            good.append(pair.request(f"good{number}", prompt(number, 10 + number % 20)))
            bad += [pair.request(f"bad{number}.{n}", prompt(n, 80)) for n in range(3)]
        pair.until(
            lambda: all(rig.scheduler.is_idle() for rig in pair.rigs),
            *(message for four in zip(good, bad[::3], bad[1::3], bad[2::3], strict=True)
              for message in four),
        )  # fmt: skip
        for message in good:
            want = checkable_model.words(message.input_ids.tolist(), message.seed, 8)
            assert pair.result(message.rid).output_ids == want
        for message in bad:
            assert why(pair.prefill, message.rid)[0] == 400
            status, reason = why(pair.decode, message.rid)
            assert status == 503 and "at most 63 can ever fit" in reason
        pair.assert_clean()
        role = pair.prefill.scheduler._role
        assert isinstance(role, PrefillRole)
        rooms = pair.prefill.rooms
        assert len(rooms._rooms) == len(good) + len(bad)
        # Prefill remembers ended rooms for a minute, since the last answer may have been lost.
        pair.prefill.now += REMEMBER_S + 1
        pair.until(lambda: not rooms._rooms)
        assert not role._rooms
