"""What every attention backend offers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch


class AttentionBackend(ABC):
    """Attention of one model runner, used by the thread that runs the model, batch after batch."""

    can_be_captured = False
    """Decoding may be captured in a graph and replayed, with `init_forward_metadata_graph`
    before each."""

    @abstractmethod
    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Compute, once for all layers, what this batch's attention needs (runs, masks)."""

    def init_forward_metadata_graph(self, forward_batch: ForwardBatch) -> None:
        """Plan a decode step that a graph runs: called before the capture and before each replay.

        What the captured kernels read must stay where it was when the size was first seen. The
        default is for backends that plan nothing for decoding.

        Args:
            forward_batch: Of a captured size, with the same tensors every time, which hold the
                step's input; `seq_lens_cpu` is the step's. Padding is requests of one token.
        """

    def warm_up(self, device: torch.device | str) -> None:
        """Do, before the first request, what the first use of a library costs once."""

    @abstractmethod
    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend from new tokens to their prefix and, causally, to each other.

        With `rows`, which are each request's last new token and no others, only what these attend
        is wanted: a backend may spare the rest. Shapes as in `RadixAttention.forward`.
        """

    @abstractmethod
    def forward_decode(
        self, q: torch.Tensor, layer: RadixAttention, forward_batch: ForwardBatch
    ) -> torch.Tensor:
        """Attend from one token of each request to its whole context, which the pool holds."""

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Store K and V, then attend; shapes as in `RadixAttention.forward`.

        Storing comes first and writes other slots than any load in flight; reading the pool
        is what waits for this layer's load, so that copying hides behind the layers before.
        """
        if save_kv_cache:
            forward_batch.token_to_kv_pool.set_kv_buffer(layer, forward_batch.out_cache_loc, k, v)
        if forward_batch.forward_mode.is_decode():
            return self.forward_decode(q, layer, forward_batch)
        return self.forward_extend(q, k, v, layer, forward_batch, rows)
