"""The work of a prefill, by its length and what is cached before it, in a product's operations.

Weights, heads and states are those of the engine's own model. Each kind of work has a share of the
rate of a large product; all shares are measurements of H200s, see the constants, so estimates for
other machines assume their memory and caches to be as fast for their products. The last layer
computes the outputs of one token alone.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from sglang.planning.model_costs import build_on_meta, used_experts
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.attention_kind import DSA, SLIDING_WINDOW
from sglang.srt.layers.linear_attention.delta_net import GatedDeltaNet
from sglang.srt.layers.linear_attention.kda import KimiDeltaAttention
from sglang.srt.layers.linear_attention.mamba2 import Mamba2
from sglang.srt.layers.mla.latent_attention import LatentAttention
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.device.state_pool import MambaSpec
from sglang.srt.mem_cache.device.state_spec import StateSpec

_FLOP_S: Final = 989e12
"""Data sheet of an H200, dense bf16: shares are of this rate."""
_PRODUCTS: Final = 692e12 / _FLOP_S
"""Products of layers: Qwen3-8B's prefills, less attention; 2026-11-24-gpu-dense.jsonl."""
_EXPERTS: Final = 617e12 / _FLOP_S
"""Experts with whole tiles: 510 to 650 TFLOP/s with 1,024 tokens of an expert, of which 6% are
padding; benchmark/results/2026-11-26-gpu-hybrid-compute.md."""
_TILE: Final = 128
"""Tokens of an expert's tile; on average half of one is padding."""
_ATTENTION: Final = 593e12 / _FLOP_S
"""Full attention: 576 and 608 TFLOP/s; 2026-11-21-gpu-attention-backends.jsonl."""
_LATENT: Final = 350e12 / _FLOP_S
"""Latent attention, keys and values projected up;
benchmark/results/2026-11-27-eight-forecast.md."""
_CHOSEN: Final = 632e12 / _FLOP_S
"""Latent attention to chosen rows, by FlashMLA; benchmark/results/2026-11-27-gpu-flashmla.md."""
_SCORES: Final = 562e12 / _FLOP_S
"""Scores of the indexer; benchmark/results/2026-11-27-eight-forecast.md."""
_CHOICE: Final = 6000.0
"""Operations in the time in which the choice reads a score: 102 us for 1,024 tokens x 16,384;
benchmark/results/2026-11-26-gpu-hybrid-compute.md."""
_MOVED: Final = 471.0
"""Operations in the time in which an element of 2 bytes is read or written, at 4.2 TB/s."""
_STATE: Final = {GatedDeltaNet: 343.0, KimiDeltaAttention: 350.0, Mamba2: 155.0}
"""Operations for each token and element of a layer's state. Delta net: 1,490 us for 8,192 tokens
(benchmark/results/2026-11-26-gpu-hybrid-compute.md). The others: the rest of whole prefills
(2026-11-29-gpu-scans.jsonl; KDA: 2026-11-29-gpu-scans-evening.jsonl)."""
_OF_ALL_TOKENS: Final = re.compile(
    r"\.(k_proj|v_proj|qkv_proj|kv_a_proj_with_mqa|kv_b_proj|wk|in_proj\w*|[bf](_[ab])?_proj)\."
)
"""Weights of the last layer that all tokens are multiplied with."""
_LAYER: Final = re.compile(r"\.layers\.(\d+)\.")


class PrefillCost:
    """Operations of one prompt's prefill, of all ranks together."""

    def __init__(self, config: ModelConfig) -> None:
        model, fields = build_on_meta(config), config.hf_config
        last = config.num_hidden_layers - 1
        used, experts = used_experts(config)
        self._per_token = 0.0
        """Operations for each token, whatever the context."""
        self._of_experts = 0.0
        """The same of routed experts without padding."""
        for name, slot in model.weight_slots():
            found = _LAYER.search(name)
            layer = last + 1 if found is None else int(found[1])
            if layer > last or (layer == last and not _OF_ALL_TOKENS.search(name)):
                continue  # Embedding, head, or a layer that drafts; outputs of a single token.
            weights, shape = slot.dest.numel(), slot.dest.shape
            moved = _MOVED * sum(shape) if len(shape) == 2 else 0.0
            if ".experts." in name:
                self._of_experts += 2 * weights / _EXPERTS * used / experts
                self._per_token += moved * used / experts
            else:
                self._per_token += 2 * weights / _PRODUCTS + moved
        self._share_of_expert = used / experts if experts else 0.0
        self._attention: list[RadixAttention] = []
        for module in model.modules():
            if isinstance(module, RadixAttention) and module.layer_id < last:
                self._attention.append(module)
            for kind, operations in _STATE.items():
                if isinstance(module, kind):
                    self._per_token += operations * _state_elements(model.state_specs(config.dtype))
        self._fields = fields
        self._window = getattr(fields, "sliding_window", None) or 0

    def operations(self, tokens: int, before: int = 0) -> float:
        """Operations of `tokens` after `before` cached ones."""
        found = tokens * self._per_token
        if self._of_experts:
            used = tokens * self._share_of_expert
            found += tokens * self._of_experts * (used + _TILE / 2) / used
        keys = np.arange(before + 1, before + tokens + 1, dtype=np.float64)
        for one in self._attention:
            found += self._of_attention(one, keys)
        return found

    def _of_attention(self, one: RadixAttention, keys: npt.NDArray[np.float64]) -> float:
        """Operations of a layer's attention, of tokens that see so many keys."""
        fields = self._fields
        if not isinstance(one, LatentAttention):
            if one.kind == SLIDING_WINDOW:
                keys = np.minimum(keys, self._window)
            return float(4 * one.num_heads * one.head_dim * keys.sum()) / _ATTENTION
        plain = fields.qk_nope_head_dim + fields.qk_rope_head_dim + fields.v_head_dim
        of_token = 2 * one.num_heads * plain * keys / _LATENT
        if one.kind != DSA:
            return float(of_token.sum())
        row = 2 * fields.kv_lora_rank + fields.qk_rope_head_dim
        chosen = 2 * one.num_heads * row * np.minimum(keys, fields.index_topk) / _CHOSEN
        score = 2 * fields.index_n_heads * fields.index_head_dim / _SCORES + _CHOICE
        return float(np.minimum(of_token, chosen).sum() + score * keys.sum())


def _state_elements(specs: Sequence[StateSpec]) -> int:
    """Elements of the recurrent state of a layer, without the convolution's inputs."""
    (spec,) = (one for one in specs if isinstance(one, MambaSpec))
    return math.prod(spec.buffers[0].shape)
