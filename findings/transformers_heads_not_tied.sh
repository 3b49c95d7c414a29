#!/usr/bin/env bash
# transformers 5.24.0: Kimi-Linear, Nemotron-H and Bailing-Hybrid ignore tie_word_embeddings.
#
# Expected: with tie_word_embeddings=True, a field of all three configurations, the head shares the
# weight of the embedding, and a checkpoint without a head is whole, as with Llama and DeepSeek-V3; a
# model that cannot share it refuses the value.
# Seen: the three keep a head of their own. A checkpoint that has no head, since it is tied, loads
# with random values in its place: lm_head.weight is only reported as missing. A server that does
# tie such a model gives other answers than transformers, which is the reference of its tests.
#
# Exit status 0: as described. 1: this version behaves otherwise now.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
    transformers==5.24.0 torch==2.13.0
"$folder/venv/bin/python" - "$folder" <<'PYTHON'
import sys

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

logging.set_verbosity_error()
logging.disable_progress_bar()
WANTED = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 4,
    "n_routed_experts": 4,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
print("transformers 5.24.0, all with tie_word_embeddings=True")
for name, expected in {
    "llama": True,
    "deepseek_v3": True,
    "kimi_linear": False,
    "nemotron_h": False,
    "bailing_hybrid": False,
}.items():
    known = AutoConfig.for_model(name)
    assert hasattr(known, "tie_word_embeddings")
    sizes = {key: value for key, value in WANTED.items() if hasattr(known, key)}
    if name == "nemotron_h":
        sizes["layers_block_type"] = ["attention"]
        del sizes["num_hidden_layers"]
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(name, tie_word_embeddings=True, **sizes)
    )
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    # The checkpoint of a tied model has no head.
    path = f"{sys.argv[1]}/{name}"
    model.save_pretrained(path)
    file = f"{path}/model.safetensors"
    tensors = {key: value for key, value in load_file(file).items() if key != "lm_head.weight"}
    save_file(tensors, file, metadata={"format": "pt"})
    loaded, report = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert loaded.config.tie_word_embeddings is True
    head, embedding = loaded.get_output_embeddings().weight, loaded.get_input_embeddings().weight
    missing = sorted(report["missing_keys"])
    print(f"{name}: tied: {tied}, after loading: {torch.equal(head, embedding)}, {missing=}")
    assert tied is torch.equal(head, embedding) is expected, "otherwise now"
    assert missing == ([] if expected else ["lm_head.weight"]), "otherwise now"
PYTHON
