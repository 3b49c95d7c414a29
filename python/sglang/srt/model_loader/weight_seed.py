"""A seed: a server that registers its weights with the transport, and gives other servers their
addresses and checksums."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import msgspec
import torch

from sglang.srt.distributed.device_communicators.mooncake_transfer_engine import (
    MooncakeTransferEngine,
)
from sglang.srt.distributed.rank_group import RankGroup, gather_bytes
from sglang.srt.hardware_backend.device_runtime import device_runtime
from sglang.srt.hardware_backend.leaf_hash import HASH_NAME, join_leaves
from sglang.srt.layers.placement import WeightSlot
from sglang.srt.model_loader.seed_answer import (
    PACKED_ANSWER_DECODER,
    PACKING,
    SeedAnswer,
    SeedWeights,
    TensorPart,
    WeightsDigest,
    place_of,
)
from sglang.srt.model_loader.weight_plan import cell_views
from sglang.srt.models.causal_lm import CausalLM
from sglang.srt.utils.background_call import BackgroundCall
from sglang.srt.utils.threads import lower_priority

logger = logging.getLogger(__name__)

_DIGEST_DECODER: Final = msgspec.msgpack.Decoder(WeightsDigest | str)
"""Decodes a rank's digest, or the error that prevented it."""


class WeightSeed:
    """The weights of a server, registered by each rank and never written again.

    Only the scheduler's thread of each rank uses it. Its calls are collectives.

    Threads: `weights-digest` on each rank, from the first request until all weights are hashed.
    """

    def __init__(
        self,
        engine: MooncakeTransferEngine,
        model: CausalLM,
        *,
        group: RankGroup,
        config: dict[str, str],
        identity: Callable[[], str],
    ) -> None:
        """A collective.

        Args:
            engine: Transfer Engine with the model's memory registered (`register_weights`).
            group: The ranks of the server.
            config: `config_values` of the model.
            identity: Returns the weights' identity, or raises ValueError; may read files. It is
                called only on rank 0.
        """
        self._slots = dict(model.weight_slots())
        self._group = group
        self._identity = identity
        own = SeedAnswer(
            rank=group.rank,
            remote_instance_transfer_engine_info=(
                engine.get_session_id(),
                {name: place_of(slot.dest) for name, slot in self._slots.items()},
            ),
            weights=SeedWeights(
                config=config,
                protocol=str(engine.describe()["protocol"]),
                ranks=group.size,
                packing=PACKING,
                hash=HASH_NAME,
                tensors={name: TensorPart.of(slot) for name, slot in self._slots.items()},
            ),
        )
        self._answers = [
            PACKED_ANSWER_DECODER.decode(raw)
            for raw in gather_bytes(group, msgspec.msgpack.encode(own))
        ]
        self._has_digests = False
        self._computing: BackgroundCall[WeightsDigest] | None = None

    def answer(self, rank: int) -> dict[str, Any]:
        """A rank's `SeedAnswer` as plain values. It never waits for a digest: ask again for one
        that is missing. A collective until the digests are computed.

        Args:
            rank: A rank of this server; the same value on all ranks.

        Raises:
            ValueError: There is no such rank, or a digest cannot be computed; in one line, on all
                ranks.
        """
        if rank >= self._group.size:
            last = self._group.size - 1
            raise ValueError(
                f"there is no rank {rank} here: ask for rank 0" + (f" to {last}" if last else "")
            )
        if not self._has_digests:
            self._take_digests()
        values: dict[str, Any] = msgspec.to_builtins(self._answers[rank])
        return values

    def _take_digests(self) -> None:
        """Compute digests in the background, and exchange them once all ranks have theirs."""
        if self._computing is None:
            self._computing = BackgroundCall(
                "weights-digest", self._compute, expected=(ValueError, OSError)
            )
        ended = torch.tensor([int(self._computing.ended)])
        if not int(self._group.reduce_min(ended)):
            return
        call, self._computing = self._computing, None
        own = call.result if call.error is None else str(call.error) or "failed"
        computed = [
            _DIGEST_DECODER.decode(raw)
            for raw in gather_bytes(self._group, msgspec.msgpack.encode(own))
        ]
        digests = []
        for rank, found in enumerate(computed):
            if isinstance(found, str):
                where = f" on rank {rank}" if len(computed) > 1 else ""
                raise ValueError(f"the weights' identity cannot be computed{where}: {found}")
            digests.append(found)
        self._answers = [
            answer.with_digest(msgspec.structs.replace(digest, identity=digests[0].identity))
            for answer, digest in zip(self._answers, digests, strict=True)
        ]
        self._has_digests = True

    def _compute(self) -> WeightsDigest:
        lower_priority()
        # First, because checksums are useless without it.
        identity = self._identity() if self._group.rank == 0 else ""
        found = {name: checksums(cell_views(slot)) for name, slot in self._slots.items()}
        logger.info("computed the checksums of %d tensors for servers that read them", len(found))
        return WeightsDigest(identity=identity, checksums=found)


def register_weights(engine: MooncakeTransferEngine, slots: Iterable[WeightSlot]) -> None:
    """Register the memory of all slots of one model, for as long as the process lives.

    Whole allocations are registered, because over NVLink a peer on the same host cannot map less.

    Raises:
        RegistrationError: The transport refused.
        OverlappingRange: Part of the memory is registered already.
    """
    tensors = [slot.dest for slot in slots if slot.dest.numel()]
    if tensors:
        ranges = device_runtime(tensors[0].device).allocations_of(tensors)
        engine.batch_register(list(ranges), list(ranges.values()))


def checksums(cells: Sequence[torch.Tensor]) -> list[str]:
    """Hash the bytes of each tensor, row by row (`leaf_hash`): 32 hexadecimal digits. Any thread.

    Args:
        cells: uint8 `[rows, bytes]` on one device; the bytes of a row are contiguous.
    """
    filled = [cell for cell in cells if cell.numel()]
    digests = iter(device_runtime(cells[0].device).leaf_digests(filled) if filled else ())
    return [join_leaves(next(digests) if cell.numel() else b"", cell.numel()) for cell in cells]
