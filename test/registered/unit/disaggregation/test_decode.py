"""The decode role: requests that wait for slots, then for their prompts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rigs.disaggregation.decode_rig import WAIT_S, DecodeRig, FakeReceiver
from rigs.models.grammar_rig import EOS_ID, HandBackend
from rigs.schedulers.scheduler_rig import SchedulerRig, greedy, prompt
from sglang.srt.messages.first_token import sampling_digest
from sglang.srt.messages.io_struct import (
    CachedTokensDetails,
    FinishReason,
    ShutdownReq,
)
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=5, suite="base-a-test-cpu")


@pytest.fixture(params=[False, True], ids=["settled", "overlap"])
def rig(model: Path, request: pytest.FixtureRequest) -> Iterator[DecodeRig]:
    rig = DecodeRig(model, overlap=request.param)
    yield rig
    rig.close()


IDS = prompt(1, 10)


# ---- the way of a request ----------------------------------------------------------------------


def test_a_request_gets_slots_then_its_prompt_then_decodes(rig: DecodeRig) -> None:
    rig.step(rig.ask("a", IDS, 5, greedy(6)))
    (coming,) = rig.servers.begun
    assert (coming.bootstrap_room, len(coming.pages), coming.first_page) == (5, 3, 0)
    rig.check()
    for _ in range(3):
        rig.step()
    assert "a" not in rig.results
    coming.come(IDS, cached=CachedTokensDetails(device=7))
    rig.run()
    got = rig.results["a"]
    assert got.output_ids[0] == 11 and len(got.output_ids) == 6
    assert got.last is not None and got.last.cached_tokens_details.device == 7, "prefill's"
    assert rig.scheduler.state.counters.prefill_tokens == 0
    rig.assert_idle()


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 32])
def test_only_what_is_not_cached_is_asked_for(model: Path, length: int, page_size: int) -> None:
    rig = DecodeRig(model, page_size=page_size)
    ids = prompt(length, length)
    rig.run(rig.request("plain", ids, greedy(1)))
    rig.step(rig.ask("a", ids, 1, greedy(4)))
    cached = length // page_size
    (coming,) = rig.servers.begun
    assert (coming.first_page, len(coming.pages)) == (cached, -(-length // page_size) - cached)
    coming.come(ids)
    rig.run()
    assert len(rig.results["a"].output_ids) == 4
    # The cache now holds the prompt and its answer.
    rig.step(rig.ask("again", [*ids, *rig.results["a"].output_ids], 2, greedy(2)))
    assert rig.servers.begun[1].first_page == (length + 3) // page_size
    rig.servers.begun[1].come([*ids, *rig.results["a"].output_ids])
    rig.run()
    rig.assert_idle()


@pytest.mark.parametrize(("wanted", "token"), [(0, None), (1, 11)])
def test_what_prefill_has_completed_ends_at_once(
    rig: DecodeRig, wanted: int, token: int | None
) -> None:
    rig.step(rig.ask("a", IDS, 1, greedy(wanted)))
    rig.prompt(1).come(IDS, token_id=token)
    rig.step()
    assert rig.end("a") == FinishReason(type="length", length=wanted)
    assert rig.scheduler.state.counters.decode_steps == 0
    rig.assert_idle()


def test_logprobs_of_the_first_token_come_with_it(rig: DecodeRig) -> None:
    rig.step(rig.ask("a", IDS, 1, greedy(2), return_logprob=True, top_logprobs_num=1))
    rig.prompt(1).come(IDS, logprob=-0.25, top_logprobs=[(-0.25, 11)])
    rig.run()
    got = rig.results["a"]
    assert (got.logprobs[0], len(got.logprobs)) == (-0.25, 2)
    assert got.last is not None and got.last.output_top_logprobs is not None
    assert got.last.output_top_logprobs[0] == [(-0.25, 11)]


def test_plain_requests_are_computed_here(rig: DecodeRig, model: Path) -> None:
    rig.step(rig.ask("remote", IDS, 1))
    rig.run_until_ended(rig.request("plain", prompt(2, 20)))
    (alone,) = SchedulerRig(model).generate([prompt(2, 20)])
    assert rig.results["plain"].output_ids == alone
    rig.prompt(1).come(IDS)
    rig.run()


def test_a_constraint_is_compiled_before_a_prompt_is_asked_for(model: Path) -> None:
    backend = HandBackend(hold=True)
    rig = DecodeRig(model, grammar_backend=lambda: backend)
    params = SamplingParams(regex="[0-9]{3}", max_new_tokens=20, temperature=0.0)
    params.normalize()
    rig.step(rig.ask("a", IDS, 1, params))
    rig.step(rig.ask("free", IDS, 2))
    assert [one.bootstrap_room for one in rig.servers.begun] == [2], "nobody waits for it"
    backend.release()
    rig.step()
    rig.prompt(1).come(IDS, token_id=1, sampling_digest=sampling_digest(params))
    rig.prompt(2).come(IDS)
    rig.run()
    assert all(1 <= token <= 10 for token in rig.results["a"].output_ids[:3])
    assert rig.results["a"].output_ids[3:] == [EOS_ID]
    backend.hold = False
    # A first token that the constraint does not allow.
    rig.step(rig.ask("b", IDS, 3, params))
    rig.prompt(3).come(IDS, token_id=60, sampling_digest=sampling_digest(params))
    rig.run()
    assert rig.end("b").type == "abort"
    rig.assert_idle()


# ---- prompts that do not come ------------------------------------------------------------------


def test_a_failure_is_reported_before_the_pages_are_free(rig: DecodeRig) -> None:
    rig.step(rig.ask("a", IDS, 1))
    rig.prompt(1).failure = "prefill is gone"
    rig.step()
    assert rig.end("a") == FinishReason(type="abort", message="prefill is gone", status_code=503)
    state = rig.scheduler.state
    assert (state.queues.num_holders, state.free_tokens()) == (1, 128 - 12)
    assert not rig.scheduler.is_idle(), "nothing may be flushed"
    rig.check()
    rig.prompt(1).is_settled = True
    rig.step()
    rig.assert_idle()


def test_a_failure_after_the_reads(rig: DecodeRig) -> None:
    rig.step(rig.ask("a", IDS, 1))
    rig.prompt(1).failure, rig.prompt(1).is_settled = "aborted there", True
    rig.step()
    assert rig.end("a").message == "aborted there"
    rig.assert_idle()


def test_a_prompt_that_fails_between_two_looks_at_it(rig: DecodeRig) -> None:
    """Its threads may fail it at any moment, also within a tick."""

    class Racing(FakeReceiver):
        """Fails as soon as anything of it has been read."""

        def __getattribute__(self, name: str) -> Any:
            value = super().__getattribute__(name)
            if name in ("failure", "metadata", "has_ended"):
                self.__dict__ |= {"failure": "gone just now", "is_settled": True}
            return value

    rig.step(rig.ask("a", IDS, 1))
    rig.prompt(1).__class__ = Racing
    rig.run_until(lambda: "a" in rig.results)
    assert rig.end("a") == FinishReason(type="abort", message="gone just now", status_code=503)
    rig.assert_idle()


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"prompt_len": 9}, "computed another prompt, of 9 tokens"),
        ({"prompt_digest": "other"}, "computed another prompt, of 10 tokens"),
        ({"hidden": b"1234"}, "a hidden state of 4 bytes, not of 0: both servers need the same"),
        ({"token_id": None}, "was sent another request"),
        ({"logprob": None}, "was sent another request"),
        ({"top_logprobs": [(-1.0, 11)]}, "was sent another request"),
        ({"sampling_digest": "other"}, "different --sampling-defaults or generation_config.json"),
        ({"token_id": -1}, "chose token -1"),
        ({"token_id": 160}, "chose token 160, which the model does not have"),
    ],
)
def test_a_first_token_that_does_not_fit_is_not_used(
    rig: DecodeRig, fields: dict[str, Any], named: str
) -> None:
    rig.step(rig.ask("a", IDS, 1, return_logprob=True))
    rig.prompt(1).come(IDS, **{"logprob": -1.0, **fields})
    rig.step()
    assert named in (rig.end("a").message or "")
    assert rig.results["a"].output_ids == []
    rig.assert_idle()


def test_a_token_for_a_request_that_wants_none_is_not_used(rig: DecodeRig) -> None:
    rig.step(rig.ask("a", IDS, 1, greedy(0)))
    rig.prompt(1).come(IDS)
    rig.step()
    assert "was sent another request" in (rig.end("a").message or "")
    rig.assert_idle()


# ---- aborts, in every state --------------------------------------------------------------------


def test_an_abort_before_there_are_slots_declines_the_room(rig: DecodeRig) -> None:
    rig.step(rig.request("fills", prompt(7, 110), greedy(10)))
    rig.step(rig.ask("a", IDS, 1))
    assert rig.servers.begun == []
    rig.step(rig.abort("a"))
    assert rig.end("a").status_code == 499
    ((room, why),) = rig.servers.declined
    assert room == 1 and why
    rig.run()
    rig.assert_idle()


def test_an_abort_while_pages_are_read_is_sent_at_once(rig: DecodeRig) -> None:
    rig.step(rig.ask("a", IDS, 1))
    first = rig.prompt(1)
    rig.step(rig.abort("a"))
    assert rig.end("a").status_code == 499
    assert first.is_cancelled
    assert rig.servers.declined == [], "the prompt's thread tells it"
    # The id and the room are free, the slots are not.
    rig.results.clear()
    rig.step(rig.ask("a", prompt(2, 10), 1))
    second = rig.servers.begun[1]
    assert not set(first.pages) & set(second.pages)
    first.is_settled = True
    rig.step()
    rig.check()
    assert rig.scheduler.state.queues.num_holders == 1
    second.come(prompt(2, 10))
    rig.run()
    assert len(rig.results["a"].output_ids) == 8
    rig.assert_idle()


def test_an_abort_wins_over_the_prompt_of_its_tick(rig: DecodeRig) -> None:
    for rid in "ab":
        rig.step(rig.ask(rid, IDS, ord(rid)))
    rig.prompt(ord("a")).come(IDS)
    rig.prompt(ord("b")).failure = "gone"
    rig.step(rig.abort("a"), rig.abort("b"))
    assert [rig.end(rid).status_code for rid in "ab"] == [499, 499]
    rig.prompt(ord("b")).is_settled = True
    rig.step()
    rig.assert_idle()


def test_an_abort_while_it_decodes(rig: DecodeRig) -> None:
    rig.step(rig.ask("a", IDS, 1, greedy(50)))
    rig.prompt(1).come(IDS)
    for _ in range(4):
        rig.step()
    rig.run(rig.abort("a"))
    assert rig.end("a").status_code == 499
    assert not rig.prompt(1).is_cancelled
    rig.assert_idle()


# ---- refusals and duplicates -------------------------------------------------------------------


def test_a_room_in_use_is_refused_and_its_owner_unharmed(rig: DecodeRig) -> None:
    rig.step(rig.ask("a", IDS, 1))
    rig.step(rig.ask("b", IDS, 1))
    assert rig.end("b").status_code == 400
    assert "bootstrap_room 1 belongs to another request" in (rig.end("b").message or "")
    assert rig.servers.declined == [], "that would end the other"
    # Refused for another reason, with a room that is not its own.
    rig.step(rig.ask("c", [], 1))
    assert rig.servers.declined == []
    rig.prompt(1).come(IDS)
    rig.run()
    assert len(rig.results["a"].output_ids) == 8


def test_a_refused_request_is_declined(model: Path) -> None:
    rig = DecodeRig(model, max_queued_requests=1, grammar_backend=HandBackend)
    bad = SamplingParams(regex="(", max_new_tokens=2)
    bad.normalize()
    rig.step(rig.ask("long", prompt(3, 500), 1))
    rig.step(rig.request("fills", prompt(7, 110), greedy(10)))
    rig.step(rig.ask("waits", IDS, 2), rig.ask("full", IDS, 3))
    assert [room for room, _ in rig.servers.declined] == [1, 3]
    assert "the request queue is full" in rig.servers.declined[1][1]
    rig.run_until_ended()
    rig.step()
    rig.prompt(2).come(IDS)
    rig.run()
    no_backend = DecodeRig(model)
    no_backend.step(no_backend.ask("no backend", IDS, 4, bad))
    assert [room for room, _ in no_backend.servers.declined] == [4]
    no_backend.step(no_backend.ask("same room", IDS, 4))
    assert no_backend.prompt(4).pages, "it was given back"


# ---- slots -------------------------------------------------------------------------------------


def test_requests_wait_for_slots_in_order(model: Path) -> None:
    rig = DecodeRig(model, pool_tokens=32, schedule_conservativeness=0.01)
    ids = [prompt(i, 20) for i in range(3)]
    rig.step(*(rig.ask(f"r{i}", ids[i], i, greedy(4)) for i in range(3)))
    for turn in range(3):
        rig.step()
        assert [one.bootstrap_room for one in rig.servers.begun] == list(range(turn + 1))
        assert len(rig.scheduler.state.queues.waiting) == 2 - turn
        rig.prompt(turn).come(ids[turn])
        while f"r{turn}" not in rig.results:
            rig.step()
        rig.step()
    rig.run()
    rig.assert_idle()


def test_slots_that_never_come_free_end_the_wait(model: Path) -> None:
    rig = DecodeRig(model, pool_tokens=32)
    rig.step(rig.ask("holds", prompt(1, 20), 1))
    rig.step(rig.ask("waits", prompt(2, 20), 2))
    rig.now += WAIT_S
    rig.step()
    assert rig.end("waits").message == "no slots were free for the request within 100 s"
    assert rig.servers.declined == [(2, "no slots were free for the request within 100 s")]
    rig.prompt(1).come(prompt(1, 20))
    rig.run()
    rig.assert_idle()


def test_a_prompt_that_is_longer_than_a_batch_gets_slots_at_once(model: Path) -> None:
    rig = DecodeRig(model, pool_tokens=320, chunked_prefill_size=16, max_prefill_tokens=32)
    rig.step(rig.ask("a", prompt(1, 100), 1), rig.ask("b", prompt(2, 100), 2))
    assert [len(one.pages) for one in rig.servers.begun] == [25, 25]
    for room in (1, 2):
        rig.prompt(room).come(prompt(room, 100))
    rig.run()


def test_rows_are_slots_too(model: Path) -> None:
    rig = DecodeRig(model, max_requests=2)
    rig.step(*(rig.ask(f"r{i}", prompt(i, 5), i, host=f"host{i}") for i in range(3)))
    assert len(rig.servers.begun) == 2
    rig.step(rig.abort("r0"))
    assert len(rig.servers.begun) == 2, "a row that something may write for is not free"
    rig.servers.begun[0].is_settled = True
    rig.run_until(lambda: len(rig.servers.begun) == 3)
    for room in (1, 2):
        rig.prompt(room).come(prompt(room, 5))
    rig.run()
    rig.assert_idle()


def test_retracted_requests_go_before_new_ones(model: Path) -> None:
    """Else a stream of new ones would keep them waiting for ever."""
    rig = DecodeRig(model, pool_tokens=48, schedule_conservativeness=0.01)
    ids = [prompt(i, 12) for i in range(4)]
    rig.step(*(rig.ask(f"r{i}", ids[i], i, greedy(20), host=f"host{i}") for i in range(3)))
    for room in range(3):
        rig.prompt(room).come(ids[room])
    while not rig.scheduler.state.counters.retractions:
        rig.step()
    rig.step(rig.ask("new", ids[3], 3, greedy(4)))
    while waiting := {req.rid for req in rig.scheduler.state.queues.waiting} - {"new"}:
        assert len(rig.servers.begun) == 3, f"{waiting} wait, and a new request got slots"
        rig.step()
    rig.run_until(lambda: len(rig.servers.begun) == 4)
    rig.prompt(3).come(ids[3])
    rig.run()
    assert [len(rig.results[f"r{i}"].output_ids) for i in range(3)] == [20] * 3
    rig.assert_idle()


# ---- the end -----------------------------------------------------------------------------------


def test_a_shutdown_tells_everybody_and_waits_for_no_read(rig: DecodeRig) -> None:
    rig.step(rig.request("fills", prompt(7, 90), greedy(20)))
    rig.step(rig.ask("coming", IDS, 1))
    rig.step(rig.ask("wanted", prompt(2, 60), 2))
    assert len(rig.servers.begun) == 1
    rig.step(ShutdownReq(timeout=0.0))
    rig.step()
    assert rig.scheduler.is_stopped
    found = [rig.end(rid).message for rid in ("fills", "coming", "wanted")]
    assert found == ["the server is shutting down"] * 3
    assert rig.prompt(1).is_cancelled
    assert rig.servers.declined == [(2, "the server is shutting down")]
    rig.close()
    assert rig.servers.is_closed


def test_a_shutdown_waits_for_prompts_that_come_in_time(rig: DecodeRig) -> None:
    rig.step(rig.ask("coming", IDS, 1))
    rig.step(ShutdownReq(timeout=1000.0))
    rig.step(rig.ask("late", IDS, 2))
    assert rig.servers.declined == [(2, "the server is shutting down")]
    rig.prompt(1).come(IDS)
    while not rig.scheduler.is_stopped:
        rig.step()
    assert len(rig.results["coming"].output_ids) == 8


def test_closing_cancels_what_is_coming(rig: DecodeRig) -> None:
    rig.step(rig.ask("coming", IDS, 1))
    rig.step(rig.ask("lingers", prompt(2, 5), 2))
    rig.step(rig.abort("lingers"))
    rig.prompt(2).is_cancelled = False
    rig.close()
    assert [rig.prompt(room).is_cancelled for room in (1, 2)] == [True, True]


@pytest.mark.parametrize("waited", [None, 0.25])
def test_the_prefill_servers_wait_for_l3_is_part_of_the_times(
    rig: DecodeRig, waited: float | None
) -> None:
    rig.step(rig.ask("a", IDS, 1))
    rig.prompt(1).come(IDS, queue_seconds=0.5, l3_wait_seconds=waited)
    rig.run()
    last = rig.results["a"].last
    assert last is not None and last.stages is not None
    assert last.stages.l3_wait == waited
    assert last.stages.queue is not None and last.stages.queue >= 0.5
