"""A seed: a server that gives other servers the addresses of its weights, so that they can read
them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Final

import msgspec
import torch

from sglang.srt.distributed.device_communicators.mooncake_transfer_engine import (
    MooncakeTransferEngine,
)
from sglang.srt.distributed.rank_group import RankGroup, gather_bytes
from sglang.srt.hardware_backend.leaf_hash import HASH_NAME
from sglang.srt.model_loader.tensor_memory import checksums
from sglang.srt.model_loader.weight_offer import (
    PACKED_ANSWER_DECODER,
    SeedAnswer,
    TensorPart,
    WeightsDigest,
    WeightsOffer,
    place_of,
)
from sglang.srt.model_loader.weight_plan import cell_views
from sglang.srt.models.causal_lm import CausalLM
from sglang.srt.utils.background_call import BackgroundCall
from sglang.srt.utils.threads import give_way

logger = logging.getLogger(__name__)


class _Computed(msgspec.Struct, frozen=True, kw_only=True):
    """Result of computing one rank's digest."""

    error: str = ""
    identity: str = ""
    checksums: dict[str, list[str]] = {}


_COMPUTED_DECODER: Final = msgspec.msgpack.Decoder(_Computed)


class WeightSeed:
    """The weights of a server, registered by each rank and never written again.

    One thread of each rank uses it, the scheduler's; its calls are collectives.

    Threads: `weights-digest` on each rank, from the first request until every byte was read once.
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
            engine: Transfer Engine, with which the model's memory is registered
                (`register_weights`).
            group: The ranks of the server.
            config: `config_values` of the model.
            identity: Returns the weights' identity, or raises ValueError; may read files. Called
                only on rank 0.
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
            weights=WeightsOffer(
                config=config,
                protocol=str(engine.describe()["protocol"]),
                ranks=group.size,
                hash=HASH_NAME,
                tensors={name: TensorPart.of(slot) for name, slot in self._slots.items()},
            ),
        )
        self._answers = [
            PACKED_ANSWER_DECODER.decode(raw)
            for raw in gather_bytes(group, msgspec.msgpack.encode(own))
        ]
        self._has_digests = False
        self._computing: BackgroundCall[_Computed] | None = None

    def answer(self, rank: int) -> dict[str, Any]:
        """A rank's `SeedAnswer` as plain values. Never waits for a digest; if it is missing, ask
        again.

        A collective until the digests are computed.

        Args:
            rank: A rank of this server; the same number on all its ranks.

        Raises:
            ValueError: There is no such rank, or a digest cannot be computed; one line, on all
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
        """Compute the digests of all ranks in the background; exchange them once all are
        computed."""
        if self._computing is None:
            self._computing = BackgroundCall(
                "weights-digest", self._compute, expected=(ValueError, OSError)
            )
        ended = torch.tensor([int(self._computing.ended)])
        if not int(self._group.reduce_min(ended)):
            return
        call, self._computing = self._computing, None
        own = call.result if call.error is None else _Computed(error=str(call.error) or "failed")
        computed = [
            _COMPUTED_DECODER.decode(raw)
            for raw in gather_bytes(self._group, msgspec.msgpack.encode(own))
        ]
        for rank, one in enumerate(computed):
            if one.error:
                where = f" on rank {rank}" if len(computed) > 1 else ""
                raise ValueError(f"the weights' identity cannot be computed{where}: {one.error}")
        self._answers = [
            answer.with_digest(
                WeightsDigest(identity=computed[0].identity, checksums=one.checksums)
            )
            for answer, one in zip(self._answers, computed, strict=True)
        ]
        self._has_digests = True

    def _compute(self) -> _Computed:
        give_way()
        # First, since where there is none the checksums are of no use.
        identity = self._identity() if self._group.rank == 0 else ""
        told = {name: checksums(cell_views(slot)) for name, slot in self._slots.items()}
        logger.info("computed the checksums of %d tensors for servers that read them", len(told))
        return _Computed(identity=identity, checksums=told)
