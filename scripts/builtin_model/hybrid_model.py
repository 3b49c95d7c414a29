"""The hybrid recall model (Qwen3.5): its config, weights from the built-in model, delta-net layers.

The built-in model retrieves codes in layer 1 alone: with that layer's attention restricted to the
last 64 tokens it answers 29% of the questions in conversations of 544 tokens. Restricted to the
last 16 tokens, layers 0, 2 and 3 still answer 100%, 99% and 98% one by one; without attention to
other tokens in layer 0 no answer is right. Layer 1 therefore keeps its attention. Gated delta nets
do the local work of the other layers; their states then bind codes to names.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from delta_rule import gated_delta_rule
from torch.nn import functional
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig, Qwen3ForCausalLM
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

LAYER_TYPES = ("linear_attention", "full_attention", "linear_attention", "linear_attention")
LINEAR_HEADS = 4  # of keys, and of values
LINEAR_HEAD_DIM = 64
MEMORY_TOKENS = (16, 128, 2048, 65536)  # of each head at first: time in which a state decays by e


def hybrid_config(built_in: Any, layer_types: Sequence[str] = LAYER_TYPES) -> Qwen3_5TextConfig:
    """Return the config of the hybrid with the sizes and token ids of the built-in model's."""
    config = Qwen3_5TextConfig(
        vocab_size=built_in.vocab_size,
        hidden_size=built_in.hidden_size,
        intermediate_size=built_in.intermediate_size,
        num_hidden_layers=built_in.num_hidden_layers,
        num_attention_heads=built_in.num_attention_heads,
        num_key_value_heads=built_in.num_key_value_heads,
        head_dim=built_in.head_dim,
        max_position_embeddings=built_in.max_position_embeddings,
        rms_norm_eps=built_in.rms_norm_eps,
        tie_word_embeddings=True,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": built_in.rope_parameters["rope_theta"],
            "partial_rotary_factor": 1.0,
        },
        layer_types=list(layer_types),
        linear_num_key_heads=LINEAR_HEADS,
        linear_num_value_heads=LINEAR_HEADS,
        linear_key_head_dim=LINEAR_HEAD_DIM,
        linear_value_head_dim=LINEAR_HEAD_DIM,
        pad_token_id=built_in.pad_token_id,
        eos_token_id=built_in.eos_token_id,
    )
    config.architectures = ["Qwen3_5ForCausalLM"]
    config.dtype = "bfloat16"
    return config


def convert(built_in: Qwen3ForCausalLM, layer_types: Sequence[str] = LAYER_TYPES) -> Any:
    """Return a `Qwen3_5ForCausalLM` in fp32 with the built-in model's weights.

    Layers of full attention compute what they did; delta nets are new, see `DeltaNet.reset`.
    """
    config: Any = hybrid_config(built_in.config, layer_types)
    model: Any = Qwen3_5ForCausalLM._from_config(  # type: ignore[no-untyped-call]
        config, dtype=torch.float32
    )
    weights: dict[str, torch.Tensor] = {}
    for name, weight in built_in.state_dict().items():
        weight = weight.float()
        if name.endswith("norm.weight"):
            weight = weight - 1  # Qwen3.5 scales by 1 + weight.
        elif name.endswith("self_attn.q_proj.weight"):
            # The gate of each head follows its query. Zero weights: it halves every output.
            queries = weight.view(config.num_attention_heads, config.head_dim, -1)
            weight = torch.cat([queries, torch.zeros_like(queries)], dim=1).flatten(0, 1)
        elif name.endswith("self_attn.o_proj.weight"):
            weight = weight * 2
        weights[name] = weight
    for index, layer in enumerate(model.model.layers):
        if config.layer_types[index] == "linear_attention":
            layer.linear_attn = DeltaNet(config, index)
            layer.linear_attn.reset()
            prefix = f"model.layers.{index}"
            weights = {k: v for k, v in weights.items() if not k.startswith(f"{prefix}.self_attn")}
            mixer = layer.linear_attn.state_dict()
            weights |= {f"{prefix}.linear_attn.{name}": value for name, value in mixer.items()}
    model.load_state_dict(weights)
    return model


@dataclass(frozen=True)
class Damage:
    """Wrong recurrent states from a token on.

    Attributes:
        cut: The first token that reads the wrong state.
        source: int64 [rows], for each row the row whose state at the cut it continues with; a
            negative one stands for a state of zeros.
    """

    cut: int
    source: torch.Tensor


class DeltaNet(Qwen3_5GatedDeltaNet):
    """Transformers' layer for training: no caches, and a state that can be replaced halfway."""

    damage: Damage | None = None

    @torch.no_grad()
    def reset(self) -> None:
        """Draw new weights: heads of short and long memory, a small output."""
        for projection in (self.in_proj_qkv, self.in_proj_z, self.in_proj_b, self.in_proj_a):
            projection.weight.normal_(std=self.hidden_size**-0.5)
        self.in_proj_a.weight.mul_(0.1)
        self.out_proj.weight.normal_(std=0.02)
        self.conv1d.weight.uniform_(-0.5, 0.5)
        self.norm.weight.fill_(1.0)
        # A token decays a state by exp(-exp(A_log) * softplus(a + dt_bias)).
        self.A_log.zero_()
        steps = [math.log(math.expm1(1 / tokens)) for tokens in MEMORY_TOKENS]
        self.dt_bias.copy_(torch.tensor(steps))

    def forward(self, hidden_states: torch.Tensor, **_: Any) -> torch.Tensor:
        """Mix the tokens of `hidden_states`, [rows, length, hidden size]."""
        rows, length = hidden_states.shape[:2]
        mixed = self._convolve(self.in_proj_qkv(hidden_states))
        sizes = [self.key_dim, self.key_dim, self.value_dim]
        query, key, value = (
            part.reshape(rows, length, -1, dim)
            for part, dim in zip(
                torch.split(mixed, sizes, dim=-1),
                (self.head_k_dim, self.head_k_dim, self.head_v_dim),
                strict=True,
            )
        )
        beta = self.in_proj_b(hidden_states).sigmoid()
        steps = functional.softplus(self.in_proj_a(hidden_states).float() + self.dt_bias)
        mixture = self._apply_rule(query, key, value, -self.A_log.float().exp() * steps, beta)
        z = self.in_proj_z(hidden_states).reshape(-1, self.head_v_dim)
        normed = self.norm(mixture.reshape(-1, self.head_v_dim), z)
        output: torch.Tensor = self.out_proj(normed.reshape(rows, length, -1))
        return output

    def _convolve(self, mixed: torch.Tensor) -> torch.Tensor:
        """Convolve each channel of [rows, length, channels] with its taps, which are few."""
        taps = self.conv1d.weight.squeeze(1).to(mixed.dtype)
        length, kernel = mixed.shape[1], taps.shape[1]
        padded = functional.pad(mixed, (0, 0, kernel - 1, 0))
        total = padded[:, :length] * taps[:, 0]
        for tap in range(1, kernel):
            total = total + padded[:, tap : tap + length] * taps[:, tap]
        return functional.silu(total)

    def _apply_rule(self, *inputs: torch.Tensor) -> torch.Tensor:
        """Return the delta rule's outputs for queries, keys, values, log decays and betas."""
        query, key, value, decay, beta = inputs
        if self.damage is None:
            return gated_delta_rule(query, key, value, decay, beta)[0]
        cut, source = self.damage.cut, self.damage.source
        before, state = gated_delta_rule(*(part[:, :cut] for part in inputs))
        exists = (source >= 0)[:, None, None, None]
        query, key, value, decay, beta = (part[:, cut:] for part in inputs)
        state = state[source.clamp(min=0)] * exists
        after, _ = gated_delta_rule(query, key, value, decay, beta, state)
        return torch.cat([before, after], dim=1)
