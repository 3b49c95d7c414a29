"""Fixtures of all tests of the tiers: a directory of L3's own for each, and engines over one L3."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rigs.caches.storage_rigs import StorageRigs
from sglang.srt.environ import envs
from sglang.srt.mem_cache.l3 import store_calls


@pytest.fixture(autouse=True)
def storage_dir(tmp_path: Path) -> Iterator[Path]:
    with envs.SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR.override(str(tmp_path)):
        yield tmp_path


@pytest.fixture(autouse=True)
def no_call_looks_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that stands still for seconds does not make L3 unavailable."""
    monkeypatch.setattr(store_calls, "_STUCK_AFTER_S", 60.0)


@pytest.fixture(name="rigs")
def make_rigs() -> Iterator[StorageRigs]:
    with StorageRigs() as made:
        yield made
