"""Metrics: a value that cannot be counted is logged once, and nothing is raised; tests raise it."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from sglang.srt.environ import envs
from sglang.srt.utils.metrics import (
    Counter,
    Gauge,
    Histogram,
    counts_by_label,
    join_metrics,
    render,
)
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=1, suite="base-a-test-cpu")


@pytest.fixture(name="serving")
def _serving() -> Iterator[None]:
    """Serve as a server does, where no test watches."""
    with envs.SGLANG_TEST_RAISE_METRIC_ERRORS.override(False):
        yield


def counter(registry: CollectorRegistry, *labels: str) -> Counter:
    return Counter("tokens", "Tokens", labels, registry=registry)


@pytest.mark.usefixtures("serving")
def test_a_negative_amount_is_logged_once_and_not_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    registry = CollectorRegistry()
    tokens = counter(registry)
    tokens.inc(3)
    for _ in range(5):
        tokens.inc(-1)
    tokens.inc(2)
    assert registry.get_sample_value("tokens_total") == 5
    (record,) = caplog.records
    assert record.levelno == logging.ERROR and "tokens" in record.getMessage()
    assert record.exc_info and isinstance(record.exc_info[1], ValueError), "with its traceback"


@pytest.mark.usefixtures("serving")
def test_wrong_labels_give_a_metric_that_is_not_exported(caplog: pytest.LogCaptureFixture) -> None:
    registry = CollectorRegistry()
    tokens = counter(registry, "tier")
    tokens.labels("device").inc()
    tokens.labels("device", "host").inc()
    tokens.labels(kind="device").inc()
    tokens.inc()
    counter_without = Counter("requests", "Requests", registry=registry)
    counter_without.labels("device").inc()
    assert registry.get_sample_value("tokens_total", {"tier": "device"}) == 1
    assert generate_latest(registry).decode().count("tokens_total{") == 1
    assert [record.args for record in caplog.records] == [("tokens",), ("requests",)]


@pytest.mark.usefixtures("serving")
def test_gauges_and_histograms_survive_what_is_no_number() -> None:
    registry = CollectorRegistry()
    gauge = Gauge("slots", "Slots", registry=registry)
    called = Gauge("queue", "Queue", registry=registry)
    seconds = Histogram("seconds", "Seconds", registry=registry)
    gauge.set(4)
    for call in (gauge.set, gauge.inc, gauge.dec, seconds.observe):
        call("four")  # type: ignore[arg-type]
    called.set_function(lambda: [][0])
    assert registry.get_sample_value("slots") == 4
    assert registry.get_sample_value("seconds_count") == 0
    assert "queue NaN" in generate_latest(registry).decode()


def test_a_test_gets_the_exception() -> None:
    registry = CollectorRegistry()
    with pytest.raises(ValueError, match="non-negative"):
        counter(registry).inc(-1)
    with pytest.raises(ValueError, match="label"):
        counter(registry=CollectorRegistry()).labels("device")


def test_every_sample_gets_the_labels_of_the_server() -> None:
    registry = CollectorRegistry()
    counter(registry, "tier").labels("device").inc(2)
    Gauge("free", "Free", registry=registry).set(7)
    Histogram("wait", "Wait", registry=registry, buckets=(1,)).observe(0.5)
    lines = render(registry, {"model_name": 'a "b"'}).splitlines()
    samples = [line for line in lines if not line.startswith("#")]
    assert all('model_name="a \\"b\\""' in sample for sample in samples)
    assert 'tokens_total{model_name="a \\"b\\"",tier="device"} 2.0' in samples
    assert 'wait_bucket{le="1.0",model_name="a \\"b\\""} 1.0' in samples
    assert "# TYPE tokens_total counter" in lines
    assert "# TYPE wait histogram" in lines


def test_counts_are_read_back() -> None:
    one = counter(CollectorRegistry(), "reason")
    assert counts_by_label(one) == {}
    one.labels("miss").inc(2)
    one.labels("late").inc()
    assert counts_by_label(one) == {"miss": 2, "late": 1}
    assert one.labels("miss").count == 2


def test_texts_of_several_groups_have_each_name_once() -> None:
    texts = []
    for group in ("0", "1"):
        registry = CollectorRegistry()
        counter = Counter("sglang:c", "Count", ["kind"], registry=registry)
        counter.labels("a").inc(2)
        Gauge("sglang:g", "Gauge", registry=registry).set(3)
        texts.append(render(registry, {"dp_rank": group}))
    text = join_metrics([texts[0], "# the scheduler's metrics are missing\n", texts[1]])
    assert text.count("# TYPE sglang:c_total counter") == text.count("# HELP sglang:g ") == 1
    for family in text_string_to_metric_families(text.partition("\n")[2]):
        assert [sample.labels["dp_rank"] for sample in family.samples] == ["0", "1"]
    assert text.startswith("# the scheduler's metrics are missing\n")
    assert join_metrics(texts[:1]) == texts[0]
