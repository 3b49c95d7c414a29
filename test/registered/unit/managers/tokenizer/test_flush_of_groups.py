"""A flush with several DP groups empties all at one time, or none."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from unittest import mock

from rigs.servers.fake_engine import FakeEngine, FakeScheduler, with_groups
from sglang.srt.managers.tokenizer.generate_request import GenerateRequest
from sglang.srt.managers.tokenizer.request_state import RequestState
from sglang.srt.managers.tokenizer.tokenizer_manager import TokenizerManager
from sglang.srt.messages.io_struct import (
    ControlReqOutput,
    FlushCacheReqInput,
    ShutdownReq,
    TokenizedGenerateReqInput,
)
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=1, suite="base-a-test-cpu")


def request(dp_rank: int) -> GenerateRequest:
    return GenerateRequest(
        text="ab", sampling_params=SamplingParams(max_new_tokens=4), dp_rank=dp_rank
    )


def kinds(scheduler: FakeScheduler) -> list[str]:
    """What a group got: requests, questions and flushes."""
    found = []
    for one in scheduler.received:
        if isinstance(one, TokenizedGenerateReqInput):
            found.append("request")
        elif isinstance(one, FlushCacheReqInput):
            found.append("question" if one.only_asks else "flush")
    return found


def test_no_group_is_emptied_while_one_is_busy() -> None:
    async def work(engine: FakeEngine, manager: TokenizerManager) -> None:
        busy = engine.schedulers[1]
        busy.hold.set()
        running = asyncio.create_task(manager.generate_whole(request(1)))
        while not busy.running:
            await asyncio.sleep(0.001)
        answer = await manager.flush_cache(0.0)
        assert not answer.success
        assert answer.message == "dp_rank 1: busy: running 1; try again when idle"
        busy.hold.clear()
        await running
        assert (await manager.flush_cache(0.0)).success
        assert [kinds(one).count("flush") for one in engine.schedulers] == [1, 1]

    with_groups(work)


def test_a_request_that_comes_after_the_first_question_is_not_missed() -> None:
    async def work(engine: FakeEngine, manager: TokenizerManager) -> None:
        engine.schedulers[1].hold.set()
        running: list[asyncio.Task[RequestState]] = []

        async def ask() -> None:
            if not running:
                running.append(asyncio.create_task(manager.generate_whole(request(1))))
                await asyncio.sleep(0)

        with after_questions(manager, ask):
            answer = await manager.flush_cache(0.0)
        assert not answer.success
        assert "dp_rank 1: busy" in answer.message
        assert "flush" not in [*kinds(engine.schedulers[0]), *kinds(engine.schedulers[1])]
        engine.schedulers[1].hold.clear()
        await running[0]

    with_groups(work)


def test_a_request_that_comes_after_the_last_question_waits_for_the_flush() -> None:
    async def work(engine: FakeEngine, manager: TokenizerManager) -> None:
        running: list[asyncio.Task[RequestState]] = []
        questions = 0

        async def ask() -> None:
            nonlocal questions
            questions += 1
            if questions == 2:
                running.append(asyncio.create_task(manager.generate_whole(request(1))))
                await asyncio.sleep(0)
                assert manager.num_requests == 1

        with after_questions(manager, ask):
            assert (await manager.flush_cache(0.0)).success
        assert (await running[0]).text == "abab"
        assert kinds(engine.schedulers[1]) == ["question", "question", "flush", "request"]

    with_groups(work)


def test_a_flush_with_time_left_asks_again() -> None:
    async def work(engine: FakeEngine, manager: TokenizerManager) -> None:
        engine.schedulers[1].hold.set()
        running: list[asyncio.Task[RequestState]] = []
        questions = 0

        async def ask() -> None:
            nonlocal questions
            questions += 1
            if questions == 1:
                running.append(asyncio.create_task(manager.generate_whole(request(1))))
                await asyncio.sleep(0)
            elif questions == 2:
                engine.schedulers[1].hold.clear()
                await running[0]

        with after_questions(manager, ask):
            assert (await manager.flush_cache(60.0)).success
        assert questions == 4
        assert [kinds(one).count("flush") for one in engine.schedulers] == [1, 1]

    with_groups(work)


def test_two_flushes_at_once_take_turns() -> None:
    async def work(engine: FakeEngine, manager: TokenizerManager) -> None:
        answers = await asyncio.gather(manager.flush_cache(0.0), manager.flush_cache(0.0))
        assert all(answer.success for answer in answers)

    with_groups(work)


def test_a_shutdown_is_not_held_back() -> None:
    async def work(engine: FakeEngine, manager: TokenizerManager) -> None:
        with manager._channel.requests_held():
            manager._channel.send(ShutdownReq(timeout=0.0))
            assert all(manager._channel._outboxes)

    with_groups(work)


def after_questions(
    manager: TokenizerManager, then: Callable[[], Awaitable[None]]
) -> mock._patch[object]:
    """`then` runs after each time that all groups were asked."""
    asked = manager._all_idle

    async def patched(timeout: float) -> ControlReqOutput:
        answer = await asked(timeout)
        await then()
        return answer

    return mock.patch.object(manager, "_all_idle", patched)
