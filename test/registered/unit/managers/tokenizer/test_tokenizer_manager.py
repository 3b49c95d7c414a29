"""TokenizerManager by itself: life, control questions, hostile bytes."""

from __future__ import annotations

import asyncio
import dataclasses
import string
import threading
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar

import msgspec
import pytest
import zmq

from rigs.servers.fake_engine import CONTEXT_LEN, FakeEngine, byte_tokenizer, fake_engine
from sglang.srt.managers.tokenizer import prompt_encoder
from sglang.srt.managers.tokenizer.generate_request import (
    EngineUnavailable,
    GenerateRequest,
    InvalidRequest,
    expand_samples,
)
from sglang.srt.managers.tokenizer.prompt_encoder import SHORT_CHARS, PromptEncoder
from sglang.srt.managers.tokenizer.request_limits import (
    RequestLimits,
    check_prompt,
    check_request,
    tokenized,
)
from sglang.srt.managers.tokenizer.server_channel import ControlClient
from sglang.srt.managers.tokenizer.tokenizer_manager import TokenizerManager
from sglang.srt.mem_cache.tree.radix_key import token_array
from sglang.srt.messages.io_struct import (
    AbortReq,
    FlushCacheReqInput,
    TokenizedGenerateReqInput,
)
from sglang.srt.observability.engine_metrics import ServerMetrics
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=5, suite="base-a-test-cpu")

LIMITS: Final = RequestLimits(
    vocab_size=260, context_len=200, max_input_len=199, max_queued_requests=4096
)


T = TypeVar("T")


def with_manager(work: Callable[[FakeEngine, TokenizerManager], Awaitable[T]]) -> T:
    """Do `work` with a manager that has started, and is closed afterwards."""

    async def run() -> T:
        with fake_engine() as engine:
            manager = engine.manager()
            await manager.start()
            result = await work(engine, manager)
            await manager.close()
            return result

    return asyncio.run(asyncio.wait_for(run(), 30))


def ask(text: str = "ab", **fields: Any) -> GenerateRequest:
    fields.setdefault("sampling_params", SamplingParams(max_new_tokens=4))
    return GenerateRequest(text=text, **fields)


def test_hostile_bytes_are_dropped_and_the_next_request_served() -> None:
    async def work(engine: FakeEngine, manager: TokenizerManager) -> str:
        context = zmq.Context()
        socket = context.socket(zmq.PUSH)
        socket.connect(engine.ipc.server_input)
        for payload in (
            b"",
            b"\xff" * 100,
            b"\x81\xa4type\xa3Foo",
            b"cos\nsystem\n(S'id'\ntR.",
        ):
            socket.send(payload)
        state = await manager.generate_whole(ask())
        socket.close(linger=0)
        context.term()
        return state.text

    assert with_manager(work) == "abab"


def test_what_one_turn_of_the_loop_asks_for_comes_in_one_frame_and_in_order() -> None:
    async def work(engine: FakeEngine, manager: TokenizerManager) -> None:
        states = await asyncio.gather(*(manager.generate_whole(ask(rid=r)) for r in "abc"))
        assert [state.text for state in states] == ["abab"] * 3
        await manager.generate_whole(ask(rid="d"))
        await manager.close()
        assert engine.scheduler.frame_sizes == [3, 1]
        rids = [getattr(message, "rid", None) for message in engine.scheduler.received]
        assert rids == ["a", "b", "c", "d"]

    with_manager(work)


def test_leaving_early_aborts_and_keeps_the_id_until_the_end_has_come() -> None:
    async def work(engine: FakeEngine, manager: TokenizerManager) -> None:
        engine.scheduler.hold_after = 2
        request = ask(stream=True, rid="r")
        with manager.submit([request]) as (state,):
            assert not await state.wait_for_output()
        with pytest.raises(InvalidRequest, match="rid"):
            await manager.generate_whole(ask(rid="r"))
        while manager._leaving:
            await asyncio.sleep(0.01)
        assert AbortReq(rid="r") in engine.scheduler.received
        engine.scheduler.hold_after = None
        assert (await manager.generate_whole(ask(rid="r"))).text == "abab"

    with_manager(work)


def test_a_scheduler_that_does_not_answer_is_an_error_in_bounded_time() -> None:
    def silent(message: object, dp_rank: int) -> None:
        """A socket whose other end is stuck."""

    async def run() -> None:
        client = ControlClient(silent)
        with pytest.raises(EngineUnavailable, match="FlushCacheReqInput"):
            await client.ask(FlushCacheReqInput(), 0.05)
        assert not client._waiting

    asyncio.run(run())


def test_closing_ends_what_waits() -> None:
    async def work(engine: FakeEngine, manager: TokenizerManager) -> None:
        engine.scheduler.hold.set()
        running = asyncio.create_task(manager.generate_whole(ask()))
        while not engine.scheduler.running:
            await asyncio.sleep(0.01)
        await manager.close()
        with pytest.raises(EngineUnavailable, match="shut down"):
            await running
        with pytest.raises(EngineUnavailable, match="shut down"):
            await manager.generate_whole(ask())

    with_manager(work)


def test_refusing_new_requests_lets_the_running_finish() -> None:
    async def work(engine: FakeEngine, manager: TokenizerManager) -> str:
        engine.scheduler.hold.set()
        running = asyncio.create_task(manager.generate_whole(ask()))
        while not engine.scheduler.running:
            await asyncio.sleep(0.01)
        manager.refusal = "the server is shutting down"
        with pytest.raises(EngineUnavailable, match="shutting down"):
            await manager.generate_whole(ask())
        engine.scheduler.hold.clear()
        return (await running).text

    assert with_manager(work) == "abab"


class GatedEncoding:
    """Makes an encoder's thread wait, and remembers the texts it was given."""

    def __init__(self, encoder: PromptEncoder) -> None:
        self.gate = threading.Event()
        self.begun: list[str] = []
        self._encode = encoder._far
        encoder._far = self

    def __call__(self, text: str, add_special_tokens: bool) -> list[int]:
        self.begun.append(text)
        assert self.gate.wait(20)
        return self._encode(text, add_special_tokens)


@pytest.fixture
def all_are_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every text is encoded by the thread, also one that fits the context."""
    monkeypatch.setattr(prompt_encoder, "SHORT_CHARS", 0)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


@pytest.mark.usefixtures("all_are_long")
def test_texts_whose_clients_left_are_not_encoded() -> None:
    async def run() -> None:
        encoder = PromptEncoder(byte_tokenizer())
        thread = GatedEncoding(encoder)

        def ask_for(text: str) -> asyncio.Task[list[int]]:
            return asyncio.create_task(encoder.encode(text, add_special_tokens=False))

        first = ask_for("aa")
        await until(lambda: thread.begun == ["aa"])
        left = [ask_for(letter) for letter in string.ascii_uppercase]
        shared = [ask_for("bb") for _ in range(2)]
        last = ask_for("cc")
        await asyncio.sleep(0)
        for task in (first, *left, shared[0]):
            task.cancel()
        await asyncio.wait([first, *left, shared[0]])
        thread.gate.set()
        assert await shared[1] == byte_tokenizer().encode("bb", add_special_tokens=False)
        assert len(await last) == 2
        assert thread.begun == ["aa", "bb", "cc"]
        assert not encoder._in_flight
        encoder.close()

    asyncio.run(asyncio.wait_for(run(), 30))


@pytest.mark.usefixtures("all_are_long")
@pytest.mark.parametrize("everything", [False, True])
def test_an_abort_during_tokenization_ends_the_request_and_all_its_samples(
    everything: bool,
) -> None:
    async def work(engine: FakeEngine, manager: TokenizerManager) -> None:
        thread = GatedEncoding(manager.encoder)
        request = ask("aa", rid="r", sampling_params=SamplingParams(max_new_tokens=4, n=3))
        samples = [
            asyncio.create_task(manager.generate_whole(one)) for one in expand_samples([request])
        ]
        await until(lambda: bool(thread.begun))
        await (manager.abort_all() if everything else manager.abort("r"))
        # The samples end while the text is still on the thread.
        states = await asyncio.gather(*samples)
        for state in states:
            assert state.finish_reason is not None
            assert (state.finish_reason.type, state.finish_reason.status_code) == ("abort", 499)
            assert (state.output_ids, state.prompt_tokens) == ([], 0)
        assert manager.num_requests == 0
        thread.gate.set()
        assert (await manager.generate_whole(ask(rid="r"))).text == "abab", "the id is free"
        await manager.close()
        rids = [
            m.rid for m in engine.scheduler.received if isinstance(m, TokenizedGenerateReqInput)
        ]
        assert rids == ["r"], "the scheduler never heard of the samples"

    with_manager(work)


@pytest.mark.usefixtures("all_are_long")
def test_an_id_is_taken_while_its_prompt_is_tokenized() -> None:
    async def work(engine: FakeEngine, manager: TokenizerManager) -> None:
        thread = GatedEncoding(manager.encoder)
        first = asyncio.create_task(manager.generate_whole(ask("aa", rid="r")))
        await until(lambda: bool(thread.begun))
        second = asyncio.create_task(manager.generate_whole(ask("bb", rid="r")))
        thread.gate.set()
        with pytest.raises(InvalidRequest, match="rid 'r' is in use"):
            await second
        assert (await first).text == "aaaa"
        assert (await manager.generate_whole(ask(rid="r"))).text == "abab", "the id is free"
        await manager.close()
        assert len(engine.scheduler.received) == 2

    with_manager(work)


@pytest.mark.usefixtures("all_are_long")
def test_what_is_tokenized_ends_with_the_engine() -> None:
    async def work(engine: FakeEngine, manager: TokenizerManager) -> None:
        thread = GatedEncoding(manager.encoder)
        running = asyncio.create_task(manager.generate_whole(ask("aa")))
        waiting = asyncio.create_task(manager.generate_whole(ask("bb")))
        await until(lambda: bool(thread.begun))
        await manager.close()
        thread.gate.set()
        for task in (running, waiting):
            with pytest.raises(EngineUnavailable, match="shut down"):
                await task

    with_manager(work)


@pytest.mark.usefixtures("all_are_long")
def test_a_long_text_with_too_many_tokens_is_refused_and_its_id_is_free() -> None:
    async def run() -> None:
        with fake_engine() as engine:
            metrics = ServerMetrics()
            manager = engine.manager(metrics)
            await manager.start()
            with manager.submit([ask("a" * CONTEXT_LEN, rid="r")]) as (state,):
                with pytest.raises(InvalidRequest, match="text has 200 tokens, at most 199"):
                    await state.wait_for_output()
                assert manager.num_requests == 0
                # Another request may have its id before the first has left.
                other = asyncio.create_task(manager.generate_whole(ask(rid="r")))
                await until(lambda: manager.num_requests == 1)
            assert manager.num_requests == 1, "leaving the refused one leaves the other alone"
            assert (await other).text == "abab"
            await manager.close()
            assert len(engine.scheduler.received) == 1
            assert 'num_requests_total{finish_reason="length"} 1.0' in metrics.render()
            assert "error" not in metrics.render()

    asyncio.run(asyncio.wait_for(run(), 30))


@pytest.mark.usefixtures("all_are_long")
def test_a_tokenizer_that_fails_ends_its_request_alone() -> None:
    async def work(engine: FakeEngine, manager: TokenizerManager) -> None:

        def fail(text: str, add_special_tokens: bool) -> list[int]:
            raise RuntimeError(f"cannot encode {text!r}")

        encode, manager.encoder._far = manager.encoder._far, fail
        with pytest.raises(RuntimeError, match="cannot encode 'ab'"):
            await manager.generate_whole(ask(rid="r"))
        manager.encoder._far = encode
        assert (await manager.generate_whole(ask(rid="r"))).text == "abab"

    with_manager(work)


def test_nothing_of_a_body_is_sent_where_one_of_its_requests_is_refused() -> None:
    async def work(engine: FakeEngine, manager: TokenizerManager) -> None:
        too_long = ask("a" * CONTEXT_LEN, prompt_field="text[1]")
        for wrong in (too_long, ask(priority=2**31), ask("", prompt_field="text[1]")):
            with (
                pytest.raises(InvalidRequest, match=r"text\[1\]|priority"),
                manager.submit([ask(rid="r"), wrong]),
            ):
                pass
        assert manager.num_requests == 0
        assert (await manager.generate_whole(ask(rid="r"))).text == "abab"
        await manager.close()
        assert len(engine.scheduler.received) == 1

    with_manager(work)


def test_a_request_stays_as_it_was_made_and_its_message_is_settled() -> None:
    params = SamplingParams(
        max_new_tokens=128, min_new_tokens=7, temperature=0.0, top_k=1000, stop="x"
    )
    request = ask(sampling_params=params, default_max_new_tokens=5)
    before = msgspec.structs.replace(params)
    tokens = token_array([65, 66])
    check_request(request, LIMITS)
    check_prompt(request, tokens, LIMITS)
    message = tokenized(request, tokens, LIMITS, created_time=1.5)
    assert request.sampling_params is params
    assert params == before
    settled = message.sampling_params
    assert (settled.max_new_tokens, settled.stop, settled.temperature, settled.top_k) == (
        7, ["x"], 1.0, 1,
    )  # fmt: skip
    with pytest.raises(AttributeError, match="immutable"):
        request.rid = "other"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("default", "least", "prompt_len", "settled"),
    [(16, 0, 10, 16), (16, 0, 190, 10), (0, 0, 10, 190), (16, 30, 10, 30), (16, 30, 170, 30)],
)
def test_a_default_number_of_tokens_fits_the_context(
    default: int, least: int, prompt_len: int, settled: int
) -> None:
    params = SamplingParams(min_new_tokens=least)
    request = ask(sampling_params=params, default_max_new_tokens=default)
    tokens = token_array([65] * prompt_len)
    check_prompt(request, tokens, LIMITS)
    message = tokenized(request, tokens, LIMITS, created_time=0.0)
    assert message.sampling_params.max_new_tokens == settled


@pytest.mark.parametrize(("top_k", "settled"), [(259, 259), (260, 260), (261, -1)])
def test_more_candidates_than_tokens_are_all_tokens(top_k: int, settled: int) -> None:
    request = ask(sampling_params=SamplingParams(top_k=top_k))
    message = tokenized(request, token_array([65]), LIMITS, created_time=0.0)
    assert message.sampling_params.top_k == settled


def test_a_body_that_never_fits_the_queue_is_refused_for_good() -> None:
    limits = dataclasses.replace(LIMITS, max_queued_requests=3)
    for fits in (expand_samples([ask(sampling_params=SamplingParams(n=3))]), [ask(), ask()]):
        for request in fits:
            check_request(request, limits)
    two_of_two = expand_samples([ask(sampling_params=SamplingParams(n=2))] * 2)
    four = expand_samples([ask()] * 4)
    for too_many in (two_of_two, four):
        with pytest.raises(
            InvalidRequest, match=r"4 outputs, and at most 3 may wait \(--max-queued-requests\)"
        ):
            check_request(too_many[0], limits)


def test_samples_of_a_text_are_encoded_once() -> None:
    encoder = PromptEncoder(byte_tokenizer())
    three = expand_samples([ask("ab", rid="r", sampling_params=SamplingParams(n=3))])
    prompts = encoder.encode_now([*three, ask("c"), ask("d" * (SHORT_CHARS + 1))])
    assert prompts[0] is prompts[1] is prompts[2]
    assert [None if one is None else len(one) for one in prompts] == [2, 2, 2, 1, None]
    encoder.close()


def test_short_and_long_texts_encode_alike() -> None:
    async def run() -> None:
        tokenizer = byte_tokenizer()
        encoder = PromptEncoder(tokenizer)
        texts = ["é" * (SHORT_CHARS // 2), "é" * (SHORT_CHARS + 1)] * 4
        rows = await asyncio.gather(*(encoder.encode(t, add_special_tokens=False) for t in texts))
        assert rows == [tokenizer.encode(t, add_special_tokens=False) for t in texts]
        encoder.close()

    asyncio.run(run())
