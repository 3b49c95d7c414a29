"""The hybrid's layer that drafts tokens (MTP): names in the checkpoint, first weights, the chain.

The layer is that of Qwen3.5 and Qwen3-Next, computed by transformers' `MtpLayer`. At position j it
takes token j and the trunk's hidden state of position j - 1 (after the trunk's final norm), and
predicts token j + 1. A chain applies it again to its own output and the token that it predicted.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from hybrid_model import DeltaNet
from safetensors.torch import load_file
from transformers import Qwen3_5ForCausalLM
from transformers.modeling_layers import MtpLayer
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    Qwen3_5DecoderLayer,
    Qwen3_5RMSNorm,
    apply_rotary_pos_emb,
)

NUM_STEPS = 3  # tokens of a chain
TEACHER_LAYER = 1  # The trunk's layer of attention, which finds the codes.
CHECKPOINT_NAMES = {
    "eh_proj": "mtp.fc",
    "enorm": "mtp.pre_fc_norm_embedding",
    "hnorm": "mtp.pre_fc_norm_hidden",
    "mtp_block": "mtp.layers.0",
    "post_norm": "mtp.norm",
}
"""Modules of transformers' `MtpLayer` under the names of Qwen3.5's checkpoints."""


def load_trunk(directory: Path) -> Any:
    """Return the frozen `Qwen3_5ForCausalLM` in fp32, with the delta nets of `hybrid_model`.

    It is on torch's default device. These delta nets are several times as fast as those of
    transformers on a CPU.
    """
    trunk: Any = Qwen3_5ForCausalLM.from_pretrained(directory, dtype=torch.float32)
    for index, layer in enumerate(trunk.model.layers):
        if trunk.config.layer_types[index] == "linear_attention":
            net = DeltaNet(trunk.config, index)
            net.load_state_dict(layer.linear_attn.state_dict())
            layer.linear_attn = net
    return trunk.to(torch.get_default_device()).eval().requires_grad_(False)


def new_layer(config: Any) -> MtpLayer:
    """Return an fp32 MTP layer of random weights on torch's default device."""
    config = copy.deepcopy(config)
    config.num_hidden_layers, config.layer_types = 1, ["full_attention"]
    layer = MtpLayer(config, Qwen3_5DecoderLayer, Qwen3_5RMSNorm, layer_idx=0)
    return layer.to(torch.get_default_device(), torch.float32)


def load_layer(trunk: Any, directory: Path) -> MtpLayer:
    """Return the MTP layer of a checkpoint, in fp32.

    Raises:
        RuntimeError: Weights are missing, unknown, or of other shapes.
    """
    weights = {}
    for name, value in load_file(directory / "model.safetensors").items():
        for module, prefix in CHECKPOINT_NAMES.items():
            if name.startswith(prefix + "."):
                weights[module + name.removeprefix(prefix)] = value
    layer = new_layer(trunk.config)
    layer.load_state_dict(weights)
    return layer.eval()


def checkpoint_weights(layer: MtpLayer) -> dict[str, torch.Tensor]:
    """Return the layer's weights as bfloat16 tensors on the CPU, by their checkpoint names."""
    weights = {}
    for name, value in layer.state_dict().items():
        module, rest = name.split(".", 1)
        weights[f"{CHECKPOINT_NAMES[module]}.{rest}"] = value.to("cpu", torch.bfloat16).contiguous()
    return weights


@torch.no_grad()
def imitate(trunk: Any, layer: MtpLayer, batches: Iterable[torch.Tensor]) -> None:
    """Set the first weights: the trunk's layer of attention behind a fitted `fc`.

    `fc` gets the least-squares solution for the input of that trunk layer at the same position. The
    draft layer therefore attends where the trunk will attend for the next token.

    Args:
        batches: Token ids, int64 [rows, length]; some ten thousand tokens in all.
    """
    teacher = trunk.model.layers[TEACHER_LAYER]
    layer.mtp_block.load_state_dict(teacher.state_dict())
    assert layer.post_norm is not None
    layer.post_norm.load_state_dict(trunk.model.norm.state_dict())
    entering: list[torch.Tensor] = []
    hook = teacher.register_forward_pre_hook(lambda _, inputs: entering.append(inputs[0]))
    size = trunk.config.hidden_size
    squares, products = torch.zeros(2 * size, 2 * size), torch.zeros(2 * size, size)
    for ids in batches:
        hidden = trunk.model(input_ids=ids, use_cache=False).last_hidden_state
        embedded = layer.enorm(trunk.model.embed_tokens(ids[:, 1:]))
        given = torch.cat([embedded, layer.hnorm(hidden[:, :-1])], dim=-1).flatten(0, 1)
        squares += given.T @ given
        products += given.T @ entering.pop()[:, 1:].flatten(0, 1)
    hook.remove()
    ridge = 1e-5 * squares.diagonal().mean() * torch.eye(2 * size)
    layer.eh_proj.weight.copy_(torch.linalg.solve(squares + ridge, products).T)


@dataclass(frozen=True)
class Chains:
    """Results of chains of drafts; see `draft`.

    Attributes:
        logits: [steps, rows, n, vocabulary].
        hidden: Outputs of the layer, [steps, rows, n, hidden size].
        attention: Logarithms of the attention to positions 1 up to the anchor, as shares of the
            attention to these: [steps, rows, heads, n, length - 1].
    """

    logits: torch.Tensor
    hidden: torch.Tensor
    attention: torch.Tensor


def draft(
    trunk: Any,
    layer: MtpLayer,
    ids: torch.Tensor,
    hidden: torch.Tensor,
    anchors: torch.Tensor,
    forced: torch.Tensor | None = None,
    steps: int = NUM_STEPS,
) -> Chains:
    """Run a chain of `steps` drafts at each anchor, all anchors at once.

    Step s of the chain at anchor p runs at position p + s - 1 and predicts token p + s. Step 1
    takes token p and the trunk's hidden state p - 1; a later step takes the token drafted before
    and the layer's output there. A step attends to the keys of step 1 at positions 1 to p, and to
    the keys of its own chain. Only anchors go through the whole layer; other positions give keys
    and values.

    Args:
        ids: Tokens, int64 [rows, length].
        hidden: The trunk's hidden states after its final norm, [rows, length, hidden size].
        anchors: Positions, int64 [rows, n], from 1 to length - 1.
        forced: Tokens that the steps but the last draft, int64 [>= steps - 1, rows, n]; None: the
            most likely ones.
    """
    rows, length = ids.shape
    block: Any = layer.mtp_block
    positions = torch.arange(1, length).expand(rows, -1)
    before = _enter(trunk, layer, ids[:, 1:], hidden[:, :-1])
    keys, values = keys_values(trunk, block.self_attn, block.input_layernorm(before), positions)
    seen = positions[:, None, :] <= anchors[:, :, None]
    own = torch.eye(anchors.shape[1], dtype=torch.bool).expand(rows, -1, -1)
    mixed = gathered(before, anchors - 1)
    outputs: list[torch.Tensor] = []
    logits: list[torch.Tensor] = []
    attention = []
    for step in range(steps):
        if step > 0:
            tokens = logits[-1].argmax(-1) if forced is None else forced[step - 1]
            mixed = _enter(trunk, layer, tokens, outputs[-1])
        normed = block.input_layernorm(mixed)
        if step > 0:
            new = keys_values(trunk, block.self_attn, normed, anchors + step)
            keys, values = torch.cat([keys, new[0]], 2), torch.cat([values, new[1]], 2)
            seen = torch.cat([seen, own], dim=2)
        scores = attention_scores(trunk, block.self_attn, normed, anchors + step, keys, seen)
        attention.append(scores[..., : length - 1].log_softmax(-1))
        read = (scores.softmax(-1) @ values).transpose(1, 2).flatten(2)
        mixed = mixed + block.self_attn.o_proj(read * _gates(block.self_attn, normed).sigmoid())
        mixed = mixed + block.mlp(block.post_attention_layernorm(mixed))
        outputs.append(cast(Any, layer.post_norm)(mixed))
        logits.append(trunk.lm_head(outputs[-1]))
    return Chains(torch.stack(logits), torch.stack(outputs), torch.stack(attention))


def keys_values(
    trunk: Any, attention: Any, normed: torch.Tensor, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values for each query head, [rows, heads, n, head dim].

    Args:
        attention: A gated attention of the family.
        normed: Its inputs, [rows, n, hidden size].
        positions: int64 [rows, n].
    """
    keys = attention.k_proj(normed).unflatten(-1, (-1, attention.head_dim))
    values = attention.v_proj(normed).unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)
    keys = _rotated(trunk, attention.k_norm(keys).transpose(1, 2), positions)
    groups = attention.num_key_value_groups
    return keys.repeat_interleave(groups, dim=1), values.repeat_interleave(groups, dim=1)


def attention_scores(
    trunk: Any,
    attention: Any,
    normed: torch.Tensor,
    positions: torch.Tensor,
    keys: torch.Tensor,
    seen: torch.Tensor,
) -> torch.Tensor:
    """Return scores before the softmax, [rows, heads, n, keys]; -inf where a key is not seen.

    Args:
        attention, normed, positions: As for `keys_values`, of the queries.
        keys: [rows, heads, keys, head dim].
        seen: bool [rows, n, keys].
    """
    queries = _queries_gates(attention, normed)[..., : attention.head_dim]
    queries = _rotated(trunk, attention.q_norm(queries).transpose(1, 2), positions)
    scores = queries @ keys.transpose(2, 3) * attention.scaling
    masked: torch.Tensor = scores.masked_fill(~seen[:, None], -torch.inf)
    return masked


def _gates(attention: Any, normed: torch.Tensor) -> torch.Tensor:
    return _queries_gates(attention, normed)[..., attention.head_dim :].flatten(2)


def _queries_gates(attention: Any, normed: torch.Tensor) -> torch.Tensor:
    """[rows, n, heads, 2 * head dim]: each head's query, then its gate."""
    joint: torch.Tensor = attention.q_proj(normed)
    return joint.view(*joint.shape[:-1], -1, 2 * attention.head_dim)


def _rotated(trunk: Any, parts: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    cos, sin = trunk.model.rotary_emb(parts, position_ids=positions.expand(3, -1, -1))
    rotated: torch.Tensor = apply_rotary_pos_emb(parts, parts, cos, sin)[0]  # type: ignore[no-untyped-call]
    return rotated


def _enter(trunk: Any, layer: Any, tokens: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """Return what enters the decoder layer, [rows, n, hidden size]."""
    embedded = layer.enorm(trunk.model.embed_tokens(tokens))
    entered: torch.Tensor = layer.eh_proj(torch.cat([embedded, layer.hnorm(hidden)], dim=-1))
    return entered


def gathered(values: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """[rows, n, size] at indices of dim 1 that `at`, [rows, m], holds."""
    return values.gather(1, at[:, :, None].expand(-1, -1, values.shape[-1]))
