"""The package with FlashMLA's kernel is found, or named by the release of torch."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from sglang.srt.layers.attention import flashmla_library
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=1, suite="base-a-test-cpu")


@pytest.mark.parametrize(
    ("torch_version", "requirement"),
    [
        ("2.11.0+cu130", "sglang-kernel==0.4.6"),
        ("2.12.1", None),
        ("2.13.0+cpu", "sglang-kernel==0.4.8"),
        ("2.14.1", "sglang-kernel==0.4.10"),
        ("2.15.0", "sgl-flash-mla==1.0.0"),
        ("3.0.0a0+git1", "sgl-flash-mla==1.0.0"),
        ("2.9.1", None),
    ],
)
def test_a_missing_package_is_named_by_the_release_of_torch(
    monkeypatch: pytest.MonkeyPatch, torch_version: str, requirement: str | None
) -> None:
    monkeypatch.setattr(torch, "__version__", torch_version)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError) as caught:
        flashmla_library.load_kernel()
    remedy = f"pip install --no-deps {requirement}, or use triton" if requirement else "use triton"
    assert str(caught.value) == (
        "attention backend 'flashmla' needs the package sglang-kernel or sgl-flash-mla: for torch "
        f"{torch_version} {remedy}"
    )


@pytest.mark.parametrize(
    ("package", "file"),
    [("sgl_kernel", "flashmla_ops.abi3.so"), ("flash_mla", "_C_legacy.abi3.so")],
)
def test_an_unfit_package_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str, file: str
) -> None:
    (tmp_path / file).write_bytes(b"of another release")
    spec = importlib.machinery.ModuleSpec(package, None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path)]
    monkeypatch.setattr(importlib.util, "find_spec", {package: spec}.get)
    unfit = rf"{re.escape(file)} does not fit torch"
    with pytest.raises(ValueError, match=unfit):
        flashmla_library.load_kernel()
    # A library that loads, without the operator.
    monkeypatch.setattr(torch.ops, "load_library", lambda path: None)
    with pytest.raises(ValueError, match=unfit):
        flashmla_library.load_kernel()
    kernels = SimpleNamespace(sparse_prefill_fwd=list)
    namespace = {"sgl_kernel": "sgl_kernel", "flash_mla": "flash_mla_legacy"}[package]
    monkeypatch.setattr(torch.ops, namespace, kernels, raising=False)
    assert flashmla_library.load_kernel() is kernels.sparse_prefill_fwd


def test_the_docs_have_the_releases() -> None:
    page = (Path(__file__).parents[5] / "docs" / "deploy.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| 2\.(\d+)\S* \| (.*) \|$", page, re.MULTILINE)
    assert len(rows) == 5
    for minor, cell in rows:
        fitting = flashmla_library.fitting_release(f"2.{minor}.0")
        assert (cell == "none") if fitting is None else f"`{fitting}`" in cell, minor
