"""Every test of the tiers has a directory of its own for the file backend."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from sglang.srt.environ import envs


@pytest.fixture(autouse=True)
def storage_dir(tmp_path: Path) -> Iterator[Path]:
    with envs.SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR.override(str(tmp_path)):
        yield tmp_path
