"""The compile process: tries each grammar apart from the engine, within bounds of time and memory.

A grammar library is native code that cannot be interrupted, and a few hundred bytes can make it
run for hours or fill the machine. So this process compiles each constraint first: it has a memory
limit, and the engine can kill it. The engine then compiles the constraints that passed. It does not
receive the result, since the serialized form can be a thousand times as large as the grammar.

Each trial runs in a fork of this process. A fork takes milliseconds and a new process seconds of
imports, so that killing one trial does not delay the next.
"""

from __future__ import annotations

import contextlib
import os
import random
import resource
import signal
import sys
import threading
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Final

import numpy as np
import psutil
import xgrammar

from sglang.srt.constrained.compile_process import (
    HELLO_DECODER,
    RESULT_DECODER,
    TASK_DECODER,
    Hello,
    TrialResult,
    receive,
    send,
)
from sglang.srt.constrained.constraint import Constraint, GrammarError
from sglang.srt.constrained.grammar import (
    Grammar,
    allocate_bitmask,
    cause_of,
    compile_constraint,
    make_compiler,
)
from sglang.srt.utils.process import die_with_parent, start_parent_watch

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
