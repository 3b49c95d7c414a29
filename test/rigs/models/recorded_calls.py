"""A module that records calls to it, for tests of code that drives a device's library."""

from __future__ import annotations

import importlib.machinery
import types
from collections.abc import Mapping
from typing import Any


class RecordedCalls:
    """Stands for a module or whatever comes of calling it. A call is logged as it is written.

    Args:
        log: Gets one line for each call.
        answers: Results of calls, by their text; other calls return a `RecordedCalls`.
    """

    def __init__(self, log: list[str], answers: Mapping[str, Any], name: str = "") -> None:
        self._log = log
        self._answers = answers
        self._name = name

    def __getattr__(self, name: str) -> RecordedCalls:
        inner = f"{self._name}.{name}" if self._name else name
        return RecordedCalls(self._log, self._answers, inner)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = [str(arg) for arg in args] + [f"{key}={value}" for key, value in kwargs.items()]
        text = f"{self._name}({', '.join(given)})"
        self._log.append(text)
        return self._answers.get(text, RecordedCalls(self._log, self._answers, text))

    def __enter__(self) -> None:
        self._log.append(f"with {self._name}:")

    def __exit__(self, *_: object) -> None:
        self._log.append(f"end of {self._name}")

    def __str__(self) -> str:
        return self._name


def fake_torch_npu(log: list[str], answers: Mapping[str, Any]) -> types.ModuleType:
    """A `torch_npu` to put into `sys.modules`, whose `npu` records."""
    module = types.ModuleType("torch_npu")
    module.__spec__ = importlib.machinery.ModuleSpec("torch_npu", None)
    vars(module)["npu"] = RecordedCalls(log, answers)
    return module
