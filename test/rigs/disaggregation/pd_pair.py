"""A prefill and a decode server in this process, of one rank or several, and their requests."""

from __future__ import annotations

import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Final, Generic, Self, TypeVar

from rigs.schedulers.rank_rigs import RankRigs
from rigs.schedulers.scheduler_rig import Collected, SchedulerRig
from sglang.embedded_mooncake import LOOPBACK
from sglang.srt.messages.io_struct import (
    Bootstrap,
    TokenizedGenerateReqInput,
    ToScheduler,
)
from sglang.srt.sampling.sampling_params import SamplingParams

NEVER_ASKED: Final = 1
"""A port: rigs find each other without a bootstrap server."""
_TIMEOUT_S: Final = 60.0

Server = TypeVar("Server", bound=SchedulerRig | RankRigs)


class PdPair(ABC, Generic[Server]):
    """Context manager: both servers."""

    prefill: Server
    decode: Server

    def __init__(self) -> None:
        self._rooms = itertools.count(1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End both servers."""
        self.decode.close()
        self.prefill.close()

    @property
    @abstractmethod
    def rigs(self) -> Sequence[SchedulerRig]:
        """All ranks of both servers."""

    def request(
        self,
        rid: str,
        input_ids: list[int],
        params: SamplingParams | None = None,
        *,
        room: int | None = None,
        **fields: Any,
    ) -> TokenizedGenerateReqInput:
        """A request message for both servers, in a new room unless `room` names one."""
        bootstrap = Bootstrap(LOOPBACK, NEVER_ASKED, next(self._rooms) if room is None else room)
        return self.decode.request(rid, input_ids, params, bootstrap=bootstrap, **fields)

    def step(
        self, to_prefill: Sequence[ToScheduler] = (), to_decode: Sequence[ToScheduler] = ()
    ) -> None:
        """Run a tick of each server."""
        self.prefill.step(*to_prefill)
        self.decode.step(*to_decode)
        if all(rig.scheduler.poll_timeout_ms() for rig in self.rigs):
            time.sleep(0.0005)  # Yields to the threads that carry messages and bytes.

    def until(self, is_so: Callable[[], bool], *messages: ToScheduler) -> None:
        """Send `messages` to both, and step until `is_so`."""
        deadline = time.monotonic() + _TIMEOUT_S
        self.step(messages, messages)
        while not is_so():
            assert time.monotonic() < deadline, self.describe()
            self.step()

    def is_idle(self) -> bool:
        """True if both servers are idle, on all ranks."""
        return all(rig.scheduler.is_idle() for rig in self.rigs)

    def run(self, *messages: ToScheduler) -> None:
        """Send `messages` to both, step until both are idle, and check page ownership."""
        self.until(self.is_idle, *messages)
        self.assert_clean()

    def assert_clean(self) -> None:
        """Assert that no rank holds a slot, and that every page has one owner."""
        for rig in self.rigs:
            rig.assert_clean()
            rig.check()

    def result(self, rid: str) -> Collected:
        """Output of the decode server."""
        return self.decode.results[rid]

    def describe(self) -> str:
        """State of the requests on all ranks, prefill first, for failures."""
        states = [rig.scheduler.state.queues for rig in self.rigs]
        return "\n".join(
            f"waiting {[req.rid for req in queues.waiting]}, "
            f"holding {[req.rid for req in queues.holders()]}"
            for queues in states
        )
