"""A directory with a tiny model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty directory, which the first rig fills with a tiny model."""
    torch.set_num_threads(1)
    return tmp_path_factory.mktemp("model")
