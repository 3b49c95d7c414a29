"""Interface of models to the loader, the runner and pool sizing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch

from sglang.srt.layers.forward_batch_info import ForwardBatch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.layers.placement import NamedSlots, WeightedLayer, slots_in
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.layers.vocab_parallel_embedding import VocabLogits
from sglang.srt.mem_cache.device.state_spec import StateSpec
from sglang.srt.models.mtp import DraftLayer


class CausalLM(torch.nn.Module, ABC):
    """A causal language model, or one rank's share of it. Only the thread that runs it uses it.

    Attributes:
        draft_layer: The layer that drafts tokens; None: the model was loaded without one.
        tied_names: Names of the head's tensor and of the embedding's, where these are one tensor,
            which the model has by the second name; otherwise empty.
    """

    draft_layer: DraftLayer | None
    tied_names: tuple[str, ...] = ()

    @abstractmethod
    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, forward_batch: ForwardBatch
    ) -> LogitsProcessorOutput:
        """Run one step.

        Args:
            input_ids: int64 `[num_tokens]`.
            positions: int64 `[num_tokens]`.

        Returns:
            Logits of each request's last token, fp32 `[bs, vocab_size]`.
        """

    @abstractmethod
    def draft_logits(self, hidden: torch.Tensor) -> VocabLogits:
        """Logits of the draft layer's hidden states, by the model's own head.

        Args:
            hidden: `[rows, hidden_size]`, from `DraftLayer.forward`.
        """

    @abstractmethod
    def state_specs(self, kv_dtype: torch.dtype) -> tuple[StateSpec, ...]:
        """Specs of the state cached per token and per prefix, including the draft layer's. The spec
        whose slots others share comes first.

        Args:
            kv_dtype: Dtype in which keys, values and latent rows are stored.
        """

    @abstractmethod
    def is_redundant(self, name: str) -> bool:
        """True if a checkpoint may have this tensor although the model does not load it."""

    def weight_slots(self) -> NamedSlots:
        """Full name and slot of every checkpoint tensor that the model needs."""
        return slots_in(self)

    def stacked_slots(self) -> NamedSlots:
        """Stacked tensors that a checkpoint may have instead; see `WeightedLayer`."""
        for module in self.modules():
            if isinstance(module, WeightedLayer):
                yield from module.stacked_slots()

    def attention_layers(self) -> Iterator[RadixAttention]:
        """Every attention layer, in the model's order."""
        return attention_layers(self)


def attention_layers(module: torch.nn.Module) -> Iterator[RadixAttention]:
    """Every attention layer of a model or of a part of it, in order."""
    for part in module.modules():
        if isinstance(part, RadixAttention):
            yield part
