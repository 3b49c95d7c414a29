"""The ballot: what ranks that saw different progress agree on."""

from __future__ import annotations

import pytest
import torch

from sglang.srt.mem_cache.ballot import (
    MAX_PREFETCHES,
    NONE_FAILED,
    PrefetchProgress,
    Progress,
    QueueProgress,
    RanksDiverged,
    agree,
    from_vector,
    to_vector,
)
from sglang.srt.mem_cache.fetch_worth import Rates
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=1, suite="base-a-test-cpu")


def vote(*ranks: Progress) -> Progress:
    """What all of `ranks` agree on."""
    vectors = torch.stack([to_vector(rank) for rank in ranks])
    return from_vector(vectors.min(dim=0).values, len(ranks[0].prefetches))


def test_the_slowest_rank_decides() -> None:
    fast = Progress(
        queues={"write": QueueProgress(done=5)},
        prefetches=[PrefetchProgress(hit=8, landed=8, ended=True)],
    )
    slow = Progress(
        queues={"write": QueueProgress(done=2)},
        prefetches=[PrefetchProgress(hit=6, landed=3)],
    )
    agreed = vote(fast, slow)
    assert agreed.queues["write"] == QueueProgress(2, NONE_FAILED)
    assert agreed.prefetches == [PrefetchProgress(hit=6, landed=3, ended=False, expired=False)]


def test_one_rank_whose_time_is_up_ends_the_wait_of_all() -> None:
    expired = Progress(prefetches=[PrefetchProgress(expired=True)])
    assert vote(expired, Progress(prefetches=[PrefetchProgress()])).prefetches[0].expired


def test_a_failure_on_one_rank_is_a_failure_for_all_in_its_turn() -> None:
    good = Progress(queues={"backup": QueueProgress(done=4)})
    bad = Progress(queues={"backup": QueueProgress(done=3, first_failed=1)})
    backup = vote(good, bad).queues["backup"]
    assert (backup.successes, backup.failure_follows) == (1, True)
    # Until the failed one is done everywhere, only what came before it counts.
    waiting = Progress(queues={"backup": QueueProgress(done=1)})
    assert not vote(waiting, bad).queues["backup"].failure_follows


def test_what_one_rank_has_lost_is_lost_for_all_once_all_have_looked() -> None:
    there, lost = QueueProgress(done=1), QueueProgress(done=1, first_failed=0)
    found = Progress(queues={"check": there})
    missing = Progress(queues={"check": lost})
    agreed = vote(found, missing).of_queue("check")
    assert agreed.done == 1
    assert agreed.failure_follows
    assert not vote(found, found).of_queue("check").failure_follows
    assert vote(missing, Progress()).of_queue("check").done == 0


def test_unavailable_or_slow_anywhere_is_so_everywhere() -> None:
    agreed = vote(Progress(available=False, rates=Rates(9, 4)), Progress(rates=Rates(5, 7)))
    assert not agreed.available
    assert agreed.rates == (5, 4)
    assert vote(Progress(rates=Rates(9, 4)), Progress(reconnects=3)).rates == (0, 0)


def test_different_books_stop_the_ranks() -> None:
    with pytest.raises(RanksDiverged, match="differ"):
        vote(Progress(books_digest=7), Progress(books_digest=8))


def test_the_vector_has_one_size_whatever_happens() -> None:
    full = Progress(prefetches=[PrefetchProgress()] * MAX_PREFETCHES)
    assert len(to_vector(Progress())) == len(to_vector(full))


def test_one_rank_agrees_with_itself() -> None:
    progress = Progress(queues={"load": QueueProgress(done=1)})
    assert agree(progress, None) is progress
    assert agree(progress, lambda vector: vector).queues["load"].done == 1


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
