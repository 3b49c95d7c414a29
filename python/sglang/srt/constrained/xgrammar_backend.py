"""The grammar backend on the `xgrammar` library, with its cache and its order of compilations."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from transformers import PreTrainedTokenizerBase

from sglang.srt.constrained.compile_process import (
    CompileProcess,
    CompileProcessDied,
    CompileProcessError,
    FirstTryOver,
)
from sglang.srt.constrained.constraint import (
    JSON_OBJECT_SCHEMA,
    Constraint,
    ConstraintKind,
    GrammarError,
    Reasoning,
)
from sglang.srt.constrained.grammar import (
    Grammar,
    GrammarLimits,
    GrammarTicket,
    Vocabulary,
    compile_constraint,
    make_compiler,
)
from sglang.srt.constrained.schema_check import (
    prepare_json_schema,
    prepare_structural_tag,
    tag_after_reasoning,
)
from sglang.srt.utils.threads import started_pool

logger = logging.getLogger(__name__)


class GrammarCache:
    """Evicts the least recently used tickets that are done, by number and by the bytes of their
    grammars; a single grammar may be larger. It never evicts one whose grammar compiles.

    Failed tickets are kept too, so that an expensive constraint is refused at once the next time.
    No lock of its own; the owner's lock guards it.
    """

    def __init__(self, max_tickets: int, max_bytes: int) -> None:
        self._max_tickets = max_tickets
        self._max_bytes = max_bytes
        self._compiling: dict[Constraint, GrammarTicket] = {}
        self._done: OrderedDict[Constraint, GrammarTicket] = OrderedDict()

    @property
    def num_compiling(self) -> int:
        """Tickets that are not done."""
        return len(self._compiling)

    @property
    def num_done(self) -> int:
        """Tickets that are done, failed ones included."""
        return len(self._done)

    @property
    def num_bytes(self) -> int:
        return sum(map(_size_of, self._done.values()))

    def find(self, constraint: Constraint) -> GrammarTicket | None:
        """The ticket of a constraint, which becomes the most recently used one."""
        if constraint in self._done:
            self._done.move_to_end(constraint)
            return self._done[constraint]
        return self._compiling.get(constraint)

    def add_compiling(self, ticket: GrammarTicket) -> None:
        self._compiling[ticket.constraint] = ticket

    def finish(self, ticket: GrammarTicket, *, keep: bool) -> None:
        """Note that a ticket is done. `keep` False forgets it, so that the next request retries."""
        del self._compiling[ticket.constraint]
        if not keep:
            return
        self._done[ticket.constraint] = ticket
        while len(self._done) > self._max_tickets or (
            len(self._done) > 1 and self.num_bytes > self._max_bytes
        ):
            self._done.popitem(last=False)


def _size_of(ticket: GrammarTicket) -> int:
    # A failed ticket holds only its text, which is the key.
    has_failed = ticket.exception() is not None
    return len(ticket.constraint.text) if has_failed else ticket.result().size_bytes


@dataclass(slots=True)
class CompileJob:
    """A grammar that waits to be compiled."""

    ticket: GrammarTicket
    submitted_at: float
    """`time.monotonic()` seconds."""
    is_long: bool = False
    """True if the job may now use the whole compile timeout."""


class CompileQueue:
    """New jobs, and jobs whose first try was too short. `threads` jobs run at the same time.

    A first try is short. If it does not finish, the job continues while less than half of the
    threads run long jobs; otherwise it restarts later. Half of the threads stay free for first
    tries. The newest and the oldest job alternate: a client that queues many jobs does not delay
    the single job of another client, and no job waits for ever.

    No lock of its own; the owner's lock guards it.
    """

    def __init__(self, threads: int) -> None:
        self._max_long = max(threads // 2, 1)
        self._num_long = 0
        self._new: deque[CompileJob] = deque()
        self._retries: deque[CompileJob] = deque()
        self._newest_next = True

    def add(self, job: CompileJob) -> None:
        self._new.append(job)

    def take(self) -> CompileJob | None:
        """The job to run now; None: no job waits, or all that wait must wait for a long job to
        end."""
        if self._retries and self._num_long < self._max_long:
            job = self._retries.popleft()
            self.may_go_on(job)
            return job
        if not self._new:
            return None
        job = self._new.pop() if self._newest_next else self._new.popleft()
        self._newest_next = not self._newest_next
        return job

    def may_go_on(self, job: CompileJob) -> bool:
        """True if a job may use the whole compile timeout after its first try."""
        if not job.is_long and self._num_long < self._max_long:
            self._num_long += 1
            job.is_long = True
        return job.is_long

    def put_back(self, job: CompileJob) -> None:
        self._retries.append(job)

    def end(self, job: CompileJob) -> None:
        self._num_long -= job.is_long


_TRUSTED: Final = frozenset({Constraint(ConstraintKind.JSON_SCHEMA, JSON_OBJECT_SCHEMA)})
"""Constraints that the engine itself makes; they need no trial in a compile process."""


class XGrammarBackend:
    """Compiles constraints in threads of its own and caches the results.

    Owns up to `limits.compile_threads` threads `grammar-*`. Each thread tries a constraint in a
    compile process first, and then compiles it here without holding the interpreter lock. Compile
    processes are started on demand and replaced after they were killed. `_lock` guards the cache,
    the queue, the sets of idle and busy processes, and the flag `_closed`.

    Args:
        vocab_size: Columns of the model's logits; ids that the tokenizer lacks are never allowed.
        eos_token_ids: Tokens that end a completed grammar.
        any_whitespace: True if JSON may have whitespace between its tokens (up to 40 in a row).

    Raises:
        ValueError: There is no end token, or one is outside the vocabulary.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        limits: GrammarLimits,
        *,
        any_whitespace: bool = True,
    ) -> None:
        self._limits = limits
        self._any_whitespace = any_whitespace
        self._vocabulary = Vocabulary.from_tokenizer(tokenizer, vocab_size, eos_token_ids)
        self._compiler = make_compiler(self._vocabulary)
        self._lock = threading.Lock()
        self._cache = GrammarCache(limits.max_grammars, limits.max_cache_bytes)
        self._idle: list[CompileProcess] = []
        self._busy: set[CompileProcess] = set()
        self._closed = False
        self._queue = CompileQueue(limits.compile_threads)
        self._pool = started_pool(limits.compile_threads, "grammar")

    def get(self, constraint: Constraint) -> GrammarTicket:
        """The ticket of a constraint: compiled, compiling or failed. Never blocks."""
        ticket = GrammarTicket(constraint)
        refused = self._refuse_text(constraint.text)
        if refused is not None:
            ticket.fail(f"{constraint.kind.value}: {refused}")
            return ticket
        with self._lock:
            known_ticket = self._cache.find(constraint)
            if known_ticket is not None:
                return known_ticket
            if self._closed or self._cache.num_compiling >= self._limits.max_compiling:
                why = "the server is stopping" if self._closed else "too many are compiling"
                ticket.fail(f"{constraint.kind.value}: cannot be compiled now, {why}: retry later")
                return ticket
            self._cache.add_compiling(ticket)
            self._queue.add(CompileJob(ticket, time.monotonic()))
            self._pool.submit(self._work)
        return ticket

    def _refuse_text(self, text: str) -> str | None:
        try:
            size = len(text.encode())
        except UnicodeEncodeError:
            return "it has a lone surrogate, which no text can have: remove it"
        if size > self._limits.max_text_bytes:
            return f"{size} bytes are more than the {self._limits.max_text_bytes} allowed: shorten"
        return None

    def compile_now(self, constraint: Constraint) -> Grammar:
        """Compile in the calling thread, without a trial, because another rank has tried the
        constraint. Raises GrammarError if the text is not a grammar of its kind."""
        return self._compile_here(constraint, self._prepared(constraint))

    def close(self) -> None:
        """End threads and processes; compilations under way fail. Idempotent."""
        with self._lock:
            self._closed = True
            idle, busy = self._idle, list(self._busy)
            self._idle = []
        for process in busy:
            # The thread that uses the process closes it; the pipes belong to that thread.
            process.kill()
        for process in idle:
            process.close()
        # Queued jobs still run and fail at once, so that no request waits for its ticket for ever.
        self._pool.shutdown(wait=True)

    def _work(self) -> None:
        """Thread `grammar-*`: run jobs until the queue offers none.

        A job that stays in the queue waits for a long job to end; the thread of that job runs it.
        """
        while True:
            with self._lock:
                job = self._queue.take()
            if job is None:
                return
            try:
                self._run(job)
            except FirstTryOver:
                with self._lock:
                    self._queue.put_back(job)
            else:
                with self._lock:
                    self._queue.end(job)

    def _run(self, job: CompileJob) -> None:
        """Compile one grammar and finish its ticket. Raises FirstTryOver if the job must restart
        later."""
        ticket = job.ticket
        kind = ticket.constraint.kind.value
        message, keep, grammar = "", True, None
        try:
            waited = time.monotonic() - job.submitted_at
            if self._closed or waited > self._limits.queue_timeout:
                keep = False
                raise GrammarError(f"{kind}: waited {waited:.0f} s for a compile thread: retry")
            grammar = self._compile(job)
        except GrammarError as error:
            # A constraint after reasoning is compiled as a structural tag.
            cause = str(error).removeprefix(f"{ConstraintKind.STRUCTURAL_TAG.value}: ")
            message = f"{kind}: " + (
                "the server is stopping" if self._closed else cause.removeprefix(f"{kind}: ")
            )
            keep = keep and not isinstance(error, CompileProcessDied)
        except CompileProcessError as error:
            message, keep = f"{kind}: {error}", False
            logger.error("%s", error)
        except FirstTryOver:
            raise
        except Exception:
            logger.exception("compiling a %s failed", kind)
            message, keep = f"{kind}: compiling it failed inside the server; see its log", False
        if grammar is not None:
            ticket.set_result(grammar)
        else:
            ticket.fail(message)
        with self._lock:
            self._cache.finish(ticket, keep=keep)

    def _compile(self, job: CompileJob) -> Grammar:
        constraint = job.ticket.constraint
        prepared = self._prepared(constraint)

        def may_go_on() -> bool:
            with self._lock:
                return self._queue.may_go_on(job)

        if constraint not in _TRUSTED:
            process = self._take_process()
            try:
                process.check(prepared, may_go_on)
            finally:
                self._return_process(process)
        return self._compile_here(constraint, prepared)

    def _compile_here(self, constraint: Constraint, prepared: Constraint) -> Grammar:
        compiled = compile_constraint(self._compiler, prepared, any_whitespace=self._any_whitespace)
        return Grammar(compiled, constraint.kind, self._vocabulary, self._limits)

    def _take_process(self) -> CompileProcess:
        with self._lock:
            while self._idle:
                process = self._idle.pop()
                if process.is_running:
                    self._busy.add(process)
                    return process
                process.close()
        process = CompileProcess(
            self._vocabulary, self._limits, any_whitespace=self._any_whitespace
        )
        with self._lock:
            self._busy.add(process)
            closed = self._closed
        if closed:
            process.kill()
        return process

    def _return_process(self, process: CompileProcess) -> None:
        with self._lock:
            self._busy.discard(process)
            if not self._closed and process.is_reusable:
                self._idle.append(process)
                return
        process.close()

    def _prepared(self, constraint: Constraint) -> Constraint:
        """The constraint in the library's form. Raises GrammarError if the library would ignore a
        part of it, or the tokenizer lacks a token that it needs."""
        kind, text, reasoning = constraint
        if kind is ConstraintKind.JSON_SCHEMA:
            text = prepare_json_schema(text)
        elif kind is ConstraintKind.STRUCTURAL_TAG:
            return Constraint(kind, prepare_structural_tag(text))
        if reasoning is Reasoning.NONE:
            return Constraint(kind, text)
        tag = tag_after_reasoning(kind, text, reasoning, self._vocabulary.marks)
        return Constraint(ConstraintKind.STRUCTURAL_TAG, tag)
