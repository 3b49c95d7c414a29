#!/usr/bin/env bash
# transformers 5.24.0: save_pretrained of Kimi-K2.5 names the layers of the text model "blocks".
#
# Expected: save_pretrained writes the names of the published checkpoints, as it does for other
# families whose names transformers maps while it loads: language_model.model.layers.0 and so on.
# Seen: it writes language_model.model.blocks.0. The mapping renames "blocks" of the vision tower to
# "layers" while it loads, and the way back renames every "layers", those of the text model too. A
# model that was fine-tuned and saved this way loads into transformers again, but a server that
# reads the published names finds none of the text model's layers.
#
# Exit status 0: as described. 1: this version behaves otherwise now.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
    transformers==5.24.0 torch==2.13.0
"$folder/venv/bin/python" - "$folder/saved" <<'PYTHON'
import sys
from pathlib import Path

from safetensors import safe_open
from transformers import AutoConfig, Kimi_K25ForConditionalGeneration

text = {
    "model_type": "deepseek_v3",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 1,
    "first_k_dense_replace": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
}
vision = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "patch_size": 4,
}
config = AutoConfig.for_model("kimi_k25", text_config=text, vision_config=vision)
Kimi_K25ForConditionalGeneration(config).save_pretrained(sys.argv[1])
(file,) = Path(sys.argv[1]).glob("*.safetensors")
with safe_open(file, "pt") as saved:
    layers = {".".join(name.split(".")[:5]) for name in saved.keys() if "self_attn" in name}
print("transformers 5.24.0 saves the text model's attention below:", *sorted(layers))
raise SystemExit(layers != {"language_model.model.blocks.0.self_attn"})
PYTHON
