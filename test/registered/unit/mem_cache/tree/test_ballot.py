"""The ballot: what ranks that saw different progress agree on."""

from __future__ import annotations

import pytest
import torch

from sglang.srt.mem_cache.tree.ballot import (
    MAX_PREFETCHES,
    MAX_SETTLED,
    PrefetchProgress,
    Progress,
    RanksDiverged,
    Rates,
    Verdict,
    agree,
    from_vector,
    to_vector,
)
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=1, suite="base-a-test-cpu")

FAILED, LANDED = Verdict.FAILED, Verdict.LANDED


def vote(*ranks: Progress) -> Progress:
    """What all of `ranks` agree on."""
    vectors = torch.stack([to_vector(rank) for rank in ranks])
    return from_vector(vectors.min(dim=0).values, len(ranks[0].prefetches))


def test_the_slowest_rank_decides() -> None:
    fast = Progress(writes=5, loads=3, prefetches=[PrefetchProgress(hit=8, landed=8, ended=True)])
    slow = Progress(writes=2, loads=4, prefetches=[PrefetchProgress(hit=6, landed=3)])
    agreed = vote(fast, slow)
    assert (agreed.writes, agreed.loads) == (2, 3)
    assert agreed.prefetches == [PrefetchProgress(hit=6, landed=3, ended=False, expired=False)]


def test_one_rank_whose_time_is_up_ends_the_wait_of_all() -> None:
    expired = Progress(prefetches=[PrefetchProgress(expired=True)])
    assert vote(expired, Progress(prefetches=[PrefetchProgress()])).prefetches[0].expired


def test_a_write_that_failed_on_one_rank_failed_for_all_and_holds_up_no_other() -> None:
    good = Progress(backups=[LANDED, LANDED, LANDED, LANDED])
    bad = Progress(backups=[LANDED, FAILED, FAILED])
    other = Progress(backups=[FAILED, LANDED, LANDED, LANDED])
    assert vote(good, bad).backups == [LANDED, FAILED, FAILED]
    assert vote(good, bad, other).backups == [FAILED, FAILED, FAILED]
    # Until one has ended everywhere, only those before it count.
    assert vote(good, bad, Progress(backups=[LANDED])).backups == [LANDED]
    assert vote(good, bad, Progress()).backups == []


def test_as_many_writes_as_there_are_slots_are_settled_in_a_tick() -> None:
    verdicts = [LANDED, FAILED] * (MAX_SETTLED // 2)
    reads = [PrefetchProgress(hit=8, landed=3, handed=5)] * MAX_PREFETCHES
    agreed = vote(Progress(backups=verdicts, prefetches=reads))
    assert agreed.backups == verdicts
    assert agreed.prefetches == reads


def test_what_one_rank_has_lost_is_lost_for_all_once_all_have_looked() -> None:
    found, missing = Progress(check=LANDED), Progress(check=FAILED)
    assert vote(found, missing).check is FAILED
    assert vote(found, found).check is LANDED
    assert vote(missing, Progress()).check is Verdict.UNDER_WAY


def test_unavailable_or_slow_anywhere_is_so_everywhere() -> None:
    agreed = vote(Progress(available=False, rates=Rates(9, 4)), Progress(rates=Rates(5, 7)))
    assert not agreed.available
    assert agreed.rates == (5, 4)
    assert vote(Progress(rates=Rates(9, 4)), Progress(reconnects=3)).rates == (0, 0)


def test_different_books_stop_the_ranks() -> None:
    with pytest.raises(RanksDiverged, match="differ"):
        vote(Progress(books_digest=7), Progress(books_digest=8))


def test_the_vector_has_one_size_whatever_happens() -> None:
    full = Progress(
        prefetches=[PrefetchProgress()] * MAX_PREFETCHES, backups=[LANDED] * MAX_SETTLED
    )
    assert len(to_vector(Progress())) == len(to_vector(full))


def test_one_rank_agrees_with_itself() -> None:
    progress = Progress(loads=1)
    assert agree(progress, None) is progress
    assert agree(progress, lambda vector: vector).loads == 1


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
