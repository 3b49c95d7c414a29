"""gpt-oss: llama's decoder with experts in all layers and attention sinks; some layers have a
window."""

from __future__ import annotations

import math

import torch
from transformers import PretrainedConfig

from sglang.srt.configs.model_config import ModelConfig, positive_int
from sglang.srt.layers.moe.sparse_moe import RouterOptions, SparseMoeOptions
from sglang.srt.layers.placement import (
    NamedSlots,
    Share,
    TensorPlacement,
    WeightedLayer,
    WeightSlot,
)
from sglang.srt.layers.triton_ops.arguments import ClampedGate
from sglang.srt.models.llama import DecoderOptions, LayerSpec, LlamaAttention, LlamaForCausalLM


class AttentionSinks(WeightedLayer):
    """The sinks of a layer's heads on this rank; see `RadixAttention`."""

    def __init__(self, heads: Share, placement: TensorPlacement) -> None:
        super().__init__(placement)
        self._heads = heads
        self.weight = placement.empty(heads.size, dtype=torch.float32)

    def weight_slots(self) -> NamedSlots:
        yield self.prefix, WeightSlot.of(self.weight, self._heads)


class GptOssAttention(LlamaAttention):
    """Grouped-query attention whose softmax has one more logit for each head."""

    rotates_while_attending = True

    def __init__(self, layer: LayerSpec) -> None:
        super().__init__(layer)
        placement = layer.placement.at(self.name)
        heads = placement.share(layer.config.num_attention_heads, "attention heads")
        self.sinks = AttentionSinks(heads, placement.at("sinks"))
        self.attn.sinks = self.sinks.weight


class GptOssForCausalLM(LlamaForCausalLM):
    """See `LlamaForCausalLM`. Raises ValueError if config.json contradicts itself."""

    @staticmethod
    def decoder_options(config: ModelConfig) -> DecoderOptions:
        hf = config.hf_config
        _check_format(config)
        count = positive_int(hf, "num_local_experts")
        top_k = positive_int(hf, "num_experts_per_tok")
        router = RouterOptions(num_experts=count, top_k=top_k)
        experts = SparseMoeOptions(
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            # A softmax over the chosen logits alone is the whole softmax, renormalised.
            router=router,
            router_name="router",
            activation=ClampedGate(
                limit=_positive_or(hf, "swiglu_limit", 7.0),
                alpha=_positive_or(hf, "swiglu_alpha", 1.702),
                shift=1.0,
            ),
            has_bias=True,
            has_alternating_stacks=True,
        )
        return DecoderOptions(
            qkv_bias=hf.attention_bias,
            out_bias=hf.attention_bias,
            sparse=experts,
            sparse_layers=frozenset(range(config.num_hidden_layers)),
            attention=GptOssAttention,
        )


def _check_format(config: ModelConfig) -> None:
    """Raise ValueError: a weight format whose products know no biases of experts."""
    found = config.quantization
    if found is None or found.method == "mxfp4":
        return
    where = "--quantization" if found.is_at_load else "config.json: quantization_config of method"
    raise ValueError(
        f"{where} {found.method}: the experts of {config.architecture} have biases, which only "
        "bfloat16 and mxfp4 take: serve a checkpoint in one of these, without the setting"
    )


def _positive_or(hf: PretrainedConfig, name: str, default: float) -> float:
    """A field that is a positive number. The configuration of transformers 5.17 lacks these fields.

    Raises ValueError: the field is no positive number.
    """
    value = getattr(hf, name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"config.json: {name}={value!r} must be a positive number")
    return float(value)
