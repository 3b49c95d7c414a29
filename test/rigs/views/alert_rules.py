"""Evaluates docs/monitoring/alerts.yml on what real servers export: a part of PromQL.

Two scrapes stand for a range of any length, as if what happened between them went on. `for` is
ignored, and series that are in the second scrape alone begin at 0.
"""

from __future__ import annotations

import math
import operator
import re
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

import yaml
from prometheus_client.parser import text_string_to_metric_families

from rigs.servers.engine_server import EngineServer

RULES: Final = Path(__file__).resolve().parents[3] / "docs" / "monitoring" / "alerts.yml"

Labels: TypeAlias = frozenset[tuple[str, str]]
Vector: TypeAlias = dict[Labels, float]
Value: TypeAlias = Vector | float

_TOKEN: Final = re.compile(r'\s*([\w:.]+|"[^"]*"|==|!=|>=|<=|=~|!~|[-+*/(){}\[\],=<>])')
_COMPARE: Final[dict[str, Callable[[float, float], bool]]] = {
    "==": operator.eq, "!=": operator.ne, ">": operator.gt, "<": operator.lt,
    ">=": operator.ge, "<=": operator.le,
}  # fmt: skip
_COMPUTE: Final[dict[str, Callable[[float, float], float]]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul,
    "/": lambda a, b: a / b if b else math.inf * a,
}  # fmt: skip
_AGGREGATE: Final[dict[str, Callable[[list[float]], float]]] = {
    "sum": sum, "count": lambda values: float(len(values)), "max": max, "min": min,
}  # fmt: skip
_MATCH: Final[dict[str, Callable[[str, str], bool]]] = {
    "=": operator.eq, "!=": operator.ne,
    "=~": lambda value, pattern: re.fullmatch(pattern, value) is not None,
    "!~": lambda value, pattern: re.fullmatch(pattern, value) is None,
}  # fmt: skip


class Scrape(NamedTuple):
    """Series that servers exported at `at` (seconds), by name."""

    at: float
    series: Mapping[str, Vector]


def scrape(*servers: EngineServer, job: str = "sglang") -> Scrape:
    """Scrape servers as Prometheus does, with its labels `job` and `instance`."""
    texts = {server.url: str(server.request("GET", "/metrics").body) for server in servers}
    return scrape_of(texts, time.monotonic(), job=job)


def scrape_of(texts: Mapping[str, str], at: float, job: str = "sglang") -> Scrape:
    """The same from texts that servers exported at `at`, by instance."""
    series: dict[str, Vector] = defaultdict(dict)
    for instance, text in texts.items():
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                labels = {**sample.labels, "job": job, "instance": instance}
                series[sample.name][frozenset(labels.items())] = sample.value
    return Scrape(at, series)


def differing_labels(scraped: Scrape, name: str) -> set[str]:
    """Labels, beside `instance`, in which the series of `name` differ."""
    series = [dict(labels) for labels in scraped.series[name]]
    return {one for one in series[0] if len({labels[one] for labels in series}) > 1} - {"instance"}


@cache
def rules() -> dict[str, str]:
    """Expression of each alert, by name."""
    groups = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    return {rule["alert"]: rule["expr"] for group in groups for rule in group["rules"]}


def firing(before: Scrape, after: Scrape) -> dict[str, list[dict[str, str]]]:
    """The alerts that fire if what happened between two scrapes goes on, each with the labels of
    its instances. `ServerDown` asks Prometheus itself, and is left out."""
    found = {}
    for name, expression in rules().items():
        if name != "ServerDown" and (vector := evaluate(expression, before, after)):
            assert isinstance(vector, dict), f"{name}: no vector"
            found[name] = [dict(labels) for labels in vector]
    return found


def evaluate(expression: str, before: Scrape, after: Scrape) -> Value:
    """The value of `expression`. Raises ValueError if it uses other parts of PromQL."""
    query = _Query(expression, before, after)
    value = query.sets()
    if query.tokens:
        raise ValueError(f"{expression}: {query.tokens[0]!r} is not understood here")
    return value


class _Query:
    """A recursive descent: one method for each precedence, the weakest first."""

    def __init__(self, expression: str, before: Scrape, after: Scrape) -> None:
        self.tokens: list[str] = _TOKEN.findall(expression)
        self._before, self._after = before, after

    def sets(self) -> Value:
        left = self._comparison()
        while self._next() in ("and", "unless", "or"):
            kind = self._take()
            on = self._labels() if self._skip("on") else None
            right = self._comparison()
            assert isinstance(left, dict) and isinstance(right, dict)
            there = {_only(labels, on) for labels in right}
            if kind == "or":
                known = {_only(labels, on) for labels in left}
                left = left | {at: v for at, v in right.items() if _only(at, on) not in known}
            else:
                wanted = kind == "and"
                left = {at: v for at, v in left.items() if (_only(at, on) in there) is wanted}
        return left

    def _comparison(self) -> Value:
        left = self._binary(("+", "-"), lambda: self._binary(("*", "/"), self._operand))
        while self._next() in _COMPARE:
            holds = _COMPARE[self._take()]
            right = self._binary(("+", "-"), lambda: self._binary(("*", "/"), self._operand))
            assert isinstance(left, dict), "a comparison filters a vector"
            left = {
                at: v for at, v in left.items() if (w := _at(right, at)) is not None and holds(v, w)
            }
        return left

    def _binary(self, signs: Sequence[str], operand: Callable[[], Value]) -> Value:
        left = operand()
        while self._next() in signs:
            compute = _COMPUTE[self._take()]
            right = operand()
            if isinstance(left, dict):
                left = {
                    at: compute(v, w) for at, v in left.items() if (w := _at(right, at)) is not None
                }
            elif isinstance(right, dict):
                left = {at: compute(left, w) for at, w in right.items()}
            else:
                left = compute(left, right)
        return left

    def _operand(self) -> Value:
        token = self._take()
        if token == "(":
            value = self.sets()
            self._expect(")")
            return value
        if token in _AGGREGATE:
            return self._aggregate(_AGGREGATE[token])
        if token == "histogram_quantile":
            return self._quantile()
        if token in ("rate", "increase", "delta"):
            self._expect("(")
            value = self._selected(self._take(), per_s=token == "rate", is_range=True)
            self._expect(")")
            return value
        if re.fullmatch(r"[\d.]+", token):
            return float(token)
        return self._selected(token)

    def _aggregate(self, aggregate: Callable[[list[float]], float]) -> Vector:
        self._expect("by")
        by = self._labels()
        groups: dict[Labels, list[float]] = defaultdict(list)
        for labels, value in self._vector().items():
            groups[_only(labels, by)].append(value)
        return {labels: aggregate(values) for labels, values in groups.items()}

    def _quantile(self) -> Vector:
        """The upper bound of the bucket; Prometheus interpolates within it."""
        self._expect("(")
        share = float(self._take())
        self._expect(",")
        counts: dict[Labels, list[tuple[float, float]]] = defaultdict(list)
        value = self.sets()
        self._expect(")")
        assert isinstance(value, dict)
        for labels, count in value.items():
            bound = float(dict(labels)["le"])
            counts[frozenset(one for one in labels if one[0] != "le")].append((bound, count))
        return {
            labels: next(bound for bound, count in sorted(below) if count >= share * max(below)[1])
            for labels, below in counts.items()
            if max(below)[1]
        }

    def _selected(self, name: str, *, per_s: bool = False, is_range: bool = False) -> Vector:
        conditions = []
        if self._skip("{"):
            while not self._skip("}"):
                label, match, value = self._take(), _MATCH[self._take()], self._take().strip('"')
                conditions.append((label, match, value))
                self._skip(",")
        vector = {
            labels: value
            for labels, value in self._after.series.get(name, {}).items()
            if all(match(dict(labels).get(label, ""), text) for label, match, text in conditions)
        }
        if not is_range:
            return vector
        self._expect("[")
        self._take()
        self._expect("]")
        old = self._before.series.get(name, {})
        seconds = max(self._after.at - self._before.at, 1e-3) if per_s else 1.0
        return {labels: (v - old.get(labels, 0.0)) / seconds for labels, v in vector.items()}

    def _vector(self) -> Vector:
        self._expect("(")
        value = self.sets()
        self._expect(")")
        assert isinstance(value, dict)
        return value

    def _labels(self) -> frozenset[str]:
        self._expect("(")
        names = []
        while not self._skip(")"):
            names.append(self._take())
            self._skip(",")
        return frozenset(names)

    def _next(self) -> str:
        return self.tokens[0] if self.tokens else ""

    def _take(self) -> str:
        if not self.tokens:
            raise ValueError("the expression ends too soon")
        token = self.tokens[0]
        del self.tokens[0]
        return token

    def _skip(self, token: str) -> bool:
        is_there = self._next() == token
        if is_there:
            self._take()
        return is_there

    def _expect(self, token: str) -> None:
        if (found := self._take()) != token:
            raise ValueError(f"{found!r} where {token!r} is due")


def _only(labels: Labels, names: frozenset[str] | None) -> Labels:
    return labels if names is None else frozenset(one for one in labels if one[0] in names)


def _at(value: Value, labels: Labels) -> float | None:
    return value.get(labels) if isinstance(value, dict) else value
