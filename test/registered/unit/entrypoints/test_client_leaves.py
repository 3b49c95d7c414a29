"""A client that leaves cancels its own work, and nothing after it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from sglang.srt.entrypoints.http.sse import ClientLeft, unless_client_leaves
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=1, suite="base-a-test-cpu")


class Client:
    """One request's `gone`, and the work that answers it."""

    def __init__(self) -> None:
        self.has_left: asyncio.Future[None] = asyncio.Future()
        self.answer: asyncio.Future[str] = asyncio.Future()

    async def work(self) -> str:
        return await self.answer


@pytest.mark.parametrize("leaves_first", [True, False])
def test_the_answer_counts_if_it_comes_in_the_turn_in_which_the_client_leaves(
    leaves_first: bool,
) -> None:
    async def run() -> str:
        client = Client()

        def both() -> None:
            first, second = (client.has_left, client.answer)[:: 1 if leaves_first else -1]
            for one in (first, second):
                one.set_result("words" if one is client.answer else None)  # type: ignore[arg-type]

        asyncio.get_running_loop().call_later(0.01, both)
        result = await unless_client_leaves(client.has_left, client.work())
        # The caller's next awaits must not be cancelled.
        for _ in range(3):
            await asyncio.sleep(0)
        return result

    assert asyncio.run(run()) == "words"


def test_a_client_that_leaves_before_its_answer_closes_the_stream() -> None:
    is_closed = False

    async def events() -> AsyncGenerator[str, None]:
        nonlocal is_closed
        try:
            await asyncio.Future()
            yield "never"
        finally:
            is_closed = True

    async def run() -> None:
        client, stream = Client(), events()
        asyncio.get_running_loop().call_later(0.01, client.has_left.set_result, None)
        with pytest.raises(ClientLeft):
            await unless_client_leaves(client.has_left, anext(stream), stream)
        task = asyncio.current_task()
        assert task is not None and task.cancelling() == 0
        await asyncio.sleep(0)

    asyncio.run(run())
    assert is_closed
