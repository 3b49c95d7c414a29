"""Kinds of state that a model keeps: their names, shapes and layers. Plain data, any thread.

A model describes its state by `StateSpec`s, from which the pools of all tiers and their sizes
XX"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from math import lcm, prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class PoolName(StrEnum):
    """Kinds of state that a model keeps; the pool part of object keys."""

    KV = "kv"
    MAMBA = "mamba"
    INDEXER = "indexer"
    SWA = "swa"
    HIDDEN = "hidden"
    C128 = "c128"
    COMPRESSOR = "compressor"
    OPEN_GROUP = "open_group"
    OPEN_C128 = "open_c128"


class PoolHitPolicy(StrEnum):
    """Requirement on an extra pool for a prefix to count as a hit."""

    ALL_PAGES = "all_pages"
    """A page for each KV page."""
    TRAILING_PAGES = "trailing_pages"
    """A state at the end of the prefix only."""


class ItemKind(StrEnum):
    """Unit of state that one slot of a pool stands for."""

    TOKEN = "token"
    """One token; slots come in pages."""
    STATE = "state"
    """A whole prefix."""
    REQUEST = "request"
    """A running request: a state without snapshots, which no tier caches. Slots are the rows of
    `ReqToTokenPool`."""


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
        ValueError: There are no layers or no buffers; the layers are not ascending; a state of
            whole prefixes has another hit policy than `TRAILING_PAGES`; a state of a request shares
            slots; or a state has a stride.
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
    stride: int = 1
    """Tokens that one item stands for: slot s lies in item s // stride. All paged pools have the
    same slots and pages of as many tokens; the pool with the smallest stride is the primary one."""
    is_repeatable: bool = False
    """True if a prefix's last token can be computed again from the state behind it, as in a window,
    where each token has its place. A recurrent state would take the token twice."""

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
        if self.stride < 1 or (self.item is not ItemKind.TOKEN and self.stride > 1):
            raise ValueError(
                f"state '{self.name}' has a stride of {self.stride} and an item for each "
                f"{self.item}: only items of tokens have a stride of 2 or more"
            )
        if self.item is ItemKind.REQUEST and self.indices_from_pool is not None:
            raise ValueError(
                f"state '{self.name}' is in the rows of requests: it cannot share the slots of "
                f"'{self.indices_from_pool}'"
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


def bytes_per_token(specs: Iterable[StateSpec]) -> Fraction:
    """Bytes that one token takes in the paged pools of `specs`, over all layers, on this rank. For
    whole pages, the product is a whole number."""
    paged = (spec for spec in specs if spec.item is ItemKind.TOKEN)
    return sum((Fraction(spec.num_bytes, spec.stride) for spec in paged), Fraction(0))


def bytes_per_state(specs: Iterable[StateSpec]) -> int:
    """Bytes that the state of one prefix takes in the pools of `specs`, over all layers, on this
    rank."""
    return sum(spec.num_bytes for spec in specs if spec.item is ItemKind.STATE)


def bytes_per_request(specs: Iterable[StateSpec]) -> int:
    """Bytes that a running request takes in its own pools of `specs`, over all layers, on this
    rank."""
    return sum(spec.num_bytes for spec in specs if spec.item is ItemKind.REQUEST)


def check_page_size(specs: Iterable[StateSpec], page_size: int) -> None:
    """Check that pages have whole items.

    Raises:
        ValueError: A stride does not divide `page_size`; names the least page size that works.
    """
    strides = {spec.stride: spec for spec in specs}
    unfit = [stride for stride in strides if page_size % stride]
    if unfit:
        stride = max(unfit)
        raise ValueError(
            f"--page-size {page_size}: an item of state '{strides[stride].name}' stands for "
            f"{stride} tokens, and a page has whole items; use a multiple of {lcm(*strides)}"
        )
