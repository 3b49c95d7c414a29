"""A process on a CPU whose transport is TCP, and a tiny checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rigs.models.tiny_models import save_tiny_checkpoint
from rigs.models.weight_rig import WeightRig, weight_rig
from sglang.srt.distributed import device_context
from sglang.srt.distributed.device_context import mark_device_set
from sglang.srt.environ import envs


@pytest.fixture
def on_a_cpu_over_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in envs.fields():
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MOONCAKE_PROTOCOL", "tcp")
    monkeypatch.setattr(device_context, "_device", None)
    mark_device_set("cpu")


@pytest.fixture(scope="session")
def tiny_qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen3")
    save_tiny_checkpoint(path, "qwen3", tie_word_embeddings=True)
    return path


@pytest.fixture
def rig(on_a_cpu_over_tcp: None, tiny_qwen3: Path) -> Iterator[WeightRig]:
    with weight_rig(tiny_qwen3) as made:
        yield made
