"""A seed's description of its weights: the tensor parts of each rank, and their addresses.

A tensor is split along one dimension. The dimension consists of runs, and each run is split over
the ranks (queries, keys and values in one matrix are three runs). A rank holds a range of each run,
in order. Indices are those of the whole dimension.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from types import MappingProxyType
from typing import Final, TypeAlias

import msgspec
import torch

from sglang.srt.hardware_backend.leaf_hash import HASH_NAME
from sglang.srt.layers.layer_weight import SCALES, ZEROS
from sglang.srt.layers.placement import WeightSlot
from sglang.srt.layers.weight_format import SCALE_DTYPES, WeightFormat

_MAX_VALUE_CHARS = 80
PACKING: Final = "halves of blocks, words of floats"
"""This release's order of 4-bit elements in bytes; see `inputs_of_bytes` and `fp4_words`."""

Range: TypeAlias = tuple[int, int]
"""First index, and the index after the last."""

GRID_SIZES: Final = (1, 2, 4, 8)
"""Numbers of ranks whose bounds divide the checksums, independent of the seed's own split."""


@dataclass(frozen=True, slots=True)
class HeldRanges:
    """The part of a dimension that one rank holds.

    Attributes:
        ranges: The held range of each run, ascending, without empty ranges.
        grid: Bounds between the parts with checksums, ascending.
    """

    ranges: tuple[Range, ...]
    grid: tuple[int, ...]

    @classmethod
    def of(cls, ranges: Iterable[Range], runs: Sequence[int]) -> HeldRanges:
        """Args:
        ranges: One range for each run.
        runs: Lengths of the runs; empty: the dimension is never split.
        """
        held = tuple((begin, end) for begin, end in ranges if begin < end)
        return cls(held, tuple(grid_of(runs)))

    @property
    def size(self) -> int:
        """Number of elements of the dimension that the rank holds."""
        return sum(end - begin for begin, end in self.ranges)

    def cells(self) -> list[Range]:
        """The parts with checksums, ascending."""
        return cut_at(self.ranges, self.grid)

    def offset_of(self, part: Range) -> int | None:
        """Index among the held elements of the first one of `part`; None: `part` is not held
        completely."""
        offset = 0
        for begin, end in self.ranges:
            if begin <= part[0] and part[1] <= end:
                return offset + part[0] - begin
            offset += end - begin
        return None


def grid_of(runs: Sequence[int]) -> list[int]:
    """Bounds, in all runs, of the shares of each number of ranks in `GRID_SIZES`."""
    grid: set[int] = set()
    for begin, length in zip(accumulate(runs, initial=0), runs, strict=False):
        for count in GRID_SIZES:
            share = -(-length // count)
            grid.update(begin + min(share * place, length) for place in range(count + 1))
    return sorted(grid)


def cut_at(ranges: Iterable[Range], cuts: Sequence[int]) -> list[Range]:
    """Cut ranges at the ascending `cuts`."""
    parts = []
    for begin, end in ranges:
        within = cuts[bisect_right(cuts, begin) : bisect_left(cuts, end)]
        parts += list(zip((begin, *within), (*within, end), strict=True))
    return parts


def common_parts(wanted: HeldRanges, holders: Sequence[HeldRanges]) -> list[Range]:
    """Cut `wanted` into parts that each holder has completely or not at all."""
    bounds = {bound for holder in holders for part in holder.ranges for bound in part}
    return cut_at(wanted.ranges, sorted(bounds))


class EvenSpread:
    """Chooses the replica with the fewest assigned bytes.

    Args:
        num_holders: Number of replicas.
        first: The preferred replica among equals, followed by those after it.
    """

    def __init__(self, num_holders: int, first: int) -> None:
        self.num_bytes = [0] * num_holders
        self._first = first

    def choose(self, candidates: Sequence[int], num_bytes: int) -> int:
        """Choose one of `candidates`, and assign `num_bytes` to it."""
        count = len(self.num_bytes)
        chosen = min(
            candidates,
            key=lambda holder: (self.num_bytes[holder], (holder - self._first) % count),
        )
        self.num_bytes[chosen] += num_bytes
        return chosen


class TensorPart(msgspec.Struct, frozen=True, kw_only=True):
    """The part of one checkpoint tensor that a rank holds."""

    dtype: str
    """Name of the dtype in torch, such as `bfloat16`."""
    shape: tuple[int, ...]
    """The whole tensor's shape."""
    split_dim: int = 0
    split_ranges: tuple[tuple[int, int], ...] = ()
    """Begin and end of the rank's part of each of `split_runs`. The parts are consecutive in
    memory."""
    split_runs: tuple[int, ...] = ()
    """Lengths of the runs of `split_dim`; the ranks split each run. Empty if no number of ranks
    splits the tensor."""

    @classmethod
    def of(cls, slot: WeightSlot) -> TensorPart:
        """The part that fills a slot."""
        return cls(
            dtype=str(slot.dest.dtype).removeprefix("torch."),
            shape=slot.shape,
            split_dim=slot.dim,
            split_ranges=tuple(slot.ranges),
            split_runs=tuple(slot.runs),
        )

    def held(self) -> HeldRanges:
        """Ranges of `split_dim` that the part has."""
        if self.split_runs:
            return HeldRanges.of(self.split_ranges, self.split_runs)
        return HeldRanges.of([(0, self.shape[0] if self.shape else 1)], ())

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


class WeightsDigest(msgspec.Struct, frozen=True, kw_only=True):
    """The part of an answer that takes long to compute, because every byte is read."""

    identity: str
    """See `weights_identity`; the same on all ranks."""
    checksums: dict[str, list[str]]
    """Checksums of each tensor, one for each cell (`HeldRanges.cells`): `leaf_hash` of its bytes
    in the rank's memory, row by row, 32 hexadecimal digits."""


class SeedWeights(msgspec.Struct, frozen=True, kw_only=True):
    """A seed's description of one rank, without addresses."""

    config: dict[str, str]
    """See `config_values`."""
    protocol: str
    """The protocol of its Transfer Engine."""
    ranks: int
    """Number of ranks of the seed."""
    tensors: dict[str, TensorPart]
    packing: str = "pairs"
    """Order of 4-bit integers in bytes. Seeds without this field pack neighbours."""
    hash: str = "xxh3-128"
    """Name of the checksums' hash. Seeds without this field hash tensors as a whole."""
    digest: WeightsDigest | None = None
    """Digest of the weights; None: it is still being computed, ask again. All ranks get theirs at
    the same time."""


MemoryPlace = tuple[int, int, int]
"""Address, number of elements, bytes of an element."""


class SeedAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of `GET /remote_instance_transfer_engine_info`."""

    rank: int
    remote_instance_transfer_engine_info: tuple[str, dict[str, MemoryPlace]]
    """Session id of the rank's Transfer Engine, and each tensor's place, in SGLang's format."""
    weights: SeedWeights

    @property
    def session_id(self) -> str:
        """`HOST:PORT` of the rank's Transfer Engine."""
        return self.remote_instance_transfer_engine_info[0]

    @property
    def places(self) -> dict[str, MemoryPlace]:
        """Place of each tensor in the rank's memory."""
        return self.remote_instance_transfer_engine_info[1]

    def with_digest(self, digest: WeightsDigest) -> SeedAnswer:
        """The same answer with `digest`."""
        return msgspec.structs.replace(
            self, weights=msgspec.structs.replace(self.weights, digest=digest)
        )


ANSWER_DECODER: Final = msgspec.json.Decoder(SeedAnswer)
PACKED_ANSWER_DECODER: Final = msgspec.msgpack.Decoder(SeedAnswer)


def place_of(tensor: torch.Tensor) -> MemoryPlace:
    """Place of a contiguous tensor in memory."""
    assert tensor.is_contiguous(), "weights lie in one piece"
    return tensor.data_ptr(), tensor.numel(), tensor.element_size()


_SCALE_DTYPES: Final = MappingProxyType(
    {str(dtype).removeprefix("torch."): dtype for dtype in SCALE_DTYPES}
)


def formats_of_seed(tensors: Mapping[str, TensorPart]) -> dict[str, WeightFormat]:
    """Formats of the weights that a seed keeps quantized, by name.

    A number of ranks for which the seed's groups do not fit leads to other formats in this server's
    memory, which `plan_reads` refuses.

    Args:
        tensors: Tensors of one rank of the seed.

    Raises:
        ValueError: Scales have an unknown dtype.
    """
    found = {}
    for name, elements in tensors.items():
        scales = tensors.get(name + SCALES)
        if scales is None:
            continue
        dtype = _SCALE_DTYPES.get(scales.dtype)
        if dtype is None or min(scales.shape, default=0) < 1 or len(elements.shape) < 2:
            raise ValueError(
                f"tensor {name!r} has scales {scales}: start both with the same release"
            )
        is_fp8 = elements.dtype == "float8_e4m3fn"
        outputs, columns = elements.shape[-2:]
        inputs = columns if is_fp8 else 2 * columns
        found[name] = WeightFormat(
            bits=8 if is_fp8 else 4,
            block=(outputs // scales.shape[-2], inputs // scales.shape[-1]),
            scales=dtype,
            has_zeros=name + ZEROS in tensors,
        )
    return found


def check_seed(weights: SeedWeights, *, config: Mapping[str, str], protocol: str) -> None:
    """Refuse a seed with another model or another transport.

    Args:
        config: `config_values` of this server's model.
        protocol: Protocol of this process's Transfer Engine.

    Raises:
        ValueError: Model, transport, packing or hash differ; with the difference (for a model, the
            first field) and the remedy.
    """
    if weights.protocol != protocol:
        raise ValueError(
            f"it transfers over {weights.protocol}, this server over {protocol}: start both with "
            "the same MOONCAKE_PROTOCOL"
        )
    if weights.hash != HASH_NAME:
        raise ValueError(
            f"its checksums are {weights.hash}, those of this server {HASH_NAME}: start both with "
            "the same release"
        )
    has_bytes = any(part.dtype == "uint8" for part in weights.tensors.values())
    if has_bytes and weights.packing != PACKING:
        raise ValueError(
            f"its 4-bit elements are packed by {weights.packing}, those of this server by "
            f"{PACKING}: start both with the same release"
        )
    for field in sorted({*weights.config, *config}):
        theirs, ours = weights.config.get(field, "missing"), config.get(field, "missing")
        if theirs != ours:
            raise ValueError(
                f"it serves another model: {field} in its config.json is "
                f"{theirs[:_MAX_VALUE_CHARS]}, in the one in --model-path "
                f"{ours[:_MAX_VALUE_CHARS]}; give a copy of the seed's model directory (weights "
                "are not needed)"
            )
