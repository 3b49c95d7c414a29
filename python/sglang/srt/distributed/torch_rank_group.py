"""`RankGroup` over torch.distributed: ticks and agreements of ranks."""

from __future__ import annotations

import copy
from typing import Final

import numpy as np
import torch

from sglang.srt.distributed.parallel_state import (
    GroupCoordinator,
    create_custom_parallel_group,
    destroy_custom_parallel_group,
    get_attention_cp_group,
    get_attention_tp_group,
    get_dp_group,
    get_world_group,
)
from sglang.srt.distributed.rank_group import RankGroup

_FRAME_BYTES: Final = 4096
_LENGTH_BYTES: Final = 8


class TorchRankGroup(RankGroup):
    """Messages of the CPU over gloo.

    A message that fits into one frame with its length takes one collective; a longer one takes two.
    MIN runs first over the ranks with the same heads, then over those that split them. If one of
    these groups has all ranks, there is only one round.

    Attributes:
        rounds: Groups of the rounds of a MIN, in order, without groups of one rank.
    """

    def __init__(
        self,
        whole: GroupCoordinator,
        attention_tp: GroupCoordinator,
        attention_cp: GroupCoordinator | None = None,
    ) -> None:
        """`whole` has all the ranks; no `attention_cp`: `attention_tp` has all of them, too."""
        self._whole = whole
        self.rank, self.size, self.first_rank = whole.rank, whole.size, whole.ranks[0]
        self.attn_cp_size = 1 if attention_cp is None else attention_cp.size
        parts = (attention_cp, attention_tp)
        self.rounds = [group for group in parts if group is not None and group.size > 1]
        self._owns_rounds = False

    @classmethod
    def of_world(cls) -> TorchRankGroup:
        """All ranks of the server."""
        return cls(get_world_group(), get_world_group())

    @classmethod
    def of_dp_group(cls) -> TorchRankGroup:
        """The ranks of this rank's DP group, numbered from 0."""
        return cls(get_dp_group(), get_attention_tp_group(), get_attention_cp_group())

    def broadcast(self, payload: bytes | None) -> bytes:
        assert (payload is not None) == (self.rank == 0), "only rank 0 broadcasts"
        message = payload or b""
        head = torch.zeros(_FRAME_BYTES, dtype=torch.uint8)
        if self.rank == 0:
            first = len(message).to_bytes(_LENGTH_BYTES, "little") + message
            first = first[:_FRAME_BYTES]
            head[: len(first)] = _as_tensor(first)
        self._whole.broadcast_on_cpu(head)
        raw = head.numpy().tobytes()
        length = int.from_bytes(raw[:_LENGTH_BYTES], "little")
        missing = length - (_FRAME_BYTES - _LENGTH_BYTES)
        if missing <= 0:
            return raw[_LENGTH_BYTES : _LENGTH_BYTES + length]
        rest = torch.empty(missing, dtype=torch.uint8)
        if self.rank == 0:
            rest = _as_tensor(message[-missing:])
        self._whole.broadcast_on_cpu(rest)
        return raw[_LENGTH_BYTES:] + rest.numpy().tobytes()

    def reduce_min(self, values: torch.Tensor) -> torch.Tensor:
        least = values.clone()
        for group in self.rounds:
            group.min_on_cpu(least)
        return least

    def open_min(self) -> TorchRankGroup:
        # All ranks have the same number of rounds, with different groups.
        made = [create_custom_parallel_group(list(group.ranks)) for group in self.rounds]
        twin = copy.copy(self)
        twin.rounds = [
            GroupCoordinator(group.ranks, group.ranks[group.rank], None, own)
            for group, own in zip(self.rounds, made, strict=True)
        ]
        twin._owns_rounds = True
        return twin

    def close(self) -> None:
        if self._owns_rounds:
            groups, self.rounds = self.rounds, []
            for group in groups:
                destroy_custom_parallel_group(group.cpu_group)


def _as_tensor(raw: bytes) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(raw, dtype=np.uint8).copy())
