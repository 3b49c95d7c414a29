"""The engine's side of a compile process: start it, send it trials, kill it after a timeout."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Final, TypeVar

import msgspec
import psutil

from sglang.srt.constrained.constraint import Constraint, ConstraintKind, GrammarError
from sglang.srt.constrained.grammar import GrammarLimits, Vocabulary

T = TypeVar("T")


class Hello(msgspec.Struct, frozen=True):
    vocabulary: Vocabulary
    limits: GrammarLimits
    any_whitespace: bool


class Task(msgspec.Struct, frozen=True):
    """Each later message to the process: a constraint to try, or, without a kind, the order to stop
    the trial that runs. Each trial has one answer, even if it is stopped."""

    kind: ConstraintKind | None = None
    text: str = ""


class TrialResult(msgspec.Struct, frozen=True):
    """An answer to a `Task` or to `Hello`. `error` is None on success."""

    error: str | None = None
    has_died: bool = False
    """The trial ended without an answer, by itself or because it was stopped."""


HELLO_DECODER: Final = msgspec.msgpack.Decoder(Hello)
TASK_DECODER: Final = msgspec.msgpack.Decoder(Task)
RESULT_DECODER: Final = msgspec.msgpack.Decoder(TrialResult)


def send(pipe: Connection, message: msgspec.Struct) -> None:
    """Send one message; blocks while the pipe is full. Raises OSError if the other end is
    closed."""
    pipe.send_bytes(msgspec.msgpack.encode(message))


def receive(
    pipe: Connection, decoder: msgspec.msgpack.Decoder[T], seconds: float | None = None
) -> T:
    """Receive one message, after at most `seconds`; None waits for ever.

    Raises:
        EOFError: The other end is closed.
        TimeoutError: No message came in time.
    """
    if not pipe.poll(seconds):
        raise TimeoutError
    return decoder.decode(pipe.recv_bytes())


_ANSWER_SECONDS: Final = 10.0
"""Time for an answer that needs no computation; long, for machines under load."""


class CompileProcessError(RuntimeError):
    """The process could not be started. The grammar may be fine."""


class FirstTryOver(Exception):
    """A compilation takes longer than a first try, and no thread is free for long compilations."""


class CompileProcessDied(GrammarError):
    """The process died during a trial. Another try may succeed."""


class CompileProcess:
    """One compile process. One thread at a time may use it; any thread may call `kill`. The
    constructor raises CompileProcessError if it did not start within `limits.start_timeout`."""

    def __init__(
        self, vocabulary: Vocabulary, limits: GrammarLimits, *, any_whitespace: bool
    ) -> None:
        self._limits = limits
        self._pipe, child_end = Pipe()
        with child_end:
            module = "sglang.srt.constrained.compile_worker"
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, str(os.getpid()), str(child_end.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=2,
                pass_fds=[child_end.fileno()],
            )
        try:
            send(self._pipe, Hello(vocabulary, limits, any_whitespace))
            receive(self._pipe, RESULT_DECODER, limits.start_timeout)
        except (OSError, EOFError) as error:
            self.close()
            raise CompileProcessError(
                f"the grammar compile process did not start ({type(error).__name__}, exit status "
                f"{self._process.returncode}); its error output has the cause"
            ) from error

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    @property
    def is_reusable(self) -> bool:
        """True if the process can serve again: it runs, and its memory has not grown too large."""
        if not self.is_running:
            return False
        try:
            resident = psutil.Process(self.pid).memory_info().rss
        except psutil.NoSuchProcess:
            return False
        return bool(resident <= self._limits.idle_process_memory)

    def check(self, constraint: Constraint, may_go_on: Callable[[], bool]) -> None:
        """Compile a constraint in the process; return when it has succeeded. `may_go_on` is called
        once, after `limits.first_try`; False stops the trial.

        Raises:
            FirstTryOver: `may_go_on` returned False.
            GrammarError: The constraint did not compile within the limits.
        """
        kind = constraint.kind.value
        limits = self._limits
        first_try = min(limits.first_try, limits.compile_timeout)
        try:
            send(self._pipe, Task(constraint.kind, constraint.text))
            if not self._pipe.poll(first_try):
                if not may_go_on():
                    self._stop_trial()
                    raise FirstTryOver
                if not self._pipe.poll(limits.compile_timeout - first_try):
                    self._stop_trial()
                    raise GrammarError(
                        f"{kind}: compiling it took more than {limits.compile_timeout:g} s: "
                        "simplify it"
                    )
            result = receive(self._pipe, RESULT_DECODER, _ANSWER_SECONDS)
        except (OSError, EOFError):
            self.close()
            result = TrialResult(has_died=True)
        if result.has_died:
            raise CompileProcessDied(
                f"{kind}: compiling it ended the compile process, most likely for lack of memory "
                f"({limits.compile_memory >> 20} MiB): simplify it"
            )
        if result.error is not None:
            error = result.error
            raise GrammarError(error if error.startswith(kind) else f"{kind}: {error}")

    def _stop_trial(self) -> None:
        """Stop the trial under way. If the process does not answer, end the process."""
        try:
            send(self._pipe, Task())
            receive(self._pipe, RESULT_DECODER, _ANSWER_SECONDS)
        except (OSError, EOFError):
            self.close()

    def kill(self) -> None:
        """Kill the process, so that `check` raises `CompileProcessDied`. `close` reaps it."""
        self._process.kill()

    def close(self) -> None:
        """Kill and reap the process. Idempotent."""
        self._process.kill()
        self._process.wait()
        self._pipe.close()
