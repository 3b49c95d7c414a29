"""Only a device's runtime and the files for one kind of device may name it.

All other code asks `device_runtime`, `device_kind` or a registry. An `else` after a comparison
with one name would take every other device for the same one.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="base-a-test-cpu")

SOURCES: Final = Path(__file__).resolve().parents[4] / "python/sglang"
RUNTIMES: Final = tuple(
    f"{path.parent.relative_to(SOURCES).as_posix()}/"
    for path in sorted(SOURCES.glob("srt/hardware_backend/*/runtime.py"))
)
CUDA_ONLY: Final = (
    "srt/model_executor/graph_capture.py",
    "srt/layers/triton_ops/",
    "srt/layers/attention/triton_backend.py",
    "srt/layers/attention/dense_attention.py",
    "srt/layers/attention/flashinfer_backend.py",
    "srt/mem_cache/host/copy_engine.py",
    "srt/mem_cache/host/host_copy_cuda.py",
    "srt/mem_cache/host/staged_copy.py",
    "srt/mem_cache/host/token_copy.py",
)
TESTS: Final = ("test/",)
NAMES: Final = {"cpu", "cuda", "npu", "mps", "xpu", "hip", "hpu", "musa", "privateuseone"}
ATTRIBUTES: Final = {"is_cuda", "is_npu", "is_mps", "is_xpu"}
MODULES: Final = ("torch.cuda", "torch.npu", "torch.xpu", "torch.mps")


def _constants(node: ast.expr) -> Iterator[object]:
    for child in ast.walk(node):
        if isinstance(child, ast.Constant):
            yield child.value


def _is_name(node: ast.AST) -> bool:
    if isinstance(node, ast.Compare):
        plain = (ast.Constant, ast.Tuple, ast.List, ast.Set)
        sides = [side for side in (node.left, *node.comparators) if isinstance(side, plain)]
        return any(
            value in NAMES
            for side in sides
            if isinstance(side, plain)
            for value in _constants(side)
        )
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        is_affix = node.func.attr in ("startswith", "endswith")
        return is_affix and any(value in NAMES for arg in node.args for value in _constants(arg))
    if isinstance(node, ast.MatchValue):
        return any(value in NAMES for value in _constants(node.value))
    return False


def find_device_names(tree: ast.Module) -> list[int]:
    """Lines that decide by a device's name, or use a device's library."""
    lines = set()
    for node in ast.walk(tree):
        if (
            _is_name(node)
            or (isinstance(node, ast.Attribute) and node.attr in ATTRIBUTES)
            or (isinstance(node, ast.Attribute) and ast.unparse(node) in MODULES)
            or (isinstance(node, ast.Import) and any(a.name in MODULES for a in node.names))
            or (
                isinstance(node, ast.ImportFrom)
                and any(
                    name in MODULES
                    for name in (node.module, *(f"{node.module}.{a.name}" for a in node.names))
                )
            )
        ):
            lines.add(getattr(node, "lineno", 0))
    return sorted(lines)


def find_imports(tree: ast.Module, package: str) -> bool:
    """True if `package` is imported, by a statement or by its name in a call."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import) and any(
            alias.name.partition(".")[0] == package for alias in node.names
        ):
            return True
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == package:
            return True
        if (
            isinstance(node, ast.Call)
            and ast.unparse(node.func).endswith(("import_module", "__import__"))
            and package in [value for arg in node.args for value in _constants(arg)]
        ):
            return True
    return False


def sources() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(SOURCES.rglob("*.py")):
        yield path.relative_to(SOURCES).as_posix(), ast.parse(path.read_text(encoding="utf-8"))


def test_only_runtimes_and_kernels_know_a_device_by_name() -> None:
    found = [
        f"{name}:{line}"
        for name, tree in sources()
        if not name.startswith((*RUNTIMES, *CUDA_ONLY, *TESTS))
        for line in find_device_names(tree)
    ]
    assert not found, "ask device_runtime, device_kind or a registry: " + ", ".join(found)


def test_the_exceptions_are_there() -> None:
    assert {"srt/hardware_backend/cpu/", "srt/hardware_backend/cuda/"} <= set(RUNTIMES)
    for name in (*RUNTIMES, *CUDA_ONLY, *TESTS):
        assert (SOURCES / name).exists(), name


def test_only_its_own_folder_imports_torch_npu() -> None:
    importers = {name for name, tree in sources() if find_imports(tree, "torch_npu")}
    assert importers == {"srt/hardware_backend/npu/runtime.py"}


@pytest.mark.parametrize(
    "source",
    [
        "x = 1 if device.type == 'cuda' else 2",
        "if 'cpu' != device: pass",
        "if device in ('cuda', 'npu'): pass",
        "match device.type:\n    case 'npu': pass",
        "if tensor.is_cuda: pass",
        "torch.cuda.synchronize()",
        "stream: torch.cuda.Stream",
        "import torch.cuda",
        "from torch import cuda",
        "from torch.cuda import Stream",
    ],
)
def test_what_counts_as_a_name(source: str) -> None:
    assert find_device_names(ast.parse(source))


@pytest.mark.parametrize(
    "source",
    [
        "table = {'cpu': 1, 'cuda': 2}",
        "if tensor.is_cpu: pass",
        "f(device='cpu')",
        "if kind.overlaps_steps: pass",
    ],
)
def test_other_source_names_no_device(source: str) -> None:
    assert not find_device_names(ast.parse(source))


@pytest.mark.parametrize(
    "source",
    [
        "import torch_npu",
        "from torch_npu.npu import Stream",
        "importlib.import_module('torch_npu')",
    ],
)
def test_what_counts_as_an_import(source: str) -> None:
    assert find_imports(ast.parse(source), "torch_npu")
    assert not find_imports(ast.parse(source), "torch_npux")
