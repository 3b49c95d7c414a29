"""Where a model's tensors live, what a checkpoint calls them, and which part a rank has of them.

Handed down to every layer.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from sglang.srt.distributed.tensor_group import SingleTensorGroup, TensorGroup
from sglang.srt.mem_cache.device.state_spec import RankShare, RankSplit


@dataclass(frozen=True, slots=True)
class Share:
    """The part `[begin, end)` that a rank has of a dimension of `total`."""

    begin: int
    end: int
    total: int

    @property
    def size(self) -> int:
        return self.end - self.begin

    def times(self, count: int) -> Share:
        """The same part of a dimension that has `count` elements for each element of this one."""
        return Share(self.begin * count, self.end * count, self.total * count)

    def of_state(self, split: RankSplit) -> RankShare:
        """This part as a rank's share of a `StateSpec`'s heads."""
        return RankShare(split, self.begin, self.end, self.total)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPlacement:
    """Dtype, device, ranks and name of a layer's weights."""

    dtype: torch.dtype
    device: str
    tp_group: TensorGroup = field(default_factory=SingleTensorGroup)
    """The ranks that split the layer."""
    prefix: str = ""
    """What the names of the layer's tensors in a checkpoint begin with, without the last dot."""

    @property
    def tp_rank(self) -> int:
        """This rank's place among those that split the layer."""
        return self.tp_group.rank

    @property
    def tp_size(self) -> int:
        """How many ranks split the layer."""
        return self.tp_group.size

    def at(self, name: str) -> TensorPlacement:
        """The placement of the part called `name`."""
        return replace(self, prefix=f"{self.prefix}.{name}" if self.prefix else name)

    def share(self, total: int, what: str) -> Share:
        """This rank's part of a dimension that is split evenly.

        Args:
            what: The elements of the dimension, for the error.

        Raises:
            ValueError: `total` is not a multiple of `tp_size`.
        """
        if total % self.tp_size:
            raise ValueError(
                f"{total} {what} cannot be split over {self.tp_size} ranks: "
                f"use a --tp-size that divides {total}"
            )
        size = total // self.tp_size
        return Share(self.tp_rank * size, (self.tp_rank + 1) * size, total)

    def kv_head_share(self, num_kv_heads: int) -> Share:
        """This rank's KV heads; with more ranks than heads, several ranks have the same head.

        Raises:
            ValueError: Neither number, of heads or ranks, is a multiple of the other.
        """
        if self.tp_size <= num_kv_heads or self.tp_size % num_kv_heads:
            return self.share(num_kv_heads, "KV heads")
        head = self.tp_rank * num_kv_heads // self.tp_size
        return Share(head, head + 1, num_kv_heads)

    def kv_state_share(self, num_kv_heads: int) -> RankShare:
        """`kv_head_share` as a rank's share of a `StateSpec`'s heads."""
        heads = self.kv_head_share(num_kv_heads)
        is_split = heads.size * self.tp_size == num_kv_heads
        return heads.of_state(RankSplit.HEADS if is_split else RankSplit.REPLICATED)

    def row_share(self, total: int) -> Share:
        """This rank's rows of a table of any length: equally many, but fewer on the last ranks."""
        size = -(-total // self.tp_size)
        begin = min(self.tp_rank * size, total)
        return Share(begin, min(begin + size, total), total)

    def empty(self, *shape: int) -> torch.nn.Parameter:
        """An uninitialised weight of `shape`: the loader fills it."""
        return torch.nn.Parameter(
            torch.empty(shape, dtype=self.dtype, device=self.device), requires_grad=False
        )
