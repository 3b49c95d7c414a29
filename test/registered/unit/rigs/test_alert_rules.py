"""The part of PromQL in which alerts are tested, by hand-made scrapes."""

from __future__ import annotations

import math

import pytest

from rigs.views.alert_rules import Scrape, Value, differing_labels, evaluate, firing, rules
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=1, suite="base-a-test-cpu")


def at(seconds: float, **series: dict[str, float]) -> Scrape:
    """A scrape; `series`: name to values by the text of labels, as in `a=1,b=2`."""
    return Scrape(
        seconds,
        {
            name: {
                frozenset(tuple(one.split("=")) for one in labels.split(",") if one): value  # type: ignore[misc]
                for labels, value in values.items()
            }
            for name, values in series.items()
        },
    )


BEFORE = at(100.0, c={"i=a,r=x": 10, "i=b,r=x": 5}, g={"i=a": 1})
AFTER = at(
    110.0,
    c={"i=a,r=x": 30, "i=a,r=y": 10, "i=b,r=x": 5}, g={"i=a": 4, "i=b": math.nan},
    h_bucket={"i=a,le=1": 5, "i=a,le=2": 9, "i=a,le=+Inf": 10},
)  # fmt: skip


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("g", {"i=a": 4, "i=b": math.nan}),
        ("g > 3", {"i=a": 4}),
        ("g < 3", {}),
        ('rate(c{r="x"}[5m])', {"i=a,r=x": 2, "i=b,r=x": 0}),
        ('increase(c{r=~"y|z"}[5m])', {"i=a,r=y": 10}),
        ("sum by (i) (increase(c[1h]))", {"i=a": 30, "i=b": 0}),
        ('sum by (i) (rate(c{r="x"}[5m])) / sum by (i) (rate(c[5m])) > 0.5', {"i=a": 2 / 3}),
        ("count by (r) (c) == 2", {"r=x": 2}),
        ("g + 1 * 2 - 3", {"i=a": 3, "i=b": math.nan}),
        ("(g + 1) * 2 > 9", {"i=a": 10}),
        ("c and on (i) g > 3", {"i=a,r=x": 30, "i=a,r=y": 10}),
        ("c unless on (i) g > 3", {"i=b,r=x": 5}),
        ('c{r="y"} or c{i="b"}', {"i=a,r=y": 10, "i=b,r=x": 5}),
        ("histogram_quantile(0.8, rate(h_bucket[5m]))", {"i=a": 2}),
        ("no_such_metric > 0", {}),
    ],
)
def test_expressions_are_evaluated(expression: str, expected: dict[str, float]) -> None:
    found: Value = evaluate(expression, BEFORE, AFTER)
    assert isinstance(found, dict)
    values = at(0.0, v=expected).series["v"]
    assert found.keys() == values.keys()
    assert list(found.values()) == pytest.approx([values[one] for one in found], nan_ok=True)


def test_other_parts_are_refused() -> None:
    for expression in ("avg(g)", "g offset 5m", "g > bool 3"):
        with pytest.raises((ValueError, AssertionError)):
            evaluate(expression, BEFORE, AFTER)


def test_all_rules_are_understood_and_none_fires_without_servers() -> None:
    assert len(rules()) > 15
    assert firing(at(0.0), at(1.0)) == {}


def test_labels_that_differ_are_found() -> None:
    scraped = at(0.0, info={"instance=a,p=1,q=2": 1, "instance=b,p=1,q=3": 1})
    assert differing_labels(scraped, "info") == {"q"}
