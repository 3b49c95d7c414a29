"""Device, checkpoint name and rank's share of a model's tensors, handed down to every layer."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from sglang.srt.distributed.tensor_group import SingleTensorGroup, TensorGroup
from sglang.srt.mem_cache.device.state_spec import RankShare, RankSplit


@dataclass(frozen=True, slots=True)
class Share:
    """A rank's part `[begin, end)` of a dimension of `total` elements."""

    begin: int
    end: int
    total: int

    @property
    def size(self) -> int:
        return self.end - self.begin

    def times(self, count: int) -> Share:
        """The same part of a dimension with `count` elements for each element of this one."""
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
    """Prefix of the layer's tensor names in a checkpoint, without the last dot."""

    @property
    def tp_rank(self) -> int:
        """Index of this rank among those that split the layer."""
        return self.tp_group.rank

    @property
    def tp_size(self) -> int:
        """Number of ranks that split the layer."""
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
        """This rank's KV heads. With more ranks than heads, several ranks have the same head.

        Raises:
            ValueError: The number of heads is no multiple of that of ranks, nor the other way
                round.
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
        """This rank's rows of a table of any length. The last ranks may have fewer rows."""
        size = -(-total // self.tp_size)
        begin = min(self.tp_rank * size, total)
        return Share(begin, min(begin + size, total), total)

    def empty(self, *shape: int) -> torch.nn.Parameter:
        """An uninitialised weight of `shape`, for the loader to fill."""
        return torch.nn.Parameter(
            torch.empty(shape, dtype=self.dtype, device=self.device), requires_grad=False
        )
