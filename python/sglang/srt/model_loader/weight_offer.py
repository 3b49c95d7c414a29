"""A seed's description of its weights: the parts of tensors of each rank, and their addresses."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import torch

from sglang.srt.layers.weight_slot import WeightSlot
from sglang.srt.model_loader.weight_ranges import HeldRanges

_MAX_VALUE_CHARS = 80


class TensorPart(msgspec.Struct, frozen=True, kw_only=True):
    """The part of one checkpoint tensor that a rank holds."""

    dtype: str
    """torch's name of it, like `bfloat16`."""
    shape: tuple[int, ...]
    """The whole tensor's shape."""
    split_dim: int = 0
    split_ranges: tuple[tuple[int, int], ...] = ()
    """Begins and ends of the rank's parts of `split_dim`, one for each of `split_runs`, which
    follow one another in its memory."""
    split_runs: tuple[int, ...] = ()
    """Lengths of the runs of `split_dim`, which ranks split one by one; empty: the rank has the
    whole tensor, as it would among any number of ranks."""

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
    """The part of an answer that takes long to compute: it reads every byte."""

    identity: str
    """See `weights_identity`; the same of all ranks."""
    checksums: dict[str, list[str]]
    """For each tensor xxh3-128 of the bytes of each cell (`HeldRanges.cells`) in the rank's memory,
    row by row, 32 hexadecimal digits."""


class WeightsOffer(msgspec.Struct, frozen=True, kw_only=True):
    """A seed's description of one rank, without addresses."""

    config: dict[str, str]
    """See `config_values`."""
    protocol: str
    """The protocol of its Transfer Engine."""
    ranks: int
    """How many ranks the seed has."""
    tensors: dict[str, TensorPart]
    digest: WeightsDigest | None = None
    """None: it is being computed; ask again. All ranks have theirs at the same time."""


MemoryPlace = tuple[int, int, int]
"""Address, number of elements, bytes of an element."""


class SeedAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of `GET /remote_instance_transfer_engine_info`."""

    rank: int
    remote_instance_transfer_engine_info: tuple[str, dict[str, MemoryPlace]]
    """Session id of the rank's Transfer Engine, and where each tensor is; SGLang's form."""
    weights: WeightsOffer

    @property
    def session_id(self) -> str:
        """`HOST:PORT` of the rank's Transfer Engine."""
        return self.remote_instance_transfer_engine_info[0]

    @property
    def places(self) -> dict[str, MemoryPlace]:
        """Place of each tensor in the rank's memory."""
        return self.remote_instance_transfer_engine_info[1]

    def with_digest(self, digest: WeightsDigest) -> SeedAnswer:
        """The same with what has been computed."""
        return msgspec.structs.replace(
            self, weights=msgspec.structs.replace(self.weights, digest=digest)
        )


def place_of(tensor: torch.Tensor) -> MemoryPlace:
    """Place of a contiguous tensor in memory."""
    assert tensor.is_contiguous(), "weights lie in one piece"
    return tensor.data_ptr(), tensor.numel(), tensor.element_size()


def check_offer(weights: WeightsOffer, *, config: Mapping[str, str], protocol: str) -> None:
    """Refuse a seed of another model, or over another transport.

    Args:
        config: `config_values` of the model here.
        protocol: Protocol of this process's Transfer Engine.

    Raises:
        ValueError: Model or transport differ; names the difference (of a model the first field) and
            the remedy.
    """
    if weights.protocol != protocol:
        raise ValueError(
            f"it transfers over {weights.protocol}, this server over {protocol}: start both with "
            "the same MOONCAKE_PROTOCOL"
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
