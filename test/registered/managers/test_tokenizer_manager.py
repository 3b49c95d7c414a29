"""TokenizerManager by itself: life, control questions, hostile bytes."""

from __future__ import annotations

import asyncio
import string
import threading
from collections.abc import Callable

import pytest
import zmq

from sglang.srt.managers import control_client, prompt_encoder
from sglang.srt.managers.generate_request import (
    EngineUnavailable,
    GenerateRequest,
    InvalidRequest,
)
from sglang.srt.managers.io_struct import AbortReq, TokenizedGenerateReqInput
from sglang.srt.managers.prompt_encoder import SHORT_CHARS, PromptEncoder
from sglang.srt.managers.samples import expand_samples
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.fake_engine import byte_tokenizer, fake_engine

register_cpu_ci(est_time=5, suite="base-a-test-cpu")


def ask(text: str = "ab", **fields: object) -> GenerateRequest:
    return GenerateRequest(text=text, sampling_params=SamplingParams(max_new_tokens=4), **fields)  # type: ignore[arg-type]


def test_hostile_bytes_are_dropped_and_the_next_request_served() -> None:
    async def run() -> str:
        with fake_engine() as engine:
            manager = engine.manager()
            await manager.start()
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
            await manager.close()
            return state.text

    assert asyncio.run(run()) == "abab"


def test_what_one_turn_of_the_loop_asks_for_comes_in_one_frame_and_in_order() -> None:
    async def run() -> None:
        with fake_engine() as engine:
            manager = engine.manager()
            await manager.start()
            states = await asyncio.gather(*(manager.generate_whole(ask(rid=r)) for r in "abc"))
            assert [state.text for state in states] == ["abab"] * 3
            await manager.generate_whole(ask(rid="d"))
            await manager.close()
            assert engine.scheduler.frame_sizes == [3, 1]
            rids = [getattr(message, "rid", None) for message in engine.scheduler.received]
            assert rids == ["a", "b", "c", "d"]

    asyncio.run(asyncio.wait_for(run(), 20))


def test_leaving_early_aborts_and_keeps_the_id_until_the_end_has_come() -> None:
    async def run() -> None:
        with fake_engine() as engine:
            manager = engine.manager()
            await manager.start()
            engine.scheduler.hold_after = 2
            request = ask(stream=True, rid="r")
            with manager.submit([request]) as (state,):
                assert not await state.grown()
            with pytest.raises(InvalidRequest, match="rid"):
                await manager.generate_whole(ask(rid="r"))
            while manager._leaving:
                await asyncio.sleep(0.01)
            assert AbortReq(rid="r") in engine.scheduler.received
            engine.scheduler.hold_after = None
            assert (await manager.generate_whole(ask(rid="r"))).text == "abab"
            await manager.close()

    asyncio.run(asyncio.wait_for(run(), 20))


def test_a_scheduler_that_does_not_answer_is_an_error_in_bounded_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(control_client, "QUICK_TIMEOUT", 0.05)

    def silent(message: object) -> None:
        """A socket whose other end is stuck."""

    async def run() -> None:
        client = control_client.ControlClient(silent)
        with pytest.raises(EngineUnavailable, match="FlushCacheReqInput"):
            await client.flush_cache(0.0)
        assert not client._waiting

    asyncio.run(run())


def test_closing_ends_what_waits() -> None:
    async def run() -> None:
        with fake_engine() as engine:
            manager = engine.manager()
            await manager.start()
            engine.scheduler.hold.set()
            running = asyncio.create_task(manager.generate_whole(ask()))
            while not engine.scheduler.running:
                await asyncio.sleep(0.01)
            await manager.close()
            with pytest.raises(EngineUnavailable, match="shut down"):
                await running
            with pytest.raises(EngineUnavailable, match="shut down"):
                await manager.generate_whole(ask())
            await manager.close()

    asyncio.run(asyncio.wait_for(run(), 20))


def test_refusing_new_requests_lets_the_running_finish() -> None:
    async def run() -> str:
        with fake_engine() as engine:
            manager = engine.manager()
            await manager.start()
            engine.scheduler.hold.set()
            running = asyncio.create_task(manager.generate_whole(ask()))
            while not engine.scheduler.running:
                await asyncio.sleep(0.01)
            manager.refuse_new("the server is shutting down")
            with pytest.raises(EngineUnavailable, match="shutting down"):
                await manager.generate_whole(ask())
            engine.scheduler.hold.clear()
            text = (await running).text
            await manager.close()
            return text

    assert asyncio.run(asyncio.wait_for(run(), 20)) == "abab"


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
    async def run() -> None:
        with fake_engine() as engine:
            manager = engine.manager()
            await manager.start()
            thread = GatedEncoding(manager._encoder)
            request = ask("aa", rid="r")
            request.sampling_params.n = 3
            samples = [
                asyncio.create_task(manager.generate_whole(one))
                for one in expand_samples([request])
            ]
            await until(lambda: bool(thread.begun))
            await (manager.abort_all() if everything else manager.abort("r"))
            # They end while the text is still on the thread.
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

    asyncio.run(asyncio.wait_for(run(), 30))


@pytest.mark.usefixtures("all_are_long")
def test_an_id_is_taken_while_its_prompt_is_tokenized() -> None:
    async def run() -> None:
        with fake_engine() as engine:
            manager = engine.manager()
            await manager.start()
            thread = GatedEncoding(manager._encoder)
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

    asyncio.run(asyncio.wait_for(run(), 30))


@pytest.mark.usefixtures("all_are_long")
def test_what_is_tokenized_ends_with_the_engine() -> None:
    async def run() -> None:
        with fake_engine() as engine:
            manager = engine.manager()
            await manager.start()
            thread = GatedEncoding(manager._encoder)
            running = asyncio.create_task(manager.generate_whole(ask("aa")))
            waiting = asyncio.create_task(manager.generate_whole(ask("bb")))
            await until(lambda: bool(thread.begun))
            await manager.close()
            thread.gate.set()
            for task in (running, waiting):
                with pytest.raises(EngineUnavailable, match="shut down"):
                    await task

    asyncio.run(asyncio.wait_for(run(), 30))


def test_short_and_long_texts_encode_alike() -> None:
    async def run() -> None:
        tokenizer = byte_tokenizer()
        encoder = PromptEncoder(tokenizer)
        texts = ["é" * (SHORT_CHARS // 2), "é" * (SHORT_CHARS + 1)] * 4
        rows = await asyncio.gather(*(encoder.encode(t, add_special_tokens=False) for t in texts))
        assert rows == [tokenizer.encode(t, add_special_tokens=False) for t in texts]
        encoder.close()

    asyncio.run(run())


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
