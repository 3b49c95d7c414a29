"""What a seed tells of its weights, and whether they are those that a model asks for. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
import torch

from sglang.srt.layers.weight_slot import WeightSlot


class TensorPart(msgspec.Struct, frozen=True, kw_only=True):
    """The part of one checkpoint tensor that a rank holds."""

    dtype: str
    """As torch names it: `bfloat16`."""
    shape: tuple[int, ...]
    """Of the whole tensor."""
    split_dim: int = 0
    split_ranges: tuple[tuple[int, int], ...] = ()
    """Begins and ends of the rank's parts of `split_dim`, which follow one another in its memory;
    empty: it has the whole tensor."""

    @classmethod
    def of(cls, slot: WeightSlot) -> TensorPart:
        """The part that fills a slot."""
        return cls(
            dtype=str(slot.dest.dtype).removeprefix("torch."),
            shape=slot.shape,
            split_dim=slot.dim,
            split_ranges=tuple(slot.ranges) if slot.is_split else (),
        )

    def __str__(self) -> str:
        text = f"{self.dtype} {list(self.shape)}"
        if self.split_ranges:
            ranges = " and ".join(f"{begin} to {end}" for begin, end in self.split_ranges)
            text += f", {ranges} of dimension {self.split_dim}"
        return text


class WeightsDigest(msgspec.Struct, frozen=True, kw_only=True):
    """What takes long to compute: it reads every byte."""

    identity: str
    """See `weights_identity`."""
    checksums: dict[str, str]
    """By tensor: xxh3-128 of its bytes in the seed's memory, 32 hexadecimal digits."""


class WeightsOffer(msgspec.Struct, frozen=True, kw_only=True):
    """What a seed tells beside addresses."""

    config: str
    """See `config_digest`."""
    protocol: str
    """Of its Transfer Engine."""
    tensors: dict[str, TensorPart]
    digest: WeightsDigest | None = None
    """None: it is being computed; ask again."""


MemoryPlace = tuple[int, int, int]
"""Address, number of elements, bytes of an element."""


class SeedAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of `GET /remote_instance_transfer_engine_info`."""

    rank: int
    remote_instance_transfer_engine_info: tuple[str, dict[str, MemoryPlace]]
    """Session id of its Transfer Engine, and where each tensor is; SGLang's form."""
    weights: WeightsOffer

    @property
    def session_id(self) -> str:
        """`HOST:PORT` of the seed's Transfer Engine."""
        return self.remote_instance_transfer_engine_info[0]

    @property
    def places(self) -> dict[str, MemoryPlace]:
        """Where each tensor is in the seed's memory."""
        return self.remote_instance_transfer_engine_info[1]


@dataclass(frozen=True, slots=True)
class TensorRead:
    """One tensor on its way from a seed."""

    name: str
    dest: torch.Tensor
    """Contiguous."""
    remote: int
    """Address in the seed's process."""

    @property
    def num_bytes(self) -> int:
        """Bytes, at least one."""
        return self.dest.numel() * self.dest.element_size()


def place_of(tensor: torch.Tensor) -> MemoryPlace:
    """Where a contiguous tensor is."""
    assert tensor.is_contiguous(), "weights lie in one piece"
    return tensor.data_ptr(), tensor.numel(), tensor.element_size()


def plan_reads(
    answer: SeedAnswer, slots: Mapping[str, WeightSlot], *, config: str, protocol: str
) -> list[TensorRead]:
    """All tensors that are to be read, sorted by address here. Tensors without bytes are left out.

    Args:
        answer: The seed's.
        slots: Those of the model here.
        config: `config_digest` of the model here.
        protocol: Of this process's Transfer Engine.

    Raises:
        ValueError: What differs, and the remedy; the first tensor by name, if it is one.
    """
    weights = answer.weights
    if weights.protocol != protocol:
        raise ValueError(
            f"it transfers over {weights.protocol}, this server over {protocol}: start both with "
            "the same MOONCAKE_PROTOCOL"
        )
    if weights.config != config:
        raise ValueError(
            "it serves another model: its config.json differs from the one in --model-path; give "
            "a copy of the seed's model directory (weights are not needed)"
        )
    reads = [
        _plan_read(answer, name, slots.get(name)) for name in sorted({*slots, *weights.tensors})
    ]
    return sorted((read for read in reads if read.num_bytes), key=lambda read: read.dest.data_ptr())


def _plan_read(answer: SeedAnswer, name: str, slot: WeightSlot | None) -> TensorRead:
    theirs = answer.weights.tensors.get(name)
    place = answer.places.get(name)
    if slot is None or theirs is None or place is None:
        missing = "this server's model" if slot is None else "the seed"
        raise ValueError(
            f"tensor {name!r} is not in {missing}: start both with the same model and release"
        )
    ours = TensorPart.of(slot)
    address, count, element_size = place
    if ours != theirs:
        raise ValueError(
            f"tensor {name!r} is {theirs} there and {ours} here: start both with the same model, "
            "--dtype and --tp-size"
        )
    _, our_count, our_size = place_of(slot.dest)
    if (count, element_size) != (our_count, our_size):
        raise ValueError(
            f"tensor {name!r} has {count} elements of {element_size} bytes there, {our_count} of "
            f"{our_size} here: start both with the same release and --tp-size"
        )
    return TensorRead(name, slot.dest, address)


def check_checksums(theirs: Mapping[str, str], ours: Mapping[str, str]) -> None:
    """Compare what arrived with what the seed has.

    Raises:
        ValueError: Names the first tensor that differs, or that has no checksum.
    """
    for name, checksum in ours.items():
        if theirs.get(name) != checksum:
            raise ValueError(
                f"tensor {name!r} arrived with checksum {checksum}, the seed's is "
                f"{theirs.get(name, 'missing')}: start again; if it repeats, one of the hosts "
                "damages memory"
            )
