"""Fixtures of unit tests."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from sglang.srt.environ import envs


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    """Threads cost more than they gain at these sizes; where ranks are threads, those do."""
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty directory, which the first rig fills with a tiny model."""
    return tmp_path_factory.mktemp("model")


@pytest.fixture
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable of `sglang.srt.environ` is set."""
    for name in envs.fields():
        monkeypatch.delenv(name, raising=False)
