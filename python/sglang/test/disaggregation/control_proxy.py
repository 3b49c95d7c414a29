"""A network between decode servers and a prefill server's desk that loses, doubles and delays."""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from types import TracebackType

import zmq

Fate = Callable[[bytes, bool], Sequence[float]]
"""From a message, and whether it is a question, the delays in seconds after which its copies
arrive; empty: it is lost."""


def arrives(message: bytes, is_question: bool) -> Sequence[float]:
    """The fate of messages of a good network."""
    return (0.0,)


class ControlProxy:
    """Context manager: forwards questions from `endpoint` to `target`.

    One thread carries the messages. `fate` may be replaced at any time; `counts` says how many
    messages arrived, were lost and were doubled.

    Args:
        target: The desk's endpoint.
        fate: The fate of each message; called in the thread.
    """

    def __init__(self, target: str, fate: Fate = arrives) -> None:
        self.fate = fate
        self.counts: Counter[str] = Counter()
        self._target = target
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._front = self._context.socket(zmq.ROUTER)
        port = self._front.bind_to_random_port("tcp://127.0.0.1")
        self.endpoint = f"tcp://127.0.0.1:{port}"
        self._backs: dict[bytes, zmq.Socket[bytes]] = {}
        """Each asker's own connection to the desk."""
        self._late: list[tuple[float, int, bytes, bool, bytes]] = []
        """(when, order, asker, whether it is a question, message)."""
        self._order = itertools.count()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._carry, name="control-proxy", daemon=True)
        self._thread.start()

    def __enter__(self) -> ControlProxy:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._closing.set()
        self._thread.join()
        self._context.destroy(linger=0)

    def _carry(self) -> None:
        poller = zmq.Poller()
        poller.register(self._front, zmq.POLLIN)
        askers: dict[zmq.Socket[bytes], bytes] = {}
        while not self._closing.is_set():
            for ready, _ in poller.poll(self._timeout_ms()):
                if ready is self._front:
                    asker, message = self._front.recv_multipart()
                    if asker not in self._backs:
                        back = self._context.socket(zmq.DEALER)
                        back.connect(self._target)
                        poller.register(back, zmq.POLLIN)
                        self._backs[asker] = back
                        askers[back] = asker
                    self._take(asker, True, message)
                else:
                    self._take(askers[ready], False, ready.recv())
            self._pass_on()

    def _timeout_ms(self) -> int:
        if not self._late:
            return 20
        return max(0, min(20, round((self._late[0][0] - time.monotonic()) * 1000)))

    def _take(self, asker: bytes, is_question: bool, message: bytes) -> None:
        delays = self.fate(message, is_question)
        self.counts["lost" if not delays else "doubled" if len(delays) > 1 else "passed"] += 1
        now = time.monotonic()
        for delay in delays:
            entry = (now + delay, next(self._order), asker, is_question, message)
            heapq.heappush(self._late, entry)

    def _pass_on(self) -> None:
        while self._late and self._late[0][0] <= time.monotonic():
            _, _, asker, is_question, message = heapq.heappop(self._late)
            if is_question:
                self._backs[asker].send(message)
            else:
                self._front.send_multipart([asker, message])
