"""Where a model's weights come from and where they go: plain values."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadConfig:
    """How to load a model on this rank."""

    load_format: str = "auto"
    """A key of `loader.WEIGHT_SOURCES`; "auto" is "safetensors"."""
    random_seed: int = 0
    """Of `dummy` weights."""
    device: str = "cpu"
    tp_rank: int = 0
    tp_size: int = 1
    show_progress: bool = True
