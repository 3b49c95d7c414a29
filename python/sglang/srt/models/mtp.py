"""The layer that drafts tokens: multi-token prediction (MTP).

The layer reads the model's hidden state at a token, and the next token. It predicts the token after
next. It can then read its own hidden state and that draft, to predict one more token, and so on
(DeepSeek-V3 Technical Report, 2024, section 2.2). The layer is one more decoder layer, with its own
keys and values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from sglang.srt.distributed.tensor_group import ToAdd
from sglang.srt.layers.forward_batch_info import ForwardBatch
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.linear import RowParallelLinear
from sglang.srt.layers.placement import TensorPlacement
from sglang.srt.layers.radix_attention import LayerStep
from sglang.srt.layers.rotary_embedding import Rotation


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftNames:
    """Names of a draft layer's parts in a checkpoint."""

    layer: str
    """Prefix of the decoder layer's tensors."""
    embedding_norm: str
    hidden_norm: str
    projection: str
    norm: str
    all: tuple[str, ...]
    """Prefixes of all tensors of draft layers."""
    others: tuple[str, ...]
    """Prefixes of tensors that a model with a draft layer does not load: copies, further layers."""

    @classmethod
    def as_next_layers(cls, layers: str, index: int, count: int) -> DraftNames:
        """Names of DeepSeek's draft layers: they follow the model's last layer, and have the other
        parts too.

        Args:
            layers: Prefix of the model's layers.
            index: Number of the first draft layer.
            count: Draft layers in the checkpoint.
        """
        first, *further = (f"{layers}.{index + more}" for more in range(max(count, 1)))
        return cls(
            layer=first,
            embedding_norm=f"{first}.enorm",
            hidden_norm=f"{first}.hnorm",
            projection=f"{first}.eh_proj",
            norm=f"{first}.shared_head.norm",
            all=tuple(f"{layers}.{index + more}." for more in range(count)),
            others=(
                f"{first}.embed_tokens.",
                f"{first}.shared_head.head.",
                *(f"{layer}." for layer in further),
            ),
        )

    @classmethod
    def as_model(cls, prefix: str, count: int) -> DraftNames:
        """Names of Qwen's draft layers, which form a small model.

        Args:
            prefix: Prefix of the small model's tensors.
            count: Draft layers in the checkpoint.
        """
        return cls(
            layer=f"{prefix}.layers.0",
            embedding_norm=f"{prefix}.pre_fc_norm_embedding",
            hidden_norm=f"{prefix}.pre_fc_norm_hidden",
            projection=f"{prefix}.fc",
            norm=f"{prefix}.norm",
            all=(f"{prefix}.",),
            others=tuple(f"{prefix}.layers.{further}." for further in range(1, count)),
        )


class DecoderLayer(Protocol):
    """The methods of a `LlamaDecoderLayer` that a draft layer calls; documented there."""

    def forward(
        self, x: ToAdd, residual: torch.Tensor, step: LayerStep
    ) -> tuple[ToAdd, torch.Tensor]: ...

    def store(self, residual: torch.Tensor, step: LayerStep) -> None: ...


class DraftLayer(torch.nn.Module):
    """Joins a token's embedding with the hidden state before it, then runs one decoder layer."""

    def __init__(
        self,
        names: DraftNames,
        placement: TensorPlacement,
        *,
        embed: Callable[[torch.Tensor], torch.Tensor],
        rotate: Callable[[torch.Tensor], Rotation],
        layer: DecoderLayer,
        norm: type[RMSNorm],
        hidden_size: int,
        eps: float,
    ) -> None:
        """Args:
            placement: That of the whole checkpoint.
            embed: The model's `VocabParallelEmbedding.forward`.
            rotate: The model's `RotaryEmbedding.forward`.
            layer: The decoder layer.
            norm: Class of the three norms around it, of epsilon `eps`.

        Raises:
            ValueError: The projection's inputs cannot be split over the ranks.
        """
        super().__init__()
        self._embed, self._rotate = embed, rotate
        self.embedding_norm, self.hidden_norm, self.norm = (
            norm(hidden_size, eps, placement=placement.at(name))
            for name in (names.embedding_norm, names.hidden_norm, names.norm)
        )
        self._group = placement.tp_group
        self.projection = RowParallelLinear(
            placement.share(2 * hidden_size, "inputs of the draft layer's projection"),
            hidden_size,
            bias=False,
            placement=placement.at(names.projection),
        )
        self.layer = layer

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        hidden: torch.Tensor,
        forward_batch: ForwardBatch,
    ) -> torch.Tensor:
        """Run the layer, and store its keys and values in the slots of `forward_batch`.

        Args:
            input_ids: int64 `[num_tokens]`.
            positions: int64 `[num_tokens]`: theirs.
            hidden: `[num_tokens, hidden_size]`: for each token the model's hidden state at the
                token before it, after the model's final norm; for a token that was drafted, this
                method's own result at the token before it.
            forward_batch: The tokens' slots and contexts. A context has no position 0, for which
                there is no hidden state; so it begins inside a page, and the attention backends of
                the batch have `page_size` 1.

        Returns:
            `[num_tokens, hidden_size]`, after the layer's own final norm: input of
            `CausalLM.draft_logits`, and `hidden` of the next draft.
        """
        residual, rotation = self._join(input_ids, positions, hidden)
        x, residual = self.layer.forward(None, residual, LayerStep(rotation, forward_batch))
        return self.norm.add_(x, residual)[0]

    def store(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        hidden: torch.Tensor,
        forward_batch: ForwardBatch,
    ) -> None:
        """`forward` for a step that only stores: what tokens attend to plays no part in it."""
        residual, rotation = self._join(input_ids, positions, hidden)
        self.layer.store(residual, LayerStep(rotation, forward_batch))

    def _join(
        self, input_ids: torch.Tensor, positions: torch.Tensor, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, Rotation]:
        """The decoder layer's input, `[num_tokens, hidden_size]`, and its rotation."""
        # Kernels that start early may read what was written before the lookup; see `early_start`.
        rotation = self._rotate(positions)
        embedded = self.embedding_norm.forward(self._embed(input_ids))
        both = torch.cat((embedded, self.hidden_norm.forward(hidden)), dim=-1)
        share = self.projection.inputs
        joined = self.projection.part(both[:, share.begin : share.end].contiguous())
        return self._group.all_reduce(joined), rotation
