"""Prometheus' types of metrics, with calls that never raise.

A wrong amount or label is a mistake of the code that counts, and must not end a tick or a thread.
It is logged as an error, with its traceback, once for each metric; the value is not counted. Tests
set `SGLANG_TEST_RAISE_METRIC_ERRORS`, so that the mistake is raised.

No other module imports these types from `prometheus_client`. Any thread may count.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

import prometheus_client
from prometheus_client import CollectorRegistry
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.metrics_core import Metric

from sglang.srt.environ import envs

logger = logging.getLogger(__name__)

_P = ParamSpec("_P")
_M = TypeVar("_M", bound="_Metric")


class _Metric(MetricWrapperBase):
    _is_reported = False

    def labels(self: _M, *labelvalues: Any, **labelkwargs: Any) -> _M:
        """The metric with these values of its labels; for wrong ones, one that is not exported."""
        try:
            return super().labels(*labelvalues, **labelkwargs)
        except Exception as error:  # noqa: BLE001 - `report` logs it
            self.report(error)
            return type(self)(self._name, self._documentation, registry=None)

    def report(self, error: Exception) -> None:
        """Log the first mistake of this metric. Tests: raise any."""
        if envs.SGLANG_TEST_RAISE_METRIC_ERRORS.get():
            raise error
        if not self._is_reported:
            self._is_reported = True
            logger.error("metric %s: a value is not counted", self._name, exc_info=error)


def _harmless(call: Callable[Concatenate[_M, _P], None]) -> Callable[Concatenate[_M, _P], None]:
    """`call`, a method that changes a value, with its exceptions reported."""

    @functools.wraps(call)
    def wrapped(self: _M, /, *args: _P.args, **kwargs: _P.kwargs) -> None:
        try:
            call(self, *args, **kwargs)
        except Exception as error:  # noqa: BLE001 - `report` logs it
            self.report(error)

    return wrapped


class Counter(_Metric, prometheus_client.Counter):
    """A count that only rises."""

    @property
    def count(self) -> int:
        """The count now, of a counter of whole numbers."""
        return int(self._value.get())

    @_harmless
    def inc(self, amount: float = 1, exemplar: dict[str, str] | None = None) -> None:
        super().inc(amount, exemplar)


class Gauge(_Metric, prometheus_client.Gauge):
    """A number that rises and falls."""

    @_harmless
    def inc(self, amount: float = 1) -> None:
        super().inc(amount)

    @_harmless
    def dec(self, amount: float = 1) -> None:
        super().dec(amount)

    @_harmless
    def set(self, value: float) -> None:
        super().set(value)

    def set_function(self, f: Callable[[], float]) -> None:
        """Let `f` give the value whenever the metrics are read; NaN where it raises."""

        def value() -> float:
            try:
                return float(f())
            except Exception as error:  # noqa: BLE001 - `report` logs it
                self.report(error)
                return math.nan

        super().set_function(value)


class Histogram(_Metric, prometheus_client.Histogram):
    """Counts of values by size."""

    @_harmless
    def observe(self, amount: float, exemplar: dict[str, str] | None = None) -> None:
        super().observe(amount, exemplar)


class MetricFactory:
    """Makes the metrics of one registry. Their names begin with `sglang:`.

    Args:
        registry: None: one of their own, which nobody reads.
    """

    def __init__(self, registry: CollectorRegistry | None) -> None:
        self.registry = registry or CollectorRegistry()

    def counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"sglang:{name}", text, labels, registry=self.registry)

    def gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"sglang:{name}", text, labels, registry=self.registry)

    def histogram(self, name: str, text: str, buckets: Sequence[float], *labels: str) -> Histogram:
        return Histogram(f"sglang:{name}", text, labels, registry=self.registry, buckets=buckets)


def counts_by_label(counter: Counter) -> dict[str, int]:
    """The counts of a counter with one label, by the label's values."""
    return {
        value: int(sample.value)
        for family in counter.collect()
        for sample in family.samples
        if sample.name.endswith("_total")
        for value in sample.labels.values()
    }


class _Labelled:
    """A registry whose samples all have `labels` too."""

    def __init__(self, registry: CollectorRegistry, labels: Mapping[str, str]) -> None:
        self._registry = registry
        self._labels = labels

    def collect(self) -> Iterator[Metric]:
        for family in self._registry.collect():
            labelled = Metric(family.name, family.documentation, family.type, family.unit)
            labelled.samples = [
                sample._replace(labels={**self._labels, **sample.labels})
                for sample in family.samples
            ]
            yield labelled


def render(registry: CollectorRegistry, labels: Mapping[str, str]) -> str:
    """All metrics of `registry` in Prometheus' text format. Each sample gets `labels` here, so that
    counting does not pay for labels that never change."""
    return prometheus_client.generate_latest(_Labelled(registry, labels)).decode()


def join_metrics(texts: Sequence[str]) -> str:
    """One text of several that `render` has made, with the samples of a metric together, as
    Prometheus' text format wants them. Their labels must differ."""
    families: dict[str, list[str]] = {}
    for text in texts:
        lines = families.setdefault("", [])
        for line in text.splitlines(keepends=True):
            if line.startswith("# HELP "):
                lines = families.setdefault(line, [])
            elif not (line.startswith("# TYPE ") and lines):
                lines.append(line)
    return "".join(head + "".join(lines) for head, lines in families.items())
