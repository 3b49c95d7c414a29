"""Attention of models whose layers are of several kinds: each kind has a backend of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch

from sglang.srt.layers.attention.base_attn_backend import (
    AttentionBackend,
    AttentionKind,
    IndexQuery,
)

if TYPE_CHECKING:
    from sglang.srt.layers.forward_batch_info import ForwardBatch
    from sglang.srt.layers.radix_attention import RadixAttention


def join_backends(backends: Mapping[AttentionKind, AttentionBackend]) -> AttentionBackend:
    """One backend for all layers of a model; a single backend is returned as it is."""
    return MixedAttnBackend(backends) if len(backends) > 1 else next(iter(backends.values()))


def uncaptured(
    backends: Mapping[AttentionKind, AttentionBackend], captures: Callable[[AttentionBackend], bool]
) -> str:
    """Kinds whose backends keep a step from being captured, for the log; "" if none does.

    Args:
        captures: Whether a backend lets the step be captured.
    """
    names = [
        f"{kind!r} by {type(backend).__name__}"
        for kind, backend in backends.items()
        if not captures(backend)
    ]
    return ", ".join(names)


class MixedAttnBackend(AttentionBackend):
    """Hands each layer to the backend of its kind. A step can be captured if all backends can do
    so."""

    def __init__(self, backends: Mapping[AttentionKind, AttentionBackend]) -> None:
        self._backends = dict(backends)
        self.can_be_captured = all(b.can_be_captured for b in self._backends.values())
        self.captures_extend = all(b.captures_extend for b in self._backends.values())

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        for backend in self._backends.values():
            backend.init_forward_metadata(forward_batch)

    def init_forward_metadata_graph(self, forward_batch: ForwardBatch) -> None:
        for backend in self._backends.values():
            backend.init_forward_metadata_graph(forward_batch)

    def init_forward_metadata_extend_graph(
        self, forward_batch: ForwardBatch, num_tokens: int, num_requests: int
    ) -> None:
        for backend in self._backends.values():
            backend.init_forward_metadata_extend_graph(forward_batch, num_tokens, num_requests)

    def graph_bytes(self, num_tokens: int, context_len: int) -> int:
        return sum(b.graph_bytes(num_tokens, context_len) for b in self._backends.values())

    def warm_up(self) -> None:
        for backend in self._backends.values():
            backend.warm_up()

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        rows: torch.Tensor | None = None,
        *,
        index: IndexQuery | None = None,
    ) -> torch.Tensor:
        backend = self._backends[layer.kind]
        return backend.forward(q, k, v, layer, forward_batch, save_kv_cache, rows, index=index)

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return self._backends[layer.kind].forward_extend(q, k, v, layer, forward_batch, rows)

    def forward_decode(
        self, q: torch.Tensor, layer: RadixAttention, forward_batch: ForwardBatch
    ) -> torch.Tensor:
        return self._backends[layer.kind].forward_decode(q, layer, forward_batch)

    def forward_decode_gated(
        self,
        q: torch.Tensor,
        gates: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
    ) -> torch.Tensor | None:
        return self._backends[layer.kind].forward_decode_gated(q, gates, layer, forward_batch)
