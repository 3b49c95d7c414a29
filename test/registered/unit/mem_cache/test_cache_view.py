"""Words of `GET /hicache` for people: reasons, and what is wrong with the tiers."""

from __future__ import annotations

from typing import Any

import pytest

from sglang.srt.mem_cache.cache_view import PLAIN_WORDS, verdicts
from sglang.srt.mem_cache.l3.storage_backup import NoWrite
from sglang.srt.mem_cache.l3.storage_prefetch import NoRead
from sglang.srt.mem_cache.storage.types import CacheOutcome
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=1, suite="base-a-test-cpu")

QUIET = {"hit_device": 0, "hit_host": 0, "hit_storage": 0, "computed": 0, "evicted_device": 0}


def test_each_reason_has_a_text_for_people() -> None:
    assert PLAIN_WORDS.keys() == {
        str(one) for kind in (CacheOutcome, NoRead, NoWrite) for one in kind
    }
    assert not [text for text in PLAIN_WORDS.values() if "_" in text]
    assert len(set(PLAIN_WORDS.values())) == len(PLAIN_WORDS)


def after(age_s: float = 60.0, **counts: int) -> list[dict[str, Any]]:
    return [{"age_s": age_s, "counts": QUIET}, {"age_s": 0.0, "counts": {**QUIET, **counts}}]


def test_a_device_cache_that_thrashes_is_told_with_the_remedy() -> None:
    (told,) = verdicts(after(hit_host=6000, computed=4000, evicted_device=8000), 4096)
    assert told.startswith(
        "L1 is too small for the prompts in use: in the last 60 s it evicted 8,000"
    )
    assert "60% of the prompts' tokens" in told and "Raise --mem-fraction-static" in told


@pytest.mark.parametrize(
    "counts",
    [
        {},
        {"hit_host": 4000, "computed": 6000, "evicted_device": 8000},
        {"hit_host": 9000, "computed": 1000, "evicted_device": 5000},
        # Less than the pool has been evicted: it is taking up another load.
        {"hit_host": 900, "computed": 100, "evicted_device": 1000},
    ],
)
def test_nothing_is_wrong_otherwise(counts: dict[str, int]) -> None:
    assert verdicts(after(**counts), 4096) == []


def test_only_the_last_minutes_count() -> None:
    old = after(400.0, hit_host=6000, computed=4000, evicted_device=8000)
    steady = {"age_s": 200.0, "counts": old[1]["counts"]}
    assert verdicts([old[0], steady, old[1]], 4096) == []


def test_a_cache_without_lower_tiers_has_no_such_verdict() -> None:
    history = [{"age_s": age, "counts": {"computed": n, "hit_device": n, "evicted_device": n}}
               for age, n in ((60.0, 0), (0.0, 9000))]  # fmt: skip
    assert verdicts(history, 4096) == []
