"""Processes that a test file starts do not import the file again."""

from __future__ import annotations

import sys
from types import ModuleType

from rigs.step_processes import without_program
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=1, suite="base-a-test-cpu")


def test_modules_that_another_thread_imports_while_a_process_starts_stay() -> None:
    program, imported = sys.modules["__main__"], ModuleType("imported_meanwhile")
    with without_program():
        assert not hasattr(sys.modules["__main__"], "__file__")
        sys.modules[imported.__name__] = imported
    assert sys.modules["__main__"] is program
    assert sys.modules.pop(imported.__name__) is imported
