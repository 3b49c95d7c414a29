"""A layer and a load counter as device pools see them; the counter notes the layers waited for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Layer:
    """An attention layer."""

    layer_id: int


class SpyCounter:
    """A `LayerTransferCounter` that waits for nothing and notes the layers it was asked for."""

    def __init__(self) -> None:
        self.waits: list[int] = []

    def set_consumer(self, index: int) -> None:
        self.waits.clear()

    def wait_until(self, threshold: int) -> None:
        self.waits.append(threshold)
