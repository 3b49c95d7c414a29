"""Prefill and decode schedulers in processes of their own, to be killed and stopped.

They are forked from a server that has torch imported, so that one starts within a second. The model
checks every key and value (`checkable_model`). Mooncake's Transfer Engine moves them over TCP, or
NIXL over UCX.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Final

import torch

from rigs.disaggregation.pd_rig import CheckableRoleRig, EngineMover, LocalMover, one_rank
from rigs.shared_processes import SharedProcess
from sglang.embedded_mooncake import LOOPBACK
from sglang.srt.arg_groups.disaggregation import DisaggregationMode, TransferBackend
from sglang.srt.constants import BUILTIN_MODEL_DIR
from sglang.srt.distributed.device_communicators.mooncake_transfer_engine import (
    MooncakeTransferEngine,
)
from sglang.srt.distributed.device_communicators.nixl_transfer_engine import NixlTransferEngine
from sglang.srt.distributed.device_context import mark_device_set
from sglang.srt.environ import envs
from sglang.srt.messages.io_struct import FinishReason, ToScheduler

_TIMEOUT_S: Final = 60.0
_UNASKED: Final = "sglang:num_prefill_bootstrap_queue_reqs"


@dataclass(frozen=True, slots=True)
class Ended:
    """How a request ended."""

    output_ids: list[int]
    reason: FinishReason
    from_storage: int
    """Tokens of its prompt that came from L3."""

    @property
    def why(self) -> str:
        return self.reason.message or ""


@dataclass(frozen=True, slots=True)
class Facts:
    """State of a scheduler."""

    num_waiting: int
    num_unasked: int
    """Prefill server: requests that no decode server has asked for."""
    num_holders: int
    num_reads: int
    """Reads in flight, if reads can be held."""
    num_lingering: int
    """Requests that have ended while reads still write to their slots."""
    is_idle: bool
    free_tokens: int
    ended: Mapping[str, Ended]
    """The ends of all requests so far, by id."""


class RoleProcess:
    """Context manager: a scheduler that steps by itself.

    Args:
        mode: `prefill` or `decode`.
        args: Arguments of `RoleRig`.
        env: Added to the environment.
        holds: Reads can be held (`set`), and then block the threads of their prompts.
        over: What moves the bytes: Mooncake over TCP, or NIXL, whose reads cannot be held.
    """

    def __init__(
        self,
        mode: DisaggregationMode,
        env: Mapping[str, str],
        *,
        holds: bool = True,
        over: TransferBackend = TransferBackend.MOONCAKE_TCP,
        **args: Any,
    ) -> None:
        multiprocessing.set_forkserver_preload(["rigs.disaggregation.pd_processes"])
        self._pipe, theirs = multiprocessing.Pipe()
        self._process = SharedProcess(
            target=_serve, args=(mode, dict(env), holds, over, args, theirs), daemon=True
        )
        self._process.start()
        theirs.close()
        self.endpoint: str = self._receive()
        """Endpoint of a prefill server, `#` and its instance."""

    def __enter__(self) -> RoleProcess:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()

    def send(self, *messages: ToScheduler) -> None:
        """Messages for its next tick."""
        self._call("send", messages)

    def set(self, **settings: Any) -> None:
        """`endpoint`: where prompts are asked for; `hold`: whether reads stay in flight; `pause`:
        whether the scheduler makes no step."""
        self._call("set", settings)

    def facts(self) -> Facts:
        """The scheduler's state now."""
        facts = self._call("facts", None)
        assert isinstance(facts, Facts)
        return facts

    def take_ended(self) -> dict[str, Ended]:
        """Take the requests that have ended since the last call; `facts` no longer has them."""
        ended = self._call("take_ended", None)
        assert isinstance(ended, dict)
        return ended

    def check(self) -> None:
        """Check who owns which page; the scheduler must be idle."""
        self._call("check", None)

    def until(self, is_so: Callable[[Facts], bool]) -> Facts:
        """Wait until `is_so` holds; returns the facts then."""
        deadline = time.monotonic() + _TIMEOUT_S
        while not is_so(facts := self.facts()):
            assert time.monotonic() < deadline, facts
            time.sleep(0.01)
        return facts

    def end_of(self, rid: str) -> Ended:
        """Wait for the end of a request."""
        return self.until(lambda facts: rid in facts.ended).ended[rid]

    def signal(self, number: signal.Signals) -> None:
        """Send a signal: SIGSTOP, SIGCONT, SIGKILL, ..."""
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        """Kill the process. Idempotent."""
        self._process.kill()
        self._process.join()

    def stop(self) -> int | None:
        """Let the process close its resources and exit; returns its status."""
        self._pipe.send(("stop", None))
        self._process.join(_TIMEOUT_S)
        return self._process.exitcode

    def _call(self, what: str, argument: Any) -> Any:
        self._pipe.send((what, argument))
        return self._receive()

    def _receive(self) -> Any:
        assert self._pipe.poll(_TIMEOUT_S), "the scheduler does not answer"
        is_good, value = self._pipe.recv()
        assert is_good, value
        return value


class _Server:
    """The loop of the process. A host that is a `RoleProcess.endpoint` names the prefill server
    itself."""

    def __init__(
        self,
        mode: DisaggregationMode,
        holds: bool,
        over: TransferBackend,
        args: dict[str, Any],
    ) -> None:
        torch.set_num_threads(1)
        mark_device_set("cpu")
        self._engine: MooncakeTransferEngine | NixlTransferEngine
        if over == TransferBackend.NIXL:
            self._engine = NixlTransferEngine(LOOPBACK)
            self._mover = LocalMover()
        else:
            self._engine = MooncakeTransferEngine(LOOPBACK)
            self._mover = EngineMover(self._engine)
        self._endpoint = ""
        self._is_paused = False
        self._messages: list[ToScheduler] = []
        self.rig = CheckableRoleRig(
            BUILTIN_MODEL_DIR,
            mode=mode,
            engine=self._mover if holds and over != TransferBackend.NIXL else self._engine,
            find_rank=lambda host, port, rank, dp_rank: one_rank(
                *(host if "://" in host else self._endpoint).split("#")
            ),
            **args,
        )

    def run(self, pipe: Connection) -> None:
        pipe.send((True, "".join(f"{one.endpoint}#{one.instance_id}" for one in self.rig.routes)))
        while True:
            timeout = 0.0 if not self._is_paused and not self.rig.scheduler.is_idle() else 0.005
            while pipe.poll(timeout):
                what, argument = pipe.recv()
                if what == "stop":
                    self.rig.close()
                    self._engine.close()
                    return
                pipe.send((True, getattr(self, f"_{what}")(argument)))
            if not self._is_paused:
                messages, self._messages = self._messages, []
                self.rig.step(*messages)
                if self.rig.scheduler.poll_timeout_ms():
                    time.sleep(0.0005)

    def _send(self, messages: tuple[ToScheduler, ...]) -> None:
        self._messages += messages

    def _set(self, settings: dict[str, Any]) -> None:
        self._endpoint = settings.get("endpoint", self._endpoint)
        self._is_paused = settings.get("pause", self._is_paused)
        if "hold" in settings:
            self._mover.hold = settings["hold"]
            if not self._mover.hold:
                # Run in a thread, because a read from a stopped peer hangs.
                self._mover.release_beside()

    def _facts(self, _: None) -> Facts:
        state = self.rig.scheduler.state
        return Facts(
            num_waiting=len(state.queues.waiting) + len(self._messages),
            num_unasked=int(state.metrics.registry.get_sample_value(_UNASKED) or 0),
            num_holders=state.queues.num_holders,
            num_reads=sum(not one.is_settled for one in self._mover.begun),
            num_lingering=len(state.queues.lingering),
            is_idle=self.rig.scheduler.is_idle() and not self._messages,
            free_tokens=state.free_tokens(),
            ended=self._ended(),
        )

    def _ended(self) -> dict[str, Ended]:
        return {
            rid: Ended(got.output_ids, got.finish_reason, got.last.cached_tokens_details.storage)
            for rid, got in self.rig.results.items()
            if got.last is not None and got.finish_reason is not None
        }

    def _take_ended(self, _: None) -> dict[str, Ended]:
        ended = self._ended()
        for rid in ended:
            del self.rig.results[rid]
        return ended

    def _check(self, _: None) -> None:
        self.rig.assert_clean()
        self.rig.check()


def _serve(
    mode: DisaggregationMode,
    env: dict[str, str],
    holds: bool,
    over: TransferBackend,
    args: dict[str, Any],
    pipe: Connection,
) -> None:
    assert mode in (DisaggregationMode.PREFILL, DisaggregationMode.DECODE)
    for name, text in env.items():
        field = envs.fields()[name]
        field.set(field.parse(text))
    try:
        _Server(mode, holds, over, args).run(pipe)
    except EOFError:
        pass  # The test has ended.
    except BaseException:  # noqa: BLE001 - it is the parent's to raise
        pipe.send((False, traceback.format_exc()))
    os._exit(0)
