"""Schedulers of several ranks: what rank 0 sees alone decides on all of them."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from rigs.caches.memory_ranks import EchoGroup, MemoryExchange
from rigs.models.grammar_rig import HandBackend, text_of
from rigs.models.letters import Letters
from rigs.schedulers.scheduler_rig import SchedulerRig, greedy, prompt
from sglang.srt.constrained.grammar import Grammar, GrammarTicket
from sglang.srt.distributed.rank_group import SingleRank
from sglang.srt.managers.scheduler.requests.stop_finder import StopFinder, StopRegexTooSlow
from sglang.srt.messages.io_struct import (
    AbortReq,
    BatchTokenIDOutput,
    ControlReqOutput,
    FinishReason,
    FlushCacheReqInput,
    SchedulerOutput,
    ShutdownReq,
    Tick,
    ToScheduler,
    decode_tick,
    encode,
)
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=1, suite="base-a-test-cpu")

_DEADLINE_S = 20.0


@pytest.fixture(scope="module", name="model")
def make_model(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model("qwen3", eos_token_id=None)


class Rank(SchedulerRig):
    """One of several that run the same model whole, as if they were its parts."""

    def take(self, payload: bytes) -> None:
        """One tick, as it comes from rank 0."""
        for output in self.scheduler.step(decode_tick(payload)):
            assert isinstance(output, BatchTokenIDOutput)
            for one in output.outputs:
                self._collect(one)


class Ranks:
    """Two schedulers, a thread each, stepped together. `backends`: of grammars, rank by rank."""

    def __init__(self, model: Path, backends: Sequence[HandBackend] = ()) -> None:
        exchange = MemoryExchange(2, _DEADLINE_S)
        self.exchange = exchange
        self.rigs = [
            Rank(
                model,
                group=exchange.group(rank, most_delay_s=0.001),
                tokenizer=Letters(),
                grammar_backend=partial(backends.__getitem__, rank) if backends else None,
            )
            for rank in range(2)
        ]
        self._pool = ThreadPoolExecutor(2)
        self._now = 1000.0

    def close(self) -> None:
        self._pool.shutdown()
        for rig in self.rigs:
            rig.close()

    def step(self, *messages: ToScheduler) -> None:
        self._now += 1.0
        payload = encode(self.rigs[0].scheduler.make_tick(self._now, messages))
        list(self._pool.map(lambda rig: rig.take(payload), self.rigs))
        digests = {rig.scheduler.state.queues.digest for rig in self.rigs}
        assert len(digests) == 1, "the ranks' queues differ"

    def run(self, *messages: ToScheduler) -> None:
        self.step(*messages)
        while not self.rigs[0].scheduler.is_idle():
            self.step()
        for rig in self.rigs:
            rig.assert_clean()

    def request(self, rid: str, params: SamplingParams) -> ToScheduler:
        return self.rigs[0].request(rid, prompt(1, 8), params)

    def outcome(self, rid: str) -> tuple[FinishReason, list[int]]:
        """The end of a request, which is the same on both ranks."""
        got = [rig.results[rid] for rig in self.rigs]
        assert got[0].output_ids == got[1].output_ids
        reason = got[0].finish_reason
        assert reason is not None and reason == got[1].finish_reason
        return reason, got[0].output_ids


@pytest.fixture(name="make_ranks")
def make_ranks_maker() -> Iterator[Callable[..., Ranks]]:
    made: list[Ranks] = []

    def make(*args: Any) -> Ranks:
        made.append(Ranks(*args))
        return made[-1]

    yield make
    for ranks in made:
        ranks.close()


def constrained(**params: Any) -> SamplingParams:
    made = SamplingParams(max_new_tokens=40, **params)
    made.normalize()
    return made


def test_a_tick_comes_through_as_it_was(model: Path) -> None:
    rig = SchedulerRig(model)
    request = rig.request("r", [1, 2, 3], constrained(regex="a"), extra_key="k")
    tick = Tick(7.5, [request, AbortReq(rid="x")], (), is_idle=True)
    came = decode_tick(encode(tick))
    assert (came.now, came.is_idle, len(came.messages)) == (7.5, True, 2)
    assert encode(came) == encode(tick)
    assert came.messages[0].input_ids.tolist() == [1, 2, 3]  # type: ignore[union-attr]
    assert len(encode(Tick(7.5))) < 32


def test_ranks_that_get_the_same_ticks_say_the_same(
    model: Path, make_ranks: Callable[..., Ranks]
) -> None:
    ranks = make_ranks(model)
    ranks.run(
        ranks.request("whole", greedy(12)),
        ranks.request("stops", greedy(12, stop_regex="[a-z]{5}")),
    )
    assert ranks.outcome("whole")[0].type == "length"
    assert len(ranks.outcome("stops")[1]) == 5


def test_a_grammar_is_ready_when_rank_0_has_it_and_other_ranks_wait_for_theirs(
    model: Path, make_ranks: Callable[..., Ranks]
) -> None:
    backends = HandBackend(hold=True), HandBackend(hold=True)
    ranks = make_ranks(model, backends)
    ranks.step(ranks.request("r", constrained(regex="[0-9]{4}")))
    backends[1].release()
    for _ in range(3):
        ranks.step()
    assert not any(rig.results for rig in ranks.rigs), "rank 1 alone has it"
    backends[0].release()
    ranks.run()
    reason, ids = ranks.outcome("r")
    assert reason.type == "stop" and re.fullmatch("[0-9]{4}", text_of(ids))


@pytest.mark.parametrize("fails", [False, True], ids=["late", "fails"])
def test_a_compilation_that_is_late_on_another_rank_or_fails_there_ends_no_request(
    model: Path,
    make_ranks: Callable[..., Ranks],
    monkeypatch: pytest.MonkeyPatch,
    fails: bool,
) -> None:
    backends = HandBackend(), HandBackend(hold=True)
    ranks = make_ranks(model, backends)
    result = GrammarTicket.result

    def end_and_get(ticket: GrammarTicket, timeout: float | None = None) -> Grammar:
        if ticket in backends[1].held:  # Rank 1's thread: rank 0 waits for a ticket of its own.
            if fails:
                backends[1].held.remove(ticket)
                ticket.fail("regex: took too long")
            backends[1].release()
        return result(ticket, timeout)

    monkeypatch.setattr(GrammarTicket, "result", end_and_get)
    ranks.run(ranks.request("r", constrained(regex="ab")))
    assert text_of(ranks.outcome("r")[1]) == "ab"


def test_a_grammar_that_fails_on_rank_0_ends_its_request_everywhere(
    model: Path, make_ranks: Callable[..., Ranks]
) -> None:
    backends = HandBackend(hold=True), HandBackend()
    ranks = make_ranks(model, backends)
    ranks.step(ranks.request("r", constrained(regex="ab")))
    backends[0].held[0].fail("regex: took too long")
    backends[0].held = []
    ranks.run()
    reason, ids = ranks.outcome("r")
    assert (reason.message, ids) == ("regex: took too long", [])


@pytest.mark.parametrize("slow_rank", [0, 1])
def test_whether_a_pattern_takes_too_long_is_what_rank_0_measures(
    model: Path, make_ranks: Callable[..., Ranks], monkeypatch: pytest.MonkeyPatch, slow_rank: int
) -> None:
    ranks = make_ranks(model)
    advance = StopFinder.advance
    slow_thread: list[int] = []

    def measured(finder: StopFinder, *args: Any, **counts: Any) -> Any:
        if threading.get_ident() in slow_thread:
            raise StopRegexTooSlow
        return advance(finder, *args, **counts)

    step = ranks.rigs[slow_rank].scheduler.step

    def slowly(tick: Tick) -> list[SchedulerOutput]:
        slow_thread[:] = [threading.get_ident()]
        try:
            return step(tick)
        finally:
            slow_thread.clear()

    monkeypatch.setattr(StopFinder, "advance", measured)
    monkeypatch.setattr(ranks.rigs[slow_rank].scheduler, "step", slowly)
    ranks.run(ranks.request("r", greedy(6, stop_regex="0")))
    reason, ids = ranks.outcome("r")
    assert (reason.type, len(ids)) == (("abort", 1) if slow_rank == 0 else ("length", 6))


class SmallerRank(EchoGroup):
    """Its other rank has room for 96 tokens and 3 requests."""

    def reduce_min(self, values: torch.Tensor) -> torch.Tensor:
        return torch.minimum(values, torch.tensor([96, 3]))


def test_l1_is_as_large_as_the_rank_with_the_least_memory_can_have_it(model: Path) -> None:
    groups = (SingleRank(), SmallerRank())
    limits = [
        SchedulerRig(
            model, pool_tokens=None, group=group, max_total_tokens=256, max_running_requests=8
        ).scheduler.state.limits
        for group in groups
    ]
    assert [one.pool_tokens for one in limits] == [256, 96]
    assert [one.max_running_requests for one in limits] == [8, 3]


# ---- the loops -----------------------------------------------------------------------------------


class Script:
    """A channel: each entry is what one `receive` gives, then a shutdown."""

    def __init__(self, *turns: list[ToScheduler]) -> None:
        self._turns: list[list[ToScheduler]] = [*turns, [ShutdownReq(timeout=5.0)]]
        self.ended: list[str] = []
        self.answers: list[str] = []

    def receive(self, timeout_ms: int) -> list[ToScheduler]:
        if timeout_ms < 1000 or not self._turns:
            return []
        return self._turns.pop(0)

    def send(self, output: SchedulerOutput) -> None:
        if isinstance(output, ControlReqOutput):
            self.answers.append(output.req_id)
            return
        assert isinstance(output, BatchTokenIDOutput)
        self.ended += [one.rid for one in output.outputs if one.finish_reason is not None]


def run_loops(ranks: Ranks, channel: Script) -> None:
    """`run` on rank 0 and `run_beside` on rank 1, to the end of both."""
    with ThreadPoolExecutor(2) as pool:
        loops = [
            pool.submit(ranks.rigs[0].scheduler.run, channel),
            pool.submit(ranks.rigs[1].scheduler.run_beside),
        ]
        for loop in loops:
            loop.result(_DEADLINE_S)


def test_the_loops_of_all_ranks_end_with_the_shutdown_and_rank_0_alone_speaks(
    model: Path, make_ranks: Callable[..., Ranks]
) -> None:
    ranks = make_ranks(model)
    flush = FlushCacheReqInput(req_id="flush", timeout=5.0)
    channel = Script([ranks.request("a", greedy(3)), flush], [ranks.request("b", greedy(3))])
    run_loops(ranks, channel)
    assert (channel.ended, channel.answers) == (["a", "b"], ["flush"])
    ticks = [rig.scheduler.state.counters.ticks for rig in ranks.rigs]
    assert ticks[0] == ticks[1]


def test_nothing_is_broadcast_while_all_is_idle(
    model: Path, make_ranks: Callable[..., Ranks]
) -> None:
    calls = []
    for idle_turns in (1, 50):
        ranks = make_ranks(model)
        run_loops(ranks, Script([ranks.request("a", greedy(3))], *[[]] * idle_turns))
        calls.append(ranks.exchange.num_calls)
        for rig in ranks.rigs:
            assert rig.scheduler._is_verified, "the one idle tick is for checking page ownership"
    assert calls[0] == calls[1]
