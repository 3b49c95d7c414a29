"""Ministral: llama's decoder, some of whose layers have a sliding window."""

from __future__ import annotations

from sglang.srt.models.llama import LlamaForCausalLM


class MinistralForCausalLM(LlamaForCausalLM):
    """See `LlamaForCausalLM`; `ModelConfig.sliding_window_layers` has the layers."""
