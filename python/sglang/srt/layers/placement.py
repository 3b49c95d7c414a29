"""Device, checkpoint name and rank's share of a model's tensors, handed down to every layer; and
slots for checkpoint tensors, which layers declare and the loader fills."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch

from sglang.srt.distributed.tensor_group import SingleTensorGroup, TensorGroup
from sglang.srt.layers.token_exchange import TokenExchange
from sglang.srt.layers.weight_format import WeightFormats
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

    def over(self, count: int) -> Share:
        """The same part of a dimension with one element for `count` elements of this one, which
        divides it."""
        assert not any(size % count for size in (self.begin, self.end, self.total)), (self, count)
        return Share(self.begin // count, self.end // count, self.total // count)

    def of_state(self, split: RankSplit) -> RankShare:
        """Convert to a rank's share of a `StateSpec`'s heads."""
        return RankShare(split, self.begin, self.end, self.total)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertRanks:
    """The ranks that share the routed experts, where these are not split like other layers."""

    group: TensorGroup
    """All ranks of the server."""
    is_whole: bool
    """True if each rank has some experts whole (expert parallelism); else each has some features of
    every expert."""
    exchange: TokenExchange | None
    """How tokens of other ranks come; None: all ranks have the same tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPlacement:
    """Dtype, device, ranks and name of a layer's weights."""

    dtype: torch.dtype
    device: str
    tp_group: TensorGroup = field(default_factory=SingleTensorGroup)
    """The ranks that split the layer."""
    prefix: str = ""
    """Prefix of the layer's tensor names in a checkpoint, without the last dot."""
    formats: WeightFormats | None = None
    """Formats of the checkpoint's quantized weights; None: every weight in memory has `dtype`."""
    experts: ExpertRanks | None = None
    """None: the routed experts' features are split over `tp_group`."""

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

    def group_share(self, even: Share, group: int) -> Share:
        """This rank's part of the dimension of `even`, in whole groups of so many elements; `even`
        where the largest part would be more than an eighth larger, or the groups are not whole."""
        count, size = even.total // group, self.tp_size
        if even.total % group or 8 * group * -(-count // size) > 9 * even.size:
            return even
        # The first rank, for which memory is planned, has a largest part.
        begin, end = (-(-count * rank // size) for rank in (self.tp_rank, self.tp_rank + 1))
        return Share(begin, end, count).times(group)

    def kv_head_share(self, num_kv_heads: int) -> Share:
        """This rank's KV heads. If there are more ranks than heads, several have the same one.

        Raises:
            ValueError: Neither of the numbers of heads and ranks is a multiple of the other.
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

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> torch.nn.Parameter:
        """An uninitialised weight of `shape`, for the loader to fill.

        Args:
            dtype: Its dtype; None: the placement's.

        Raises:
            ValueError: The device has too little memory, or the shape is impossible.
        """
        try:
            weight = torch.empty(shape, dtype=dtype or self.dtype, device=self.device)
        except RuntimeError as error:
            cause = str(error).splitlines()[0][:300]
            raise ValueError(
                f"a weight of {self.prefix or 'the model'} in the shape {list(shape)} cannot be "
                f"allocated ({cause}): use a larger --tp-size, or check the sizes in config.json"
            ) from error
        return torch.nn.Parameter(weight, requires_grad=False)


class Sliceable(Protocol):
    """A whole checkpoint tensor: in memory, or in a file whose indexed parts alone are read."""

    def __getitem__(self, index: tuple[slice, ...], /) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class WeightSlot:
    """The destination of one checkpoint tensor, or of this rank's part of it.

    `dest` is a view of a parameter; a merged layer has one view for each tensor that it merges. The
    part broadcasts to `dest`.
    """

    dest: torch.Tensor
    shape: tuple[int, ...]
    """Shape of the whole tensor in the checkpoint."""
    dim: int = 0
    """The dimension that is split."""
    shares: tuple[Share, ...] = ()
    """This rank's part of each run of that dimension; the runs are consecutive. Empty if each rank
    has the whole tensor."""
    parts: tuple[str, ...] = ()
    """Names of the tensors that a stacked tensor holds; see `stacked_slots`."""
    alternating: int = 1
    """Number of tensors whose elements alternate along `dim`. If there are several, `dest` has one
    more dimension of that size, after `dim`."""
    lead: Share | None = None
    """This rank's part of the first dimension, before `dim`; None: all."""
    below: int | None = None
    """Elements are integers from 0, less than this, and different in each row; None: any numbers.
    """

    @classmethod
    def of(cls, dest: torch.Tensor, share: Share | None = None, dim: int = 0) -> WeightSlot:
        """A slot whose `dest` takes this rank's part of the tensor."""
        return cls.of_runs(dest, () if share is None else (share,), dim)

    @classmethod
    def of_runs(
        cls,
        dest: torch.Tensor,
        shares: tuple[Share, ...],
        dim: int = 0,
        parts: tuple[str, ...] = (),
    ) -> WeightSlot:
        """A slot whose `dest` takes this rank's parts of several runs, in order."""
        shape = list(dest.shape)
        if shares:
            assert shape[dim] == sum(share.size for share in shares), (shape, dim, shares)
            shape[dim] = sum(share.total for share in shares)
        return cls(dest, tuple(shape), dim, shares, parts)

    @classmethod
    def of_alternating(
        cls,
        dest: torch.Tensor,
        share: Share,
        dim: int,
        parts: tuple[str, ...] = (),
        lead: Share | None = None,
    ) -> WeightSlot:
        """A slot for several tensors whose elements alternate along `dim` of the checkpoint's.

        Args:
            dest: `[..., own, count, ...]`: this rank's elements of dimension `dim`, of each tensor.
            share: This rank's part of that dimension of one tensor.
            lead: See `lead` above; `dim` is not 0.
        """
        own, count = dest.shape[dim : dim + 2]
        assert own == share.size, (dest.shape, dim, share)
        shape = [*dest.shape[:dim], share.total * count, *dest.shape[dim + 2 :]]
        if lead is not None:
            shape[0] = lead.total
        return cls(dest, tuple(shape), dim, (share.times(count),), parts, count, lead)

    @property
    def is_split(self) -> bool:
        """True if this rank takes less than the whole tensor."""
        leads = () if self.lead is None else (self.lead,)
        return any(share.size < share.total for share in (*self.shares, *leads))

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """Begin and end of each of this rank's parts, in the whole tensor's `dim`."""
        ends = itertools.accumulate(share.total for share in self.shares)
        firsts = [end - share.total for end, share in zip(ends, self.shares, strict=True)]
        return [
            (first + share.begin, first + share.end)
            for first, share in zip(firsts, self.shares, strict=True)
        ]

    @property
    def runs(self) -> list[int]:
        """Lengths of the runs of `dim`; empty: each rank has the whole tensor."""
        return [share.total for share in self.shares]

    @property
    def copies(self) -> torch.Tensor:
        """`dest` as `[copies, *part]`, one entry for each time that `dest` repeats the part."""
        part = list(self.shape)
        if self.shares:
            part[self.dim] = sum(share.size for share in self.shares)
        if list(self.dest.shape) == part:
            return self.dest.unsqueeze(0)
        assert list(self.dest.shape[1:]) == part, (self.dest.shape, part)
        return self.dest

    def fill(self, whole: Sliceable) -> None:
        """Copy this rank's part of a checkpoint tensor of `shape`, any dtype, any device. Nothing
        else of it is read."""
        index = [slice(None)] * len(self.shape)
        if self.lead is not None:
            index[0] = slice(self.lead.begin, self.lead.end)
        if not self.shares:
            self.dest.copy_(whole[tuple(index)].expand(self.dest.shape))
            return
        sizes = [share.size // self.alternating for share in self.shares]
        dests = torch.split(self.dest, sizes, self.dim)
        for (begin, end), dest in zip(self.ranges, dests, strict=True):
            if begin < end:
                index[self.dim] = slice(begin, end)
                part = whole[tuple(index)]
                if self.alternating > 1:
                    part = torch.unflatten(part, self.dim, (-1, self.alternating))
                dest.copy_(part.expand(dest.shape))


NamedSlots = Iterator[tuple[str, WeightSlot]]


class WeightedLayer(torch.nn.Module, ABC):
    """A layer with weights from a checkpoint; the names of its tensors begin with `prefix`."""

    def __init__(self, placement: TensorPlacement) -> None:
        super().__init__()
        self.prefix = placement.prefix

    @abstractmethod
    def weight_slots(self) -> NamedSlots:
        """Yield the full name of each checkpoint tensor, and its slot."""

    def stacked_slots(self) -> NamedSlots:
        """Yield the stacked tensors that a checkpoint may have instead of some of `weight_slots`,
        which their `parts` name."""
        return iter(())


def slots_in(module: torch.nn.Module) -> NamedSlots:
    """Full name and slot of every checkpoint tensor that the layers in `module` need."""
    for layer in module.modules():
        if isinstance(layer, WeightedLayer):
            yield from layer.weight_slots()
