"""The order in which grammars compile, so that long compilations do not delay short ones."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from sglang.srt.constrained.base_grammar_backend import GrammarTicket


@dataclass(slots=True)
class CompileJob:
    """A grammar that waits to be compiled."""

    ticket: GrammarTicket
    submitted_at: float
    """`time.monotonic()` seconds."""
    is_long: bool = False
    """Whether the job may now use the whole compile timeout."""


class CompileQueue:
    """New jobs, and jobs whose first try was too short.

    A first try is short. If it does not finish, the job continues while less than half of the
    threads run long jobs; otherwise it restarts later. Half of the threads stay free for first
    tries. The newest and the oldest job alternate: a client that queues many jobs does not delay
    the single job of another client, and no job waits for ever.

    No lock of its own; the owner's lock guards it.

    Args:
        threads: Jobs that run at the same time.
    """

    def __init__(self, threads: int) -> None:
        self._max_long = max(threads // 2, 1)
        self._num_long = 0
        self._new: deque[CompileJob] = deque()
        self._retries: deque[CompileJob] = deque()
        self._newest_next = True

    def add(self, job: CompileJob) -> None:
        """Queue a new job."""
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
        """Whether a job may use the whole compile timeout after its first try."""
        if not job.is_long and self._num_long < self._max_long:
            self._num_long += 1
            job.is_long = True
        return job.is_long

    def put_back(self, job: CompileJob) -> None:
        """Queue a job to restart later, because it may not go on now."""
        self._retries.append(job)

    def end(self, job: CompileJob) -> None:
        """Note that a job is done."""
        self._num_long -= job.is_long
