"""Alerts or views name the twelve faults; the guide lists them, and tests plant them."""

from __future__ import annotations

import ast

from rigs.views.alert_rules import rules
from rigs.views.all_faults import FAULTS, ROOT
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=1, suite="base-a-test-cpu")


def test_each_fault_is_named_by_something_and_has_tests() -> None:
    guide = (ROOT / "docs/guides/operation.md").read_text(encoding="utf-8")
    assert len({fault.what for fault in FAULTS}) == len(FAULTS) == 12
    for fault in FAULTS:
        assert fault.alerts or fault.view, fault.what
        for alert in fault.alerts:
            assert alert in rules(), fault.what
            assert f"`{alert}`" in guide, fault.what
        assert fault.tests, fault.what
        for test in fault.tests:
            path, _, name = test.partition("::")
            tree = ast.parse((ROOT / "test" / "registered" / path).read_text(encoding="utf-8"))
            found = {one.name for one in tree.body if isinstance(one, ast.FunctionDef)}
            assert name in found, test
