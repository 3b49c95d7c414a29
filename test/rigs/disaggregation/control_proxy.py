"""A network between decode servers and a prefill server that loses, doubles and delays."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final
from urllib.parse import urlsplit

from sglang.srt.disaggregation.control.frames import as_frame

Fate = Callable[[bytes, bool], Sequence[float]]
"""Gives the delays in seconds after which copies of a message arrive; empty: it is lost. Arguments:
the message, and True if it is a question."""
_LENGTH_BYTES: Final = 4


def arrives(message: bytes, is_question: bool) -> Sequence[float]:
    """The fate of messages of a good network."""
    return (0.0,)


class ControlProxy:
    """Context manager: forwards questions from `endpoint` to `target`, neither of which has a
    secret.

    One thread carries the messages. `fate` may be replaced at any time, and `target` for further
    connections; `counts` says how many messages arrived, were lost and were doubled. Greetings
    always arrive.

    Args:
        target: The prefill server's endpoint.
        fate: The fate of each message; called in the thread.
    """

    def __init__(self, target: str, fate: Fate = arrives) -> None:
        self.fate = fate
        self.counts: Counter[str] = Counter()
        self.target = target
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"tcp://127.0.0.1:{self._socket.getsockname()[1]}"
        self._loop = asyncio.new_event_loop()
        self._ending = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="control-proxy", daemon=True)
        self._thread.start()

    def __enter__(self) -> ControlProxy:
        return self

    def __exit__(self, *error: object) -> None:
        self._loop.call_soon_threadsafe(self._ending.set)
        self._thread.join()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._join, sock=self._socket)
        await self._ending.wait()
        server.close()

    async def _join(self, asker: asyncio.StreamReader, to_asker: asyncio.StreamWriter) -> None:
        """Carry the messages of a connection, until either end closes it."""
        # The end of the loop cancels it, which asyncio would print.
        with contextlib.suppress(OSError, asyncio.CancelledError):
            parts = urlsplit(self.target)
            server, to_server = await asyncio.open_connection(parts.hostname, parts.port)
            with contextlib.closing(to_server):
                with contextlib.suppress(asyncio.IncompleteReadError):
                    to_asker.write(as_frame(await _message(server)))  # The greeting.
                ways = [(asker, to_server, True), (server, to_asker, False)]
                carrying = [asyncio.create_task(self._carry(*way)) for way in ways]
                await asyncio.wait(carrying, return_when=asyncio.FIRST_COMPLETED)
                for task in carrying:
                    task.cancel()
        to_asker.close()

    async def _carry(
        self, source: asyncio.StreamReader, to: asyncio.StreamWriter, is_question: bool
    ) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, OSError):
            while True:
                message = await _message(source)
                delays = self.fate(message, is_question)
                what = "lost" if not delays else "doubled" if len(delays) > 1 else "passed"
                self.counts[what] += 1
                for delay in delays:
                    self._loop.call_later(delay, to.write, as_frame(message))


async def _message(source: asyncio.StreamReader) -> bytes:
    length = int.from_bytes(await source.readexactly(_LENGTH_BYTES), "big")
    return await source.readexactly(length)
