"""`TokenizerManager` before several schedulers: random requests, of which some are given up."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from array import array
from collections import defaultdict
from typing import Any

import pytest
import zmq

from rigs.servers.fake_engine import PAGE_SIZE, fake_engine
from sglang.srt.managers.tokenizer.generate_request import (
    GenerateRequest,
    InvalidRequest,
    expand_samples,
)
from sglang.srt.managers.tokenizer.prompt_encoder import SHORT_CHARS
from sglang.srt.managers.tokenizer.request_state import RequestState
from sglang.srt.managers.tokenizer.tokenizer_manager import TokenizerManager
from sglang.srt.mem_cache.tree.radix_key import RadixKey, hash_str_to_int64, token_array
from sglang.srt.messages.io_struct import (
    AbortReq,
    Bootstrap,
    DeclineRoomReq,
    HeldPagesReport,
    ShutdownReq,
    TokenizedGenerateReqInput,
    encode,
)
from sglang.srt.messages.ipc import push_socket
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=5, suite="base-a-test-cpu")

GROUPS = 3


async def body(manager: TokenizerManager, rng: random.Random, name: str) -> None:
    """Send a body of random prompts; end it by reading all, by an abort, or by leaving."""
    fields: dict[str, Any] = {}
    if rng.random() < 0.3:
        fields["dp_rank"] = rng.randrange(GROUPS)
    if rng.random() < 0.3:
        fields["session_id"] = f"session {rng.randrange(4)}"
    params = SamplingParams(max_new_tokens=rng.randrange(1, 40), n=rng.choice((1, 1, 1, 3)))
    # Long texts are tokenized by another thread, and refused there: they do not fit.
    text = "ab" * rng.choice((1, 20, 60, 60, SHORT_CHARS))
    requests = expand_samples(
        [
            GenerateRequest(
                rid=f"{name}-{number}", text=text, sampling_params=params, stream=True, **fields
            )
            for number in range(rng.randrange(1, 4))
        ]
    )
    way = rng.choice(("read", "read", "abort", "leave", "leave at once"))
    with manager.submit(requests) as states:
        if "dp_rank" in fields:
            sent = {state.dp_rank for state in states if state.is_sent}
            assert sent <= {fields["dp_rank"]}
        if way == "leave at once":
            return
        await asyncio.sleep(rng.random() * 0.01)
        if way == "abort":
            await manager.abort(requests[0].rid)
        if way != "leave":
            await asyncio.gather(*map(end_of, states))


async def end_of(state: RequestState) -> None:
    try:
        await state.wait_for_end()
    except ValueError as error:
        assert "tokens" in str(error)  # noqa: PT017 - long texts alone may fail


@pytest.mark.parametrize("method", ["auto", "round_robin", "total_requests", "total_tokens"])
@pytest.mark.parametrize("seed", range(3))
def test_each_request_is_in_one_group_and_no_load_is_left(method: str, seed: int) -> None:
    rng = random.Random(seed)

    async def run() -> None:
        with fake_engine(num_groups=GROUPS) as engine:
            manager = engine.manager(load_balance_method=method)
            await manager.start()
            for turn in range(6):
                await asyncio.gather(
                    *(body(manager, rng, f"{turn}-{number}") for number in range(12))
                )
            while manager._leaving:
                await asyncio.sleep(0.001)
            assert not manager.num_requests
            loads = [
                (load.requests, load.tokens, load.uncomputed) for load in manager._groups._loads
            ]
            assert loads == [(0, 0, 0)] * GROUPS
            await manager.abort_all()
            await manager.shut_down_scheduler(1.0)
            await manager.close()
            while not all(
                any(isinstance(one, ShutdownReq) for one in scheduler.received)
                for scheduler in engine.schedulers
            ):
                await asyncio.sleep(0.001)
            where: dict[str, set[int]] = defaultdict(set)
            for scheduler in engine.schedulers:
                assert AbortReq(abort_all=True) in scheduler.received
                for message in scheduler.received:
                    if isinstance(message, TokenizedGenerateReqInput):
                        where[message.sample_of or message.rid].add(scheduler.dp_rank)
            assert all(len(groups) == 1 for groups in where.values())
            assert set().union(*where.values()) == set(range(GROUPS)), "all groups had some"

    asyncio.run(asyncio.wait_for(run(), 60))


def test_the_requests_of_a_body_go_where_they_were_placed() -> None:
    async def run() -> None:
        with fake_engine(num_groups=GROUPS) as engine:
            manager = engine.manager(load_balance_method="round_robin")
            await manager.start()
            params = SamplingParams(max_new_tokens=1)
            requests = [
                GenerateRequest(rid=f"{number}", text="ab", sampling_params=params)
                for number in range(GROUPS)
            ]
            with manager.submit(requests) as states:
                await asyncio.gather(*map(end_of, states))
            await manager.close()
            for scheduler in engine.schedulers:
                got = [
                    message.rid
                    for message in scheduler.received
                    if isinstance(message, TokenizedGenerateReqInput)
                ]
                assert got == [f"{scheduler.dp_rank}"]

    asyncio.run(asyncio.wait_for(run(), 60))


def test_a_refused_request_is_declined_in_one_group() -> None:
    """A group that has another request of the room knows that the room is not this one's."""
    rooms = [Bootstrap("127.0.0.1", 1, number) for number in (7, 8)]
    params = SamplingParams(max_new_tokens=1, top_p=2.0)

    async def run() -> None:
        with fake_engine(num_groups=GROUPS) as engine:
            manager = engine.manager(
                disaggregation_mode="prefill", load_balance_method="follow_bootstrap_room"
            )
            await manager.start()

            def told() -> list[list[int]]:
                return [
                    [one.bootstrap.room for one in each.received if isinstance(one, DeclineRoomReq)]
                    for each in engine.schedulers
                ]

            for one in engine.schedulers:
                one.hold_after = 1
            with manager.submit([GenerateRequest(text="ab", bootstrap=rooms[0])]) as (state,):
                assert state.dp_rank == 7 % GROUPS
                for room in rooms:
                    wrong = GenerateRequest(text="ab", bootstrap=room, sampling_params=params)
                    with pytest.raises(InvalidRequest, match="top_p"), manager.submit([wrong]):
                        pass
                while sum(map(len, told())) < len(rooms):
                    await asyncio.sleep(0.001)
            assert told() == [[8], [7], []]
            await manager.close()

    asyncio.run(asyncio.wait_for(run(), 60))


def test_a_prompt_counts_as_computed_from_its_first_token_on() -> None:
    async def run() -> None:
        with fake_engine(num_groups=2) as engine:
            manager = engine.manager()
            await manager.start()
            for one in engine.schedulers:
                one.hold_after = 1
            loads = manager._groups._loads
            request = GenerateRequest(text="abc", stream=True)
            with manager.submit([request]) as (state,):
                assert [load.uncomputed for load in loads] == [3, 0]
                await state.wait_for_output()
                assert [load.uncomputed for load in loads] == [0, 0]
                assert [load.tokens for load in loads] == [3, 0]
            assert [load.tokens for load in loads] == [0, 0]
            await manager.close()

    asyncio.run(asyncio.wait_for(run(), 60))


@pytest.mark.parametrize("text", ["abcdefgh" * 2, "abcdefgh" * (SHORT_CHARS // 8 + 1)])
def test_texts_of_any_length_go_where_their_prefix_is(text: str) -> None:
    """Long texts are tokenized by another thread."""

    async def run() -> None:
        with fake_engine(num_groups=GROUPS) as engine:
            manager = engine.manager()
            manager.limits = dataclasses.replace(
                manager.limits, context_len=10 * len(text), max_input_len=9 * len(text)
            )
            await manager.start()
            ids = token_array(engine.tokenizer.encode(text))
            pages = RadixKey(ids).page_hashes(PAGE_SIZE)
            report = HeldPagesReport(
                dp_rank=2, stored=array("q", map(hash_str_to_int64, pages)).tobytes()
            )
            context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
            with push_socket(context, engine.ipc.server_input) as socket:
                socket.send(encode(report))
            prefixes = manager._groups._prefixes
            assert prefixes is not None
            while prefixes.lengths(ids, None)[2] == 0:
                await asyncio.sleep(0.001)
            params = SamplingParams(max_new_tokens=1, n=2)
            requests = expand_samples([GenerateRequest(text=text, sampling_params=params)])
            with manager.submit(requests) as states:
                await asyncio.gather(*map(end_of, states))
                assert [state.dp_rank for state in states] == [2, 2]
            await manager.close()
            context.term()

    asyncio.run(asyncio.wait_for(run(), 60))
