"""The engine's side of a compile process: start it, send it trials, kill it after a timeout."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import IO, Final

import psutil

from sglang.srt.constrained.constraint import Constraint
from sglang.srt.constrained.frames import (
    VERDICT_DECODER,
    FrameTimeout,
    Hello,
    Task,
    Verdict,
    read_frame,
    wait_readable,
    write_frame,
)
from sglang.srt.constrained.limits import GrammarLimits
from sglang.srt.constrained.ticket import GrammarError
from sglang.srt.constrained.vocabulary import Vocabulary

_ANSWER_SECONDS: Final = 10.0
"""Time for an answer that needs no computation; long, for machines under load."""


class CompileProcessError(RuntimeError):
    """The process could not be started. The grammar may be fine."""


class FirstTryOver(Exception):
    """A compilation takes longer than a first try, and no thread is free for long compilations."""


class CompileProcessDied(GrammarError):
    """The process died during a trial. Another try may succeed."""


class CompileProcess:
    """One compile process. One thread at a time may use it; any thread may call `kill`.

    Raises (from the constructor):
        CompileProcessError: The process did not start within `limits.start_timeout`.
    """

    def __init__(
        self, vocabulary: Vocabulary, limits: GrammarLimits, *, any_whitespace: bool
    ) -> None:
        self._limits = limits
        command = [sys.executable, "-m", "sglang.srt.constrained.compile_worker", str(os.getpid())]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )
        self._stdin, self._stdout = _pipe(self._process.stdin), _pipe(self._process.stdout)
        try:
            write_frame(self._stdin.fileno(), Hello(vocabulary, limits, any_whitespace))
            deadline = time.monotonic() + limits.start_timeout
            read_frame(self._stdout.fileno(), VERDICT_DECODER, deadline)
        except (OSError, EOFError, FrameTimeout) as error:
            self.close()
            raise CompileProcessError(
                f"the grammar compile process did not start ({type(error).__name__}, exit status "
                f"{self._process.returncode}); its error output has the cause"
            ) from error

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether the process runs."""
        return self._process.poll() is None

    @property
    def is_worth_keeping(self) -> bool:
        """Whether to use the process again: it runs, and its memory has not grown too large."""
        if not self.is_running:
            return False
        try:
            resident = psutil.Process(self.pid).memory_info().rss
        except psutil.NoSuchProcess:
            return False
        return bool(resident <= self._limits.idle_process_memory)

    def check(self, constraint: Constraint, may_go_on: Callable[[], bool]) -> None:
        """Compile a constraint in the process; return when that has succeeded.

        Args:
            may_go_on: Called once, after `limits.first_try`; False stops the trial.

        Raises:
            FirstTryOver: `may_go_on` returned False.
            GrammarError: The constraint did not compile within the limits.
        """
        kind = constraint.kind.value
        limits = self._limits
        try:
            write_frame(self._stdin.fileno(), Task(constraint.kind, constraint.text))
            answer = self._stdout.fileno()
            first_try = min(limits.first_try, limits.compile_timeout)
            if not wait_readable(answer, seconds=first_try):
                if not may_go_on():
                    self._stop_trial()
                    raise FirstTryOver
                if not wait_readable(answer, seconds=limits.compile_timeout - first_try):
                    self._stop_trial()
                    raise GrammarError(
                        f"{kind}: compiling it took more than {limits.compile_timeout:g} s: "
                        "simplify it"
                    )
            verdict = read_frame(answer, VERDICT_DECODER, time.monotonic() + _ANSWER_SECONDS)
        except (OSError, EOFError, FrameTimeout):
            self.close()
            verdict = Verdict(has_died=True)
        if verdict.has_died:
            raise CompileProcessDied(
                f"{kind}: compiling it ended the compile process, most likely for lack of memory "
                f"({limits.compile_memory >> 20} MiB): simplify it"
            )
        if verdict.error is not None:
            error = verdict.error
            raise GrammarError(error if error.startswith(kind) else f"{kind}: {error}")

    def _stop_trial(self) -> None:
        """Stop the trial under way. If the process does not answer, end the process."""
        try:
            write_frame(self._stdin.fileno(), Task())
            deadline = time.monotonic() + _ANSWER_SECONDS
            read_frame(self._stdout.fileno(), VERDICT_DECODER, deadline)
        except (OSError, EOFError, FrameTimeout):
            self.close()

    def kill(self) -> None:
        """Kill the process, so that `check` raises `CompileProcessDied`. `close` reaps it."""
        self._process.kill()

    def close(self) -> None:
        """Kill and reap the process. Idempotent."""
        self._process.kill()
        self._process.wait()
        self._stdin.close()
        self._stdout.close()


def _pipe(stream: IO[bytes] | None) -> IO[bytes]:
    assert stream is not None
    return stream
