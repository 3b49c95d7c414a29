"""Source and destination of a model's weights, as plain values."""

from __future__ import annotations

from dataclasses import dataclass, field

from sglang.srt.distributed.tensor_group import SingleTensorGroup, TensorGroup
from sglang.srt.utils.network import base_url


@dataclass(frozen=True, slots=True, kw_only=True)
class SeedAddress:
    """The HTTP server whose weights are read."""

    host: str
    port: int
    api_key: str | None = field(default=None, repr=False)
    """Key for the server; None: it needs no key."""

    @property
    def url(self) -> str:
        """`http://HOST:PORT`."""
        return base_url(self.host, self.port)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadConfig:
    """Settings to load a model on this rank."""

    load_format: str = "auto"
    """A key of `loader.WEIGHT_SOURCES`; "auto" means "safetensors"."""
    random_seed: int = 0
    """The seed of `dummy` weights."""
    seed_instance: SeedAddress | None = None
    """The seed of `remote_instance` weights."""
    device: str = "cpu"
    tp_group: TensorGroup = field(default_factory=SingleTensorGroup)
    """The ranks that split the model's layers."""
    show_progress: bool = True
