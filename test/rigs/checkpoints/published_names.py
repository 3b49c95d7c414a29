"""Names of a checkpoint's tensors, as publishers have them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

_PATTERNS: dict[str, dict[str, str]] = {
    "kimi_k25_vision": {
        r"^language_model\.model\.blocks\.": "language_model.model.layers.",
        r"^model\.(mm_projector|vision_tower)\.": r"\1.",
    },
    "deepseek_v4": {
        r"^model\.": "",
        r"^embed_tokens\.": "embed.",
        r"^hc_head\.hc_": "hc_head_",
        r"\.attn\.norm\.": ".attn.kv_norm.",
    },
    # transformers names all layers as those with experts.
    "kimi_linear": {r"\.block_sparse_moe\.(gate|up|down)_proj\.": r".mlp.\1_proj."},
}
"""Patterns in names that transformers 5.24 writes, and what publishers have in their place."""


def name_as_published(directory: Path, family: str) -> None:
    """Rename the tensors of a checkpoint of `family`, a key of `tiny_models.FAMILIES`."""
    patterns = _PATTERNS.get(family)
    if patterns is None:
        return

    def renamed(names: dict[str, Any]) -> dict[str, Any]:
        found = {}
        for name, value in names.items():
            for pattern, replacement in patterns.items():
                name = re.sub(pattern, replacement, name)
            found[name] = value
        return found

    for file in directory.glob("*.safetensors"):
        save_file(renamed(load_file(file)), file, metadata={"format": "pt"})
    index = directory / "model.safetensors.index.json"
    if index.exists():
        fields = json.loads(index.read_text())
        index.write_text(json.dumps(fields | {"weight_map": renamed(fields["weight_map"])}))
