"""Changes of L3 with several DP groups: all groups make a change, or none does."""

from __future__ import annotations

import asyncio

from rigs.servers.fake_engine import FakeEngine, FakeScheduler, with_groups
from sglang.srt.managers.tokenizer.generate_request import GenerateRequest
from sglang.srt.managers.tokenizer.tokenizer_manager import TokenizerManager
from sglang.srt.messages.io_struct import (
    AttachHiCacheStorageReqInput,
    ClearHiCacheReqInput,
    ControlReq,
    DetachHiCacheStorageReqInput,
    SettleHiCacheStorageReqInput,
    TokenizedGenerateReqInput,
)
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=1, suite="base-a-test-cpu")

CHANGES: tuple[ControlReq, ...] = (
    AttachHiCacheStorageReqInput(hicache_storage_backend="file"),
    DetachHiCacheStorageReqInput(),
    ClearHiCacheReqInput(),
)


def got(scheduler: FakeScheduler) -> list[str]:
    """Demands that a group got, in short."""
    found = []
    for one in scheduler.received:
        if isinstance(one, TokenizedGenerateReqInput):
            found.append("request")
        elif isinstance(one, SettleHiCacheStorageReqInput):
            found.append(f"keeps={one.keeps}")
        elif isinstance(one, AttachHiCacheStorageReqInput):
            found.append("prepare" if one.only_prepares else "attach")
        elif isinstance(one, DetachHiCacheStorageReqInput | ClearHiCacheReqInput):
            found.append("change")
    return found


def request() -> GenerateRequest:
    return GenerateRequest(text="ab", sampling_params=SamplingParams(max_new_tokens=4), dp_rank=1)


def test_no_group_changes_while_one_is_busy() -> None:
    async def work(engine: FakeEngine, manager: TokenizerManager) -> None:
        idle, busy = engine.schedulers
        busy.hold.set()
        running = asyncio.create_task(manager.generate_whole(request()))
        while not busy.running:
            await asyncio.sleep(0.001)
        for change in CHANGES:
            answer = await manager.change_storage(change)
            assert not answer.success
            assert answer.message == "dp_rank 1: busy: running 1; try again when idle"
        assert got(idle) == []
        busy.hold.clear()
        await running

    with_groups(work)


def test_all_groups_take_up_what_all_have_prepared() -> None:
    async def work(engine: FakeEngine, manager: TokenizerManager) -> None:
        for change in CHANGES:
            assert (await manager.change_storage(change)).success
        for one in engine.schedulers:
            assert got(one) == ["prepare", "keeps=True", "change", "change"]

    with_groups(work)


def test_what_one_group_refuses_is_undone_in_all() -> None:
    async def work(engine: FakeEngine, manager: TokenizerManager) -> None:
        engine.schedulers[1].refused[AttachHiCacheStorageReqInput] = "nobody there"
        answer = await manager.change_storage(CHANGES[0])
        assert not answer.success
        assert answer.message == "dp_rank 1: nobody there"
        await manager.control.ask(DetachHiCacheStorageReqInput())
        for one in engine.schedulers:
            assert got(one) == ["prepare", "keeps=False", "change"]

    with_groups(work)


def test_an_operator_who_leaves_leaves_nothing_prepared() -> None:
    async def work(engine: FakeEngine, manager: TokenizerManager) -> None:
        slow = engine.schedulers[1]
        slow.silent_about = AttachHiCacheStorageReqInput
        change = asyncio.create_task(manager.change_storage(CHANGES[0]))
        while not got(slow):
            await asyncio.sleep(0.001)
        change.cancel()
        await asyncio.gather(change, return_exceptions=True)
        await manager.control.ask(DetachHiCacheStorageReqInput())
        for one in engine.schedulers:
            assert got(one) == ["prepare", "keeps=False", "change"]

    with_groups(work)


def test_requests_follow_the_change_and_do_not_wait_for_its_end() -> None:
    async def work(engine: FakeEngine, manager: TokenizerManager) -> None:
        slow = engine.schedulers[1]
        slow.silent_about = AttachHiCacheStorageReqInput
        change = asyncio.create_task(manager.change_storage(CHANGES[0]))
        while not manager._channel._held:
            await asyncio.sleep(0)
        assert (await manager.generate_whole(request())).text == "abab"
        assert got(slow) == ["prepare", "request"]
        change.cancel()

    with_groups(work)


def test_one_group_makes_the_change_itself() -> None:
    async def work(engine: FakeEngine, manager: TokenizerManager) -> None:
        attach = AttachHiCacheStorageReqInput(hicache_storage_backend="file")
        assert (await manager.change_storage(attach)).success
        assert got(engine.scheduler) == ["attach"]

    with_groups(work, num_groups=1)
