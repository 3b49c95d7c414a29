"""The lookup of a dynamic backend's class does not run its package."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from sglang.srt.mem_cache.storage.class_lookup import ClassPath, check_findable, dynamic_class
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=1, suite="base-a-test-cpu")

RUN = "raise AssertionError('a module was run')\n"


@pytest.fixture(autouse=True)
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`l3_here` with modules of several kinds; `l3_there.inner` without any `__init__.py`."""
    here, there = tmp_path / "l3_here", tmp_path / "l3_there" / "inner"
    here.mkdir()
    there.mkdir(parents=True)
    (here / "__init__.py").write_text(RUN)
    (here / "plain.py").write_text(f"{RUN}class Store: ...\n")
    (here / "star.py").write_text("from l3_here.plain import *\n")
    (here / "lazy.py").write_text("def __getattr__(name): return object\n")
    (here / "torn.py").write_text("x = (\n")
    (there / "plain.py").write_text(f"{RUN}class Store: ...\n")
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.parametrize(
    "module",
    [
        "l3_here.plain",
        "l3_here.star",
        "l3_here.lazy",
        "l3_there.inner.plain",
        # Compiled into Python.
        "msgspec._core",
        "sys",
        "sglang.srt.mem_cache.storage.file_store",
    ],
)
def test_a_class_that_may_exist_is_accepted(module: str) -> None:
    before = set(sys.modules)
    name = "HiCacheFile" if module.startswith("sglang") else "Store"
    check_findable(ClassPath(module, name))
    assert not [name for name in set(sys.modules) - before if name.startswith("l3_")]


@pytest.mark.parametrize(
    ("module", "name", "cause"),
    [
        ("l3_nowhere", "Store", "no module 'l3_nowhere'"),
        ("l3_here.nowhere", "Store", "no module 'l3_here.nowhere'"),
        ("l3_here.plain.deeper", "Store", "no module"),
        ("l3_here.plain", "Stoer", "plain.py has no 'Stoer'"),
        ("l3_here.plain", "Sto", "plain.py has no 'Sto'"),
        ("l3_here.torn", "Store", "torn.py: .* line 1"),
        ("l3_here..plain", "Store", "no module"),
        (".plain", "Store", "no module"),
    ],
)
def test_a_class_that_cannot_exist_is_refused_by_name(module: str, name: str, cause: str) -> None:
    with pytest.raises(ValueError, match=f"cannot load {module}.{name}: .*{cause}") as error:
        check_findable(ClassPath(module, name))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("field", ["backend_name", "module_path", "class_name"])
def test_every_field_is_needed(field: str) -> None:
    whole = {"backend_name": "b", "module_path": "m", "class_name": "C"}
    assert dynamic_class(whole) == ("m", "C")
    for wrong in ({**whole, field: 1}, {k: v for k, v in whole.items() if k != field}):
        with pytest.raises(ValueError, match=f"dynamic needs '{field}'"):
            dynamic_class(wrong)
