"""A process on a CPU whose transport is TCP, and a tiny checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rigs.models.weight_rig import WeightRig, weight_rig
from sglang.srt.distributed import device_context
from sglang.srt.distributed.device_context import mark_device_set


@pytest.fixture
def on_a_cpu_over_tcp(clean_environment: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONCAKE_PROTOCOL", "tcp")
    monkeypatch.setattr(device_context, "_device", None)
    mark_device_set("cpu")


@pytest.fixture(scope="session")
def tiny_qwen3(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model("qwen3", tie_word_embeddings=True)


@pytest.fixture
def rig(on_a_cpu_over_tcp: None, tiny_qwen3: Path) -> Iterator[WeightRig]:
    with weight_rig(tiny_qwen3) as made:
        yield made
