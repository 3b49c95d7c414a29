"""The shape of Qwen3-8B without its weights: the large model of GPU tests and benchmarks."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from rigs.models.quantized_checkpoints import fp8_blocks
from sglang.srt.constants import BUILTIN_MODEL_DIR

VOCAB_SIZE: Final = 151936
_LAYERS, _KV_HEADS, _HEAD_DIM = 36, 8, 128
KV_BYTES: Final = _LAYERS * 2 * _KV_HEADS * _HEAD_DIM * 2
"""Bytes of KV of one token, in bf16."""

_CONFIG: Final[dict[str, Any]] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": _LAYERS,
    "num_attention_heads": 32,
    "num_key_value_heads": _KV_HEADS,
    "head_dim": _HEAD_DIM,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "eos_token_id": 151645,
}
"""The fields of its config.json that serving reads."""

WEIGHTS: Final[Mapping[str, dict[str, Any]]] = {
    "bf16": {},
    "fp8": fp8_blocks().config,
    "int4": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {
                    "num_bits": 4,
                    "type": "int",
                    "strategy": "group",
                    "group_size": 128,
                    "symmetric": True,
                },
            }
        },
    },
}
"""`quantization_config` of each weight format that benchmarks compare."""

DUMMY_FLAGS: Final = ("--load-format", "dummy", "--tokenizer-path", str(BUILTIN_MODEL_DIR))
"""Flags for a server of `dummy_model`: random weights, and the tokenizer of another model."""


@contextmanager
def dummy_model(weights: str = "bf16", layers: int = _LAYERS) -> Iterator[str]:
    """A temporary directory with only the configuration, for a format in `WEIGHTS`."""
    form = WEIGHTS[weights]
    config = _CONFIG | {"num_hidden_layers": layers}
    if form:
        config["quantization_config"] = form
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(config), encoding="utf-8")
        yield directory
