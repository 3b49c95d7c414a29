#!/usr/bin/env bash
# transformers 5.24.0: MiniMax answers otherwise in a padded batch, and in a beam search with a cache.
#
# Expected: generate() gives the same tokens with and without use_cache, as a cache only saves work. A
# row that is padded on the left, with its attention mask, gets the tokens that it gets alone.
# Qwen3-Next, which mixes linear layers and full attention too, does both.
# Seen: if the first layer is linear, the padded row of a batch gets other tokens with the cache. The
# row without padding is right, and so are both without the cache. If the first layer has full
# attention, as in the default configuration, both rows are right. A beam search gets other tokens
# with the cache in both orders. All of it comes without an error or a warning.
#
# Exit status 0: as described. 1: this version behaves otherwise now.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
    transformers==5.24.0 torch==2.13.0
"$folder/venv/bin/python" - <<'PYTHON'
import torch
from transformers import AutoConfig, AutoModelForCausalLM

SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_hidden_layers": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
MORE = {
    "minimax": {"num_local_experts": 4, "num_experts_per_tok": 2, "block_size": 8},
    "qwen3_next": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "shared_expert_intermediate_size": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    },
}


def answers(model, rows, pads, **options):
    mask = torch.ones_like(rows)
    mask[0, :pads] = 0
    made = model.generate(
        rows, attention_mask=mask, max_new_tokens=16, do_sample=False, pad_token_id=0, **options
    )
    return made[:, rows.shape[1] :].tolist()


LINEAR, FULL = "linear_attention", "full_attention"
held = True
for name, first_is_linear, wrong_rows, wrong_beams in (
    ("minimax", True, [True, False], True),
    ("minimax", False, [False, False], True),
    ("qwen3_next", True, [False, False], False),
):
    kinds = [LINEAR] * 7 + [FULL] if first_is_linear else [FULL] + [LINEAR] * 7
    config = AutoConfig.for_model(name, **SIZES, **MORE[name], layer_types=kinds)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    for weight in model.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.08)
    short, long = torch.randint(3, 128, (1, 40)), torch.randint(3, 128, (1, 47))
    alone = answers(model, short, 0) + answers(model, long, 0)
    both = torch.cat([torch.nn.functional.pad(short, (7, 0)), long])
    assert answers(model, both, 7, use_cache=False) == alone
    unlike = [row != other for row, other in zip(answers(model, both, 7), alone, strict=True)]
    beams = [answers(model, short, 0, num_beams=3, use_cache=used) for used in (True, False)]
    print(f"{name}, {kinds[0]} first: rows unlike alone: {unlike} (the first is padded), ", end="")
    print(f"beams unlike without a cache: {beams[0] != beams[1]}")
    held &= unlike == wrong_rows and (beams[0] != beams[1]) == wrong_beams
raise SystemExit(not held)
PYTHON
