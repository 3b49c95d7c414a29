"""How full L3 is: asked now and then, never waited for, whatever the backend does."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, StorageUnavailable, StorageUsage
from sglang.srt.mem_cache.l3.store_usage import StoreUsage
from sglang.srt.utils.network import wait_until
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=1, suite="base-a-test-cpu")


class Client(HiCacheStorage):
    """Answers as the test says."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer
        self.num_asked = 0
        self.goes_on = threading.Event()
        self.goes_on.set()

    def get_usage(self) -> StorageUsage | None:
        self.num_asked += 1
        self.goes_on.wait(60)
        if isinstance(self.answer, Exception):
            raise self.answer
        answer: StorageUsage | None = self.answer
        return answer

    def get(self, key: str, *args: Any, **more: Any) -> None:
        raise AssertionError

    def set(self, key: str, *args: Any, **more: Any) -> bool:
        raise AssertionError

    def exists(self, key: str) -> bool:
        raise AssertionError


def test_the_answer_comes_with_a_later_call_and_is_kept_for_ten_seconds() -> None:
    client, usage, now = Client(StorageUsage(5, 10)), StoreUsage(), 100.0
    assert usage.latest(client, lambda: now) is None
    assert wait_until(lambda: usage.latest(client, lambda: now) is not None, 30)
    assert usage.latest(client, lambda: now) == StorageUsage(5, 10)
    client.answer = StorageUsage(6, 10)
    now = 109.9
    usage.latest(client, lambda: now)
    assert client.num_asked == 1
    now = 110.0
    assert usage.latest(client, lambda: now) == StorageUsage(5, 10)
    assert wait_until(lambda: usage.latest(client, lambda: now) == StorageUsage(6, 10), 30)
    assert client.num_asked == 2


def test_a_question_that_hangs_is_the_only_one() -> None:
    client, usage = Client(None), StoreUsage()
    client.goes_on.clear()
    for now in (100.0, 200.0, 300.0):
        assert usage.latest(client, lambda now=now: now) is None  # type: ignore[misc]
    assert wait_until(lambda: client.num_asked == 1, 30)
    assert client.num_asked == 1
    client.goes_on.set()


@pytest.mark.parametrize("answer", [StorageUnavailable("gone"), OSError("no"), "half full"])
def test_failures_are_logged_and_the_usage_is_unknown(
    answer: object, caplog: pytest.LogCaptureFixture
) -> None:
    client, usage = Client(answer), StoreUsage()
    usage.latest(client, lambda: 100.0)

    def is_logged() -> bool:
        assert usage.latest(client, lambda: 100.0) is None
        return "L3 does not tell how full it is" in caplog.text

    assert wait_until(is_logged, 30)
    for now in (110.0, 120.0, 130.0):
        usage.latest(client, lambda now=now: now)  # type: ignore[misc]
        question = usage._question
        assert question is not None and wait_until(lambda one=question: one.ended, 30)  # type: ignore[misc]
    told = [one for one in caplog.records if "how full" in one.getMessage()]
    assert len(told) == 1, "failures in a row are one line"


def test_nodes_of_answers_are_noted(caplog: pytest.LogCaptureFixture) -> None:
    client, usage, now = Client(StorageUsage(nodes=("a:1", "b:1"))), StoreUsage(), 100.0
    for answer in (("a:1", "b:1"), ("b:1",), ("b:1",), ("b:1",)):
        client.answer = StorageUsage(nodes=answer, unlike_nodes=("b:1 (rdma)",))
        asked = client.num_asked
        usage.latest(client, lambda now=now: now)  # type: ignore[misc]
        assert wait_until(lambda asked=asked: client.num_asked == asked + 1, 30)  # type: ignore[misc]
        question = usage._question
        assert question is not None and wait_until(lambda one=question: one.ended, 30)  # type: ignore[misc]
        now += 10.0
    usage.latest(client, lambda: now)
    assert usage.nodes.serving() == {"a:1": False, "b:1": True}
    assert caplog.text.count("store node b:1 (rdma) has another protocol") == 1


def test_without_a_client_nobody_is_asked() -> None:
    assert StoreUsage().latest(None) is None
