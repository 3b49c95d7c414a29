"""Kinds of state that a model keeps: their names, shapes and layers. Plain data, any thread.

A model describes its state by `StateSpec`s, from which the pools of all tiers and their sizes
follow. Units: an item is the content of one slot of a pool in one layer: one token's part, or one
state.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class PoolName(StrEnum):
    """Kinds of state that a model keeps per token or per prefix; the pool part of object keys."""

    KV = "kv"
    MAMBA = "mamba"
    INDEXER = "indexer"
    SWA = "swa"
    HIDDEN = "hidden"


class PoolHitPolicy(StrEnum):
    """Requirement on an extra pool for a prefix to count as a hit."""

    ALL_PAGES = "all_pages"
    """A page for each KV page."""
    TRAILING_PAGES = "trailing_pages"
    """A state at the end of the prefix only."""


class ItemKind(StrEnum):
    """Unit of state that one slot of a pool holds."""

    TOKEN = "token"
    """One token; slots come in pages."""
    STATE = "state"
    """A whole prefix."""


class RankSplit(StrEnum):
    """Relation of a pool's contents to those of the other tensor-parallel ranks."""

    HEADS = "heads"
    """Each rank has its own heads."""
    REPLICATED = "replicated"
    """Heads are fewer than ranks: several ranks have the same head."""
    SAME = "same"
    """The contents are not split: every rank has the same bytes."""


@dataclass(frozen=True, slots=True)
class RankShare:
    """The heads that a rank has: `[begin, end)` of `total`.

    Ranks with equal shares hold equal bytes. State without heads is one head that all ranks have.
    """

    split: RankSplit = RankSplit.SAME
    begin: int = 0
    end: int = 1
    total: int = 1


@dataclass(frozen=True, slots=True)
class StateBuffer:
    """One tensor of a layer's state, without its first dimension, the slots."""

    name: str
    shape: tuple[int, ...]
    """Dimensions of one item, on this rank."""
    dtype: torch.dtype
    """Type of the values as attention reads them; a pool may store fp8 as bytes."""
    head_parts: tuple[int, ...] = ()
    """Lengths of runs along the first dimension, together its whole length; each run is split
    evenly by heads. Empty if the buffer cannot be split by heads."""

    @property
    def num_bytes(self) -> int:
        """Bytes of one item in one layer."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class StateSpec:
    """One kind of state of a model, on one rank.

    Raises:
        ValueError: There are no layers or no buffers, the layers are not ascending, or a state of
            whole prefixes has another hit policy than `TRAILING_PAGES`.
    """

    name: PoolName
    layers: tuple[int, ...]
    """Model layers that have this state, ascending: layer `layers[i]` is the pool's layer i."""
    buffers: tuple[StateBuffer, ...]
    """The tensors of each layer."""
    item: ItemKind = ItemKind.TOKEN
    hit_policy: PoolHitPolicy = PoolHitPolicy.ALL_PAGES
    share: RankShare = RankShare()
    indices_from_pool: PoolName | None = None
    """The pool whose slots this one shares (an auxiliary pool). None if it has its own slots."""

    def __post_init__(self) -> None:
        if not self.layers or not self.buffers or sorted(set(self.layers)) != list(self.layers):
            raise ValueError(
                f"state '{self.name}' needs buffers, and layers in ascending order: "
                f"{len(self.buffers)} buffers, layers {list(self.layers)}"
            )
        trailing = PoolHitPolicy.TRAILING_PAGES
        if self.item is ItemKind.STATE and self.hit_policy is not trailing:
            raise ValueError(
                f"state '{self.name}' stands for a whole prefix: its hit_policy is {trailing}"
            )

    @property
    def dtype(self) -> torch.dtype:
        """Type of the first buffer: keys, a latent row, a recurrent state."""
        return self.buffers[0].dtype

    @property
    def layer_bytes(self) -> int:
        """Bytes of one item in one layer."""
        return sum(buffer.num_bytes for buffer in self.buffers)

    @property
    def num_bytes(self) -> int:
        """Bytes of one item over all layers."""
        return self.layer_bytes * len(self.layers)


@dataclass(frozen=True, kw_only=True)
class KVSpec(StateSpec):
    """Keys and values per head: `k` `[head_num, head_dim]` and `v` `[head_num, v_head_dim]`."""

    name: PoolName = PoolName.KV

    @classmethod
    def of_heads(
        cls,
        layers: tuple[int, ...],
        head_num: int,
        head_dim: int,
        dtype: torch.dtype,
        *,
        v_head_dim: int | None = None,
        share: RankShare | None = None,
    ) -> KVSpec:
        """The spec of `head_num` KV heads on this rank.

        Args:
            v_head_dim: Elements of a value of one head; as `head_dim` by default.
            share: The model's heads that these are; None: all of them.
        """
        return cls(
            layers=layers,
            buffers=(
                StateBuffer("k", (head_num, head_dim), dtype, (head_num,)),
                StateBuffer(
                    "v",
                    (head_num, head_dim if v_head_dim is None else v_head_dim),
                    dtype,
                    (head_num,),
                ),
            ),
            share=share or RankShare(RankSplit.HEADS, 0, head_num, head_num),
        )

    @property
    def head_num(self) -> int:
        """KV heads on this rank."""
        return self.buffers[0].shape[0]

    @property
    def head_dim(self) -> int:
        """Elements of a key of one head."""
        return self.buffers[0].shape[1]

    @property
    def v_head_dim(self) -> int:
        """Elements of a value of one head."""
        return self.buffers[1].shape[1]


def bytes_per_token(specs: tuple[StateSpec, ...]) -> int:
    """Bytes that one token takes in the paged pools of `specs`, over all layers, on this rank."""
    return sum(spec.num_bytes for spec in specs if spec.item is ItemKind.TOKEN)


def bytes_per_state(specs: tuple[StateSpec, ...]) -> int:
    """Bytes that the state of one prefix takes in the other pools of `specs`, over all layers, on
    this rank."""
    return sum(spec.num_bytes for spec in specs if spec.item is ItemKind.STATE)
