"""A seed: a server that tells others where its weights are, so that they read them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import msgspec

from sglang.srt.distributed.device_communicators.mooncake_transfer_engine import (
    MooncakeTransferEngine,
)
from sglang.srt.model_loader.tensor_memory import tensor_checksum
from sglang.srt.model_loader.weight_offer import (
    SeedAnswer,
    TensorPart,
    WeightsDigest,
    WeightsOffer,
    place_of,
)
from sglang.srt.models.causal_lm import CausalLM
from sglang.srt.utils.background_call import BackgroundCall
from sglang.srt.utils.threads import give_way

logger = logging.getLogger(__name__)


class WeightSeed:
    """The weights of one rank, registered and never written again. One thread asks it.

    Threads: `weights-digest`, from the first question until every byte was read once.
    """

    def __init__(
        self,
        engine: MooncakeTransferEngine,
        model: CausalLM,
        *,
        rank: int,
        config: str,
        identity: Callable[[], str],
    ) -> None:
        """Args:
        engine: Knows the model's memory (`register_weights`).
        rank: This rank.
        config: `config_digest` of the model.
        identity: Tells the weights' identity, or raises ValueError; may read files.
        """
        slots = dict(model.weight_slots())
        self._tensors = {name: slot.dest for name, slot in slots.items()}
        self._rank = rank
        self._identity = identity
        self._answer = SeedAnswer(
            rank=rank,
            remote_instance_transfer_engine_info=(
                engine.get_session_id(),
                {name: place_of(slot.dest) for name, slot in slots.items()},
            ),
            weights=WeightsOffer(
                config=config,
                protocol=str(engine.describe()["protocol"]),
                tensors={name: TensorPart.of(slot) for name, slot in slots.items()},
            ),
        )
        self._digest: BackgroundCall[WeightsDigest] | None = None

    def answer(self, rank: int) -> dict[str, Any]:
        """A `SeedAnswer` as plain values. Never waits: without a digest, ask again.

        Raises:
            ValueError: There is no such rank, or the digest cannot be computed; one line.
        """
        if rank != self._rank:
            raise ValueError(f"there is no rank {rank} here: ask for rank {self._rank}")
        if self._answer.weights.digest is None:
            self._take_digest()
        values: dict[str, Any] = msgspec.to_builtins(self._answer)
        return values

    def _take_digest(self) -> None:
        if self._digest is None:
            self._digest = BackgroundCall(
                "weights-digest", self._compute_digest, expected=(ValueError, OSError)
            )
        if not self._digest.ended:
            return
        call, self._digest = self._digest, None
        if call.error is not None:
            raise ValueError(f"the weights' identity cannot be told: {call.error}")
        weights = msgspec.structs.replace(self._answer.weights, digest=call.result)
        self._answer = msgspec.structs.replace(self._answer, weights=weights)

    def _compute_digest(self) -> WeightsDigest:
        give_way()
        checksums = {name: tensor_checksum(tensor) for name, tensor in self._tensors.items()}
        logger.info("computed the checksums of %d tensors for who reads them", len(checksums))
        return WeightsDigest(identity=self._identity(), checksums=checksums)
