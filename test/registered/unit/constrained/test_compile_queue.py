"""The order of compilations: long jobs leave threads free, and a burst does not delay others."""

from __future__ import annotations

import pytest

from sglang.srt.constrained.constraint import Constraint, ConstraintKind
from sglang.srt.constrained.grammar import GrammarTicket
from sglang.srt.constrained.xgrammar_backend import CompileJob, CompileQueue
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=1, suite="base-a-test-cpu")


def job(name: str) -> CompileJob:
    return CompileJob(GrammarTicket(Constraint(ConstraintKind.REGEX, name)), 0.0)


def filled(names: str, threads: int = 2) -> CompileQueue:
    queue = CompileQueue(threads)
    for name in names:
        queue.add(job(name))
    return queue


def take(queue: CompileQueue) -> CompileJob:
    taken = queue.take()
    assert taken is not None
    return taken


def name_of(taken: CompileJob) -> str:
    return taken.ticket.constraint.text


def test_new_jobs_run_newest_and_oldest_in_turn() -> None:
    queue = filled("abcde")
    assert "".join(name_of(take(queue)) for _ in range(5)) == "eadbc"
    assert queue.take() is None


@pytest.mark.parametrize(("threads", "most"), [(1, 1), (2, 1), (4, 2)])
def test_at_most_half_of_the_threads_run_long_jobs(threads: int, most: int) -> None:
    queue = filled("abcdef", threads)
    jobs = [take(queue) for _ in range(threads)]
    assert sum(queue.may_go_on(one) for one in jobs) == most
    assert queue.may_go_on(jobs[0])  # asking again changes nothing


def test_a_job_put_back_runs_first_after_a_long_job_ended() -> None:
    queue = filled("abcd")
    long, over = take(queue), take(queue)
    assert queue.may_go_on(long)
    assert not queue.may_go_on(over)
    queue.put_back(over)
    assert [name_of(take(queue)), name_of(take(queue))] == ["c", "b"]
    assert queue.take() is None  # `over` waits for `long`
    queue.end(long)
    assert take(queue) is over
    assert over.is_long
    queue.end(over)
    queue.add(job("e"))
    assert queue.may_go_on(take(queue))
