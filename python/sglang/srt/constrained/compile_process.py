"""The compile process, which tries each grammar outside the engine, and the engine's side of it.

A grammar library is native code that cannot be interrupted, and a few hundred bytes can make it
run for hours or fill the machine. Therefore the compile process, which has a memory limit and can
be killed, compiles each constraint first. The engine then compiles the constraints that passed. The
process does not send its result, because the serialized form can be a thousand times as large as
the grammar.

Each trial runs in a fork of the process. A fork takes milliseconds and a new process seconds of
imports, so that killing one trial does not delay the next.
"""

from __future__ import annotations

import contextlib
import os
import random
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Final, TypeVar

import msgspec
import numpy as np
import psutil
import xgrammar

from sglang.srt.constrained.constraint import Constraint, ConstraintKind, GrammarError
from sglang.srt.constrained.grammar import (
    Grammar,
    GrammarLimits,
    Vocabulary,
    allocate_bitmask,
    cause_of,
    compile_constraint,
    make_compiler,
)
from sglang.srt.utils.process import die_with_parent, start_parent_watch

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
    """Receive one message. Raises TimeoutError if none comes within `seconds` (None waits for
    ever), and EOFError if the other end is closed."""
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
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(os.getpid()), str(child_end.fileno())],
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


_PROBE_STEPS: Final = 32
_NICENESS: Final = 5


def probe(grammar: Grammar, vocab_size: int) -> None:
    """Walk the grammar for some tokens: first at random, then repeating one token where allowed.
    Repetition reveals ambiguity. A grammar that becomes slow later ends its own request.

    Raises:
        GrammarError: The walk took more time than a matcher may use, or reached a dead end.
    """
    rng = random.Random(0)
    bitmask = allocate_bitmask(1, vocab_size)
    for repeat in (False, True):
        matcher = grammar.matcher()
        last = -1
        for _ in range(_PROBE_STEPS):
            matcher.fill_next_token_bitmask(bitmask, 0)
            bits = np.unpackbits(bitmask.numpy().view(np.uint8), bitorder="little")
            allowed = np.flatnonzero(bits[:vocab_size])
            if allowed.size == 0:
                raise GrammarError("the grammar allows no text, or has a dead end")
            if not (repeat and last >= 0 and bits[last]):
                last = int(allowed[0] if repeat else rng.choice(allowed))
            matcher.accept_token(last)
            if matcher.failure is not None:
                raise GrammarError(matcher.failure)
            if matcher.is_terminated():
                break


def serve(engine: Connection) -> None:
    """Answer tasks until the pipe to the engine closes."""
    hello = receive(engine, HELLO_DECODER)
    compiler = make_compiler(hello.vocabulary)
    ceiling = psutil.Process().memory_info().vms + hello.limits.compile_memory
    send(engine, TrialResult())
    while True:
        task = receive(engine, TASK_DECODER)
        if task.kind is None:
            continue  # The trial that it was to stop has just ended.
        constraint = Constraint(task.kind, task.text)

        def trial(constraint: Constraint = constraint) -> TrialResult:
            resource.setrlimit(resource.RLIMIT_AS, (ceiling, ceiling))
            return _try(compiler, constraint, hello)

        send(engine, _forked(trial, engine))


def _forked(trial: Callable[[], TrialResult], engine: Connection) -> TrialResult:
    """Run `trial` in a fork, which is killed as soon as the engine sends anything."""
    reader, writer = Pipe(duplex=False)
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            die_with_parent(parent)
            send(writer, trial())
        finally:
            os._exit(0)
    writer.close()
    try:
        if reader in wait([reader, engine]):
            return receive(reader, RESULT_DECODER)
    except EOFError:
        pass
    finally:
        reader.close()
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return TrialResult(has_died=True)


def _try(compiler: xgrammar.GrammarCompiler, constraint: Constraint, hello: Hello) -> TrialResult:
    limits, vocabulary = hello.limits, hello.vocabulary
    try:
        compiled = compile_constraint(compiler, constraint, any_whitespace=hello.any_whitespace)
        grammar = Grammar(compiled, constraint.kind, vocabulary, limits)
        if grammar.size_bytes > limits.max_grammar_bytes:
            size, most = grammar.size_bytes >> 20, limits.max_grammar_bytes >> 20
            return TrialResult(
                f"it compiles to {size} MiB, more than the {most} allowed: simplify it"
            )
        probe(grammar, len(vocabulary.tokens))
    except (GrammarError, RuntimeError, MemoryError) as error:
        return TrialResult(cause_of(error))
    return TrialResult()


def main() -> None:
    """Entry point. Arguments: the process id of the engine's process, and the descriptor of the
    pipe to it."""
    os.nice(_NICENESS)
    start_parent_watch(int(sys.argv[1]), lambda: os._exit(0))
    # A thread has a stack of the same size as the engine's compile threads.
    engine = Connection(int(sys.argv[2]))
    thread = threading.Thread(target=_serve_until_closed, args=(engine,), name="compile")
    thread.start()
    thread.join()


def _serve_until_closed(engine: Connection) -> None:
    with contextlib.suppress(EOFError, ConnectionError):
        serve(engine)


if __name__ == "__main__":
    main()
