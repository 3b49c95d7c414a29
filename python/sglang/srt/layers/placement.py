"""Where a model's tensors live and what a checkpoint calls them, handed down to every layer."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPlacement:
    """Dtype, device, tensor-parallel share and name of a layer's weights.

    Raises:
        ValueError: `tp_size` is not 1: layers are not split yet.
    """

    dtype: torch.dtype
    device: str
    tp_rank: int = 0
    tp_size: int = 1
    prefix: str = ""
    """What the names of the layer's tensors in a checkpoint begin with, without the last dot."""

    def __post_init__(self) -> None:
        if self.tp_size != 1 or self.tp_rank != 0:
            raise ValueError(
                f"tp_size={self.tp_size} with tp_rank={self.tp_rank} is not supported yet: use 1"
            )

    def at(self, name: str) -> TensorPlacement:
        """The placement of the part called `name`."""
        return replace(self, prefix=f"{self.prefix}.{name}" if self.prefix else name)

    def empty(self, *shape: int) -> torch.nn.Parameter:
        """An uninitialised weight of `shape`: the loader fills it."""
        return torch.nn.Parameter(
            torch.empty(shape, dtype=self.dtype, device=self.device), requires_grad=False
        )
