"""The prefill role: prompts are computed, sent page by page, and held until read."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from rigs.disaggregation.prefill_rig import PAGE, WAIT_S, PrefillRig
from rigs.models.grammar_rig import HandBackend
from rigs.schedulers.scheduler_rig import SchedulerRig, greedy, prompt
from sglang.srt.disaggregation.prefill import REMEMBER_S
from sglang.srt.mem_cache.tree.radix_key import token_array
from sglang.srt.messages.first_token import prompt_digest
from sglang.srt.messages.io_struct import (
    CachedTokensDetails,
    FinishReason,
    ShutdownReq,
)
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.utils.logging_utils import RateLimitedLogger
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=5, suite="base-a-test-cpu")


@pytest.fixture(params=[False, True], ids=["settled", "overlap"])
def rig(model: Path, request: pytest.FixtureRequest) -> Iterator[PrefillRig]:
    rig = PrefillRig(model, overlap=request.param)
    yield rig
    rig.close()


IDS = prompt(1, 18)


# ---- the way of a request ----------------------------------------------------------------------


def test_pages_are_sent_chunk_by_chunk_and_held_until_they_are_read(
    rig: PrefillRig, model: Path
) -> None:
    rig.compute(rig.ask("a", IDS, 5, greedy(6), return_logprob=True, top_logprobs_num=2))
    assert rig.manager.sent == [(5, 2), (5, 2), (5, 1)], "of the last page a part"
    (want,) = SchedulerRig(model).generate([IDS])
    first = rig.manager.tokens[5]
    assert (first.token_id, first.prompt_len) == (want[0], 18)
    assert first.prompt_digest == prompt_digest(token_array(IDS))
    assert first.top_logprobs is not None and first.top_logprobs[0] == (first.logprob, want[0])
    assert (len(first.top_logprobs), first.cached) == (2, CachedTokensDetails())
    state = rig.scheduler.state
    row = state.pools.req_to_token_pool.req_to_token[next(iter(state.queues.held)).slots.row]
    assert rig.manager.pages[5] == (row[:18:PAGE] // PAGE).tolist()
    for _ in range(5):
        rig.step()
    assert "a" not in rig.results, "it does not decode, and is not over"
    assert state.counters.decode_steps == 0
    rig.manager.outcomes[5] = ""
    rig.step()
    assert rig.end("a") == FinishReason(type="length", length=1)
    assert rig.results["a"].output_ids == want[:1]
    rig.assert_idle()


def test_a_request_waits_until_a_decode_server_asks_for_it(rig: PrefillRig) -> None:
    """Else slots here could be full of requests that the decode server has no slots for, and its
    slots full of requests that find none here."""
    rig.manager.claims = False
    rig.step(*(rig.ask(f"r{room}", IDS, room) for room in range(3)))
    for _ in range(5):
        rig.step()
    queues = rig.scheduler.state.queues
    assert (len(queues.waiting), rig.scheduler.state.counters.prefill_tokens) == (3, 0)
    rig.manager.claimed += [1, 77]
    rig.run_until(lambda: 1 in rig.manager.tokens)
    assert {req.rid for req in queues.waiting} == {"r0", "r2"}
    rig.now += WAIT_S
    rig.manager.claimed.append(2)
    rig.run_until(lambda: "r0" in rig.results)
    assert rig.end("r0") == FinishReason(
        type="abort", message="no decode server has asked for it within 100 s", status_code=503
    )
    assert rig.manager.ended == {0: rig.end("r0").message}
    rig.manager.outcomes = {1: "", 2: ""}
    rig.run()
    rig.assert_idle()


def test_a_request_that_no_decode_server_knows_fails_soon(rig: PrefillRig) -> None:
    rig.manager.claims = False
    rig.step(*(rig.ask(f"r{room}", IDS, room) for room in (1, 2)))
    rig.manager.unheard = {1: "no decode server has asked for it within 10 s"}
    rig.run_until(lambda: "r1" in rig.results)
    assert rig.end("r1") == FinishReason(
        type="abort", message="no decode server has asked for it within 10 s", status_code=503
    )
    rig.step()
    assert "r2" not in rig.results, "a decode server names it"
    rig.manager.claimed.append(2)
    rig.run_until(lambda: 2 in rig.manager.tokens)
    rig.manager.outcomes = {2: ""}
    rig.run()
    rig.assert_idle()


def test_the_log_says_which_requests_wait_for_a_decode_server(
    rig: PrefillRig, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    limited = RateLimitedLogger(logging.getLogger("prefill"), clock=lambda: rig.now)
    monkeypatch.setattr(rig.scheduler._role, "_log", limited)
    rig.manager.claims = False
    rig.step(*(rig.ask(f"r{room}", IDS, room) for room in range(10)))

    def lines() -> list[str]:
        return [one.message for one in caplog.records if "wait until decode" in one.message]

    rig.step()
    assert lines() == []
    rig.now += 20
    rig.step()
    (line,) = lines()
    assert re.fullmatch(
        "10 requests wait until decode servers ask for them, the longest for 2. s: "
        "rooms 0, 1, 2, 3, 4, 5, 6, 7 and 2 more",
        line,
    )
    rig.step()
    rig.now += 10
    rig.step()
    assert len(lines()) == 2 and "more like it" not in lines()[1], "it tells of the same requests"


def test_samples_do_not_wait_for_one_that_nobody_asks_for(rig: PrefillRig) -> None:
    rig.manager.claims = False
    rig.step(*(rig.ask(f"s{n}", IDS, n, sample_of="s0" if n else None) for n in range(3)))
    rig.manager.claimed = [1, 2]
    rig.run_until(lambda: rig.manager.tokens.keys() == {1, 2})
    assert "s0" not in rig.results, "it still waits"


def test_pages_that_are_cached_are_sent_too(rig: PrefillRig) -> None:
    rig.compute(rig.ask("a", IDS, 1))
    rig.manager.outcomes[1] = ""
    rig.step()
    rig.compute(rig.ask("b", [*IDS[:16], 3, 3, 3], 2))
    assert rig.manager.pages[2][:4] == rig.manager.pages[1][:4]
    assert len(rig.manager.pages[2]) == 5
    assert rig.manager.tokens[2].cached == CachedTokensDetails(device=16)


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("length", [1, 4, 16, 17])
def test_a_wholly_cached_prompt_is_sent(model: Path, page_size: int, length: int) -> None:
    rig = PrefillRig(model, page_size=page_size, chunked_prefill_size=16)
    ids = prompt(length, length)
    for room in (1, 2):
        rig.compute(rig.ask(f"r{room}", ids, room))
    assert len(rig.manager.pages[2]) == -(-length // page_size)
    whole = length // page_size
    assert rig.manager.pages[1][:whole] == rig.manager.pages[2][:whole]
    assert rig.manager.tokens[1].token_id == rig.manager.tokens[2].token_id


def test_two_that_compute_one_prompt_tell_pages_that_stay(rig: PrefillRig) -> None:
    """The tree keeps those of one of them. The other's are free again, and must not be sent."""
    rig.compute(rig.ask("a", IDS[:8], 1), rig.ask("b", IDS[:8], 2))
    assert rig.manager.pages[1] == rig.manager.pages[2]


@pytest.mark.parametrize(("wanted", "length"), [(0, 0), (1, 1), (7, 1)])
def test_the_first_token_and_the_end_of_requests_for_few(
    rig: PrefillRig, wanted: int, length: int
) -> None:
    rig.compute(rig.ask("a", IDS, 1, greedy(wanted)))
    assert (rig.manager.tokens[1].token_id is None) == (wanted == 0)
    rig.manager.outcomes[1] = ""
    rig.step()
    assert rig.end("a") == FinishReason(type="length", length=length)


def test_a_first_token_that_stops_is_the_reason_of_the_end(rig: PrefillRig, model: Path) -> None:
    (want,) = SchedulerRig(model).generate([IDS])
    params = greedy(9, ignore_eos=False, stop_token_ids=[want[0]])
    rig.compute(rig.ask("a", IDS, 1, params))
    rig.manager.outcomes[1] = ""
    rig.step()
    assert rig.end("a") == FinishReason(type="stop", matched=want[0])


def test_a_constraint_holds_for_the_first_token(model: Path) -> None:
    rig = PrefillRig(model, grammar_backend=HandBackend)
    params = SamplingParams(regex="[0-9]{3}", max_new_tokens=20, temperature=0.0)
    params.normalize()
    rig.compute(rig.ask("a", IDS, 1, params))
    token = rig.manager.tokens[1].token_id
    assert token is not None and 1 <= token <= 10
    rig.manager.outcomes[1] = ""
    rig.run()
    rig.assert_idle()


def test_samples_share_pages_and_have_rooms(rig: PrefillRig) -> None:
    messages = [rig.ask(f"s{n}", IDS, n, seed=n, sample_of="s0" if n else None) for n in range(3)]
    rig.compute(*messages)
    assert rig.scheduler.state.counters.prefill_tokens == 18 + 2 + 2
    assert [rig.manager.pages[n][:4] for n in range(3)] == [rig.manager.pages[0][:4]] * 3
    assert len({rig.manager.pages[n][4] for n in range(3)}) == 3, "the begun page is each one's own"


def test_requests_without_a_room_are_served_whole(rig: PrefillRig, model: Path) -> None:
    rig.compute(rig.ask("held", prompt(2, 20), 1))
    rig.step(rig.request("plain", IDS))
    while "plain" not in rig.results:
        rig.step()
    assert rig.results["plain"].output_ids == SchedulerRig(model).generate([IDS])[0]
    assert not rig.scheduler.is_idle()


def test_what_another_server_may_read_is_not_retracted(model: Path) -> None:
    """Its pages were sent: nothing else may be written to them while the room is open."""
    rig = PrefillRig(model, pool_tokens=96, chunked_prefill_size=4, schedule_conservativeness=0.01)
    plain = [rig.request(f"p{i}", prompt(i, 4), greedy(40)) for i in range(3)]
    rig.step(*plain)
    counters, queues = rig.scheduler.state.counters, rig.scheduler.state.queues
    rig.run_until(lambda: counters.decode_steps > 5)
    rig.step(rig.ask("long", prompt(9, 48), 1))
    while not counters.retractions:
        assert queues.partial is not None, "slots are short while it is computed in parts"
        rig.step()
        rig.check()
    rig.run_until_read(1)
    assert rig.results["long"].finish_reason is not None
    alone = SchedulerRig(model).generate([one.input_ids.tolist() for one in plain], 40)
    assert [rig.results[f"p{i}"].output_ids for i in range(3)] == alone


# ---- ends --------------------------------------------------------------------------------------


def test_a_decode_server_that_is_gone(rig: PrefillRig) -> None:
    rig.compute(rig.ask("a", IDS, 1))
    rig.manager.outcomes[1] = "the decode server has not been heard of for 10 s"
    rig.step()
    rig.step()
    assert rig.end("a") == FinishReason(
        type="abort", message="the decode server has not been heard of for 10 s", status_code=503
    )
    assert rig.manager.ended == {1: "the decode server has not been heard of for 10 s"}
    rig.assert_idle()


@pytest.mark.parametrize("how", ["aborted", "given up"])
@pytest.mark.parametrize("state", ["unclaimed", "waiting", "computing", "held"])
def test_the_end_in_every_state(rig: PrefillRig, state: str, how: str) -> None:
    if state == "waiting":
        rig.step(rig.request("fills", prompt(3, 110), greedy(5)))
    rig.manager.claims = state != "unclaimed"
    message = rig.ask("a", IDS, 1)
    if state == "held":
        rig.compute(message)
    else:
        rig.step(message)
    queues = rig.scheduler.state.queues
    places = {"computing": queues.computing, "held": queues.held}
    found = places.get(state, queues.waiting)
    assert [req.rid for req in found] == ["a"]
    if how == "aborted":
        rig.step(rig.abort("a"))
    else:
        rig.manager.given_up[1] = "the decode server gave it up: no slots"
        rig.step()
        rig.step()
    reason = rig.end("a")
    assert reason.status_code == (499 if how == "aborted" else 503)
    assert rig.manager.ended == {1: reason.message}
    while not rig.scheduler.is_idle():
        rig.step()
    rig.assert_idle()


def test_a_room_that_is_given_up_as_it_fails_ends_once(rig: PrefillRig) -> None:
    rig.compute(rig.ask("a", IDS, 1))
    rig.manager.given_up[1] = rig.manager.outcomes[1] = "given up"
    rig.manager.given_up[77] = "nobody's"
    rig.step()
    rig.step()
    assert rig.end("a").message == "given up"
    rig.assert_idle()


def test_refusals_are_sent_to_the_decode_server(rig: PrefillRig) -> None:
    rig.step(rig.ask("long", prompt(3, 500), 1), rig.ask("empty", [], 2))
    assert "at most 127 can ever fit" in rig.manager.ended[1]
    assert rig.manager.ended[1] == rig.end("long").message
    assert rig.manager.ended[2] == "input_ids is empty: give at least one token"
    rig.step(rig.request("no room", []))
    rig.assert_idle()


def test_a_room_in_use_is_refused_and_its_owner_unharmed(rig: PrefillRig) -> None:
    rig.compute(rig.ask("a", IDS, 1))
    rig.step(rig.ask("b", IDS, 1))
    message = "bootstrap_room 1 belongs to another request: draw one for each request"
    assert rig.end("b") == FinishReason(type="abort", message=message, status_code=400)
    rig.step(rig.ask("too long too", prompt(3, 500), 1))
    assert rig.manager.ended == {}
    rig.manager.outcomes[1] = ""
    rig.step()
    # A room stays reserved for a while after its end.
    rig.now += REMEMBER_S - 2
    rig.step(rig.ask("c", IDS, 1), rig.ask("long", prompt(3, 500), 1))
    assert [rig.end(rid).status_code for rid in ("a", "c", "long")] == [None, 400, 400]
    rig.assert_idle()
    assert rig.manager.ended == {1: "the request has ended"}
    rig.now += 2
    rig.step()
    assert rig.manager.ended == {}
    rig.compute(rig.ask("d", IDS, 1))


def test_a_shutdown_ends_every_room(rig: PrefillRig) -> None:
    rig.compute(rig.ask("held", IDS, 1))
    rig.step(rig.ask("computing", prompt(2, 40), 2))
    rig.step(ShutdownReq(timeout=0.0), rig.ask("late", IDS, 3))
    rig.step()
    assert rig.scheduler.is_stopped
    assert rig.manager.ended == dict.fromkeys((1, 2, 3), "the server is shutting down")
    rig.close()
    assert rig.manager.is_closed


def test_a_shutdown_waits_for_readers(rig: PrefillRig) -> None:
    rig.compute(rig.ask("held", IDS, 1))
    rig.step(ShutdownReq(timeout=1000.0))
    for _ in range(5):
        rig.step()
    assert not rig.scheduler.is_stopped
    rig.manager.outcomes[1] = ""
    rig.step()
    rig.step()
    assert rig.scheduler.is_stopped
    assert rig.end("held").type == "length"
