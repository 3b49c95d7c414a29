"""A random draft layer (MTP) beside a tiny model: transformers' module, and its checkpoint file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import MtpModel

_FILE = "model-draft.safetensors"
_QWEN_NAMES = {
    "enorm": "pre_fc_norm_embedding",
    "hnorm": "pre_fc_norm_hidden",
    "eh_proj": "fc",
    "post_norm": "norm",
}


class TinyDraft(MtpModel):  # type: ignore[no-untyped-call]
    """transformers' `MtpModel` of one layer, also where it does not know how its layer is called.

    Without a cache: each call computes a whole sequence.
    """

    def create_masks_for_mtp_layer(
        self, layer_idx: int, inputs_embeds: torch.Tensor, mtp_cache: Any, position_ids: Any
    ) -> dict[str, Any]:
        mask = create_causal_mask(
            config=self.config,
            inputs_embeds=inputs_embeds,
            attention_mask=None,
            cache=None,
            position_ids=None,
            allow_is_causal_skip=False,
        )
        return {"attention_mask": mask}


@torch.no_grad()
def tiny_draft(model: PreTrainedModel) -> TinyDraft:
    """The draft layer of a tiny model, with the same random weights at each call."""
    config: Any = model.config.get_text_config()
    config.num_mtp_layers = 1
    if getattr(config, "layer_types", None) is not None:
        config.mtp_layer_types = [config.layer_types[-1]]
    if getattr(config, "mlp_layer_types", None) is not None:
        config.mtp_mlp_layer_types = ["sparse"]
    draft = TinyDraft(model, 1)
    draft.train(False)
    # GLM's layers also return what their indexer chose.
    block: Any = draft.layers[0].mtp_block
    block.register_forward_hook(
        lambda module, args, output: output[0] if isinstance(output, tuple) else output
    )
    is_centered = "qwen3" in config.model_type
    generator = torch.Generator().manual_seed(23)
    for name, weight in [*draft.layers.named_parameters(), *draft.layers.named_buffers()]:
        is_scale = name.endswith("norm.weight") and not is_centered
        noise = torch.randn(weight.shape, generator=generator)
        weight.copy_(noise * 0.2 + (1.0 if is_scale else 0.0))
    torch.nn.Module.to(draft.layers, dtype=model.dtype)
    return draft


def save_draft(directory: Path | str, model: PreTrainedModel) -> None:
    """Write the draft layer of a model that is saved in `directory`, with its published names."""
    draft = tiny_draft(model)
    config: Any = model.config.get_text_config()
    tensors: dict[str, torch.Tensor] = {}
    own = f"model.layers.{config.num_hidden_layers}"
    for name, weight in draft.layers[0].state_dict().items():
        part, rest = name.split(".", 1)
        if "qwen3" in config.model_type:
            full = (
                f"mtp.layers.0.{rest}" if part == "mtp_block" else f"mtp.{_QWEN_NAMES[part]}.{rest}"
            )
        else:
            part = {"mtp_block": "", "post_norm": "shared_head.norm."}.get(part, f"{part}.")
            full = f"{own}.{part}{rest}"
        tensors |= dict(_each_expert(full, weight))
    if "qwen3" not in config.model_type:
        # Published checkpoints have these copies.
        tensors[f"{own}.embed_tokens.weight"] = draft.embed_tokens.get_parameter("weight")
        tensors[f"{own}.shared_head.head.weight"] = draft.shared_head.weight
    directory = Path(directory)
    save_file({name: one.detach().clone() for name, one in tensors.items()}, directory / _FILE)
    index = directory / "model.safetensors.index.json"
    if index.exists():
        fields = json.loads(index.read_text())
        fields["weight_map"] |= dict.fromkeys(tensors, _FILE)
        index.write_text(json.dumps(fields))


def _each_expert(name: str, weight: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of each expert, of those that transformers stacks."""
    stem, _, kind = name.rpartition(".experts.")
    for expert, own in enumerate(weight) if stem else ():
        prefix = f"{stem}.experts.{expert}"
        if kind == "gate_up_proj":
            gate, up = own.chunk(2)
            yield f"{prefix}.gate_proj.weight", gate
            yield f"{prefix}.up_proj.weight", up
        else:
            yield f"{prefix}.{kind}.weight", own
    if not stem:
        yield name, weight
