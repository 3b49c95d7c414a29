"""Interface of models to the loader, the runner and pool sizing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch

from sglang.srt.layers.forward_batch_info import ForwardBatch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.layers.weight_slot import NamedSlots
from sglang.srt.mem_cache.device.state_spec import StateSpec


class CausalLM(Protocol):
    """A causal language model, or one rank's share of it. Only the thread that runs it uses it."""

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

    def weight_slots(self) -> NamedSlots:
        """Full name and slot of every checkpoint tensor that the model needs."""

    def stacked_slots(self) -> NamedSlots:
        """Stacked tensors that a checkpoint may have instead; see `WeightedLayer`."""

    def is_redundant(self, name: str) -> bool:
        """True if a checkpoint may have this tensor although the model does not load it."""

    def state_specs(self, kv_dtype: torch.dtype) -> tuple[StateSpec, ...]:
        """Specs of the state cached per token and per prefix. The spec whose slots others share
        comes first.

        Args:
            kv_dtype: Dtype in which keys, values and latent rows are stored.
        """

    def attention_layers(self) -> Iterator[RadixAttention]:
        """Every attention layer, in the model's order."""

    def parameters(self, recurse: bool = True) -> Iterator[torch.nn.Parameter]:
        """The weights."""
