#!/usr/bin/env bash
# transformers 5.24.0: beside a long prompt, a short prompt of Phi-3 gets other tokens, and a long
# prompt gets others in chunks.
#
# Expected: generate() gives a row the tokens that it gets alone, whatever its neighbours are, and
# prefill_chunk_size changes memory, not tokens. The same model with plain rotation does both.
# Seen: LongRoPE has one list of factors for sequences up to original_max_position_embeddings and one
# for longer ones. transformers chooses one for the whole pass, by the greatest position in it. So
# the short row is rotated like a long sequence once a long one is in its batch, also in the
# continuous batches of generate_batch, where strangers' requests meet. A chunk that ends below the
# limit is rotated like a short sequence, and its keys stay so in the cache when later chunks cross
# the limit. Tokens differ, without an error or a warning. An engine that is compared with such a
# batch, or whose prefix cache keeps keys of both kinds, finds differences that are not its own.
#
# Exit status 0: as described. 1: this version behaves otherwise now.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
    transformers==5.24.0 torch==2.13.0 accelerate==1.15.0
"$folder/venv/bin/python" - <<'PYTHON'
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.utils import logging

logging.set_verbosity_error()
LIMIT, LONG, SHORT, NEW = 32, 40, 9, 16
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "original_max_position_embeddings": LIMIT,
    "short_factor": [1.0] * 8,
    "long_factor": [1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.0],
}
SIZES = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.3}
SIZES |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
SIZES |= {"max_position_embeddings": 256, "original_max_position_embeddings": LIMIT}
PLAIN = {"rope_type": "default", "rope_theta": 10_000.0}
GREEDY = GenerationConfig(max_new_tokens=NEW, do_sample=False, pad_token_id=0, eos_token_id=-1)


def generated(model, rows, pads=0, **options):
    mask = torch.ones_like(rows)
    mask[0, :pads] = 0
    made = model.generate(rows, attention_mask=mask, generation_config=GREEDY, **options)
    return made[:, rows.shape[1] :].tolist()


def others(one, two):
    """How many of the tokens differ."""
    assert len(one) == len(two) == NEW
    return sum(first != second for first, second in zip(one, two))


torch.manual_seed(3)
long, short = torch.randint(2, 128, (1, LONG)), torch.randint(2, 128, (1, SHORT))
pads = LONG - SHORT
batch = torch.cat([torch.nn.functional.pad(short, (pads, 0)), long])
found = {}
for name, rope in {"plain rotation": PLAIN, "LongRoPE": LONGROPE}.items():
    config = AutoConfig.for_model("phi3", rope_parameters=rope, **SIZES)
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config).eval()
    (short_alone,), (long_alone,) = generated(model, short), generated(model, long)
    padded = generated(model, batch, pads)
    (chunked,) = generated(model, long, prefill_chunk_size=20)
    prompts = [long[0].tolist(), short[0].tolist()]
    served = model.generate_batch(prompts, generation_config=GREEDY, progress_bar=False).values()
    (beside,) = [one.generated_tokens for one in served if len(one.prompt_ids) == SHORT]
    found[name] = {
        "short row of a padded batch": others(short_alone, padded[0]),
        "long row of that batch": others(long_alone, padded[1]),
        "short request of generate_batch": others(short_alone, beside),
        "long prompt in chunks of 20": others(long_alone, chunked),
    }
    for what, count in found[name].items():
        print(f"{name}: {what}: {count} of {NEW} tokens differ")
plain, seen = found["plain rotation"], list(found["LongRoPE"].values())
assert not any(plain.values()), "otherwise now"
assert seen[1] == 0 and min(seen[0], seen[2], seen[3]) >= 4, "otherwise now"
PYTHON
