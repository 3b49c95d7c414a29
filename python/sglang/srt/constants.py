"""Constants that several layers share. Plain values; imports nothing of the package."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

VERSION: Final = "0.1.0"
"""Version of the engine, also in the package's metadata."""

DEFAULT_HOST: Final = "127.0.0.1"
DEFAULT_PORT: Final = 30000
DEFAULT_BOOTSTRAP_PORT: Final = 8998
"""Port at which decode servers find a prefill server's ranks."""

DEFAULT_PAGE_SIZE: Final = 1
"""Tokens per page without the hierarchical cache."""
DEFAULT_HIERARCHICAL_PAGE_SIZE: Final = 64
"""Tokens per page with the hierarchical cache; copies and store objects need larger blocks."""
PAGE_SIZES: Final[Mapping[str, int]] = MappingProxyType(
    {"DeepseekV4ForCausalLM": 256, "Glm5NextForConditionalGeneration": 64}
)
"""Tokens per page of architectures that keep a row for more tokens than these, with or without."""

KIB: Final = 1 << 10
MIB: Final = 1 << 20
GIB: Final = 1 << 30
GB: Final = 10**9
"""The unit of `--hicache-size`, as in SGLang."""

BUILTIN_MODEL_DIR: Final = Path(__file__).resolve().parents[1] / "builtin_model"
"""The model that the server runs without `--model-path`; package data."""
BUILTIN_MODEL_NAME: Final = "sglang-builtin"
BUILTIN_HYBRID_MODEL_DIR: Final = BUILTIN_MODEL_DIR.with_name("builtin_hybrid_model")
"""The same task, solved with recurrent states; package data. `MODEL=hybrid make serve` runs it."""
BUILTIN_HYBRID_MODEL_NAME: Final = "sglang-builtin-hybrid"

HEALTH_CHECK_RID_PREFIX: Final = "HEALTH_CHECK"
"""Prefix of the request ids of probes, which are not counted, logged or cached."""

LONGEST_STORAGE_CHANGE_S: Final = 100.0
"""Seconds after which the server gives up a change of L3 at run time. Clients wait longer."""
MODEL_SAMPLING: Final = "model"
"""Value of `--sampling-defaults`: sampling values are those of generation_config.json."""
OPENAI_SAMPLING: Final = "openai"
"""Value of `--sampling-defaults`: that file's sampling values are ignored."""
FOLLOW_ROOM: Final = "follow_bootstrap_room"
LOAD_BALANCE_METHODS: Final = (
    "auto", "round_robin", "total_requests", "total_tokens", FOLLOW_ROOM
)  # fmt: skip
"""Values of `--load-balance-method`."""
MAX_PREFILL_GROUPS: Final = 64
"""Most DP groups of a prefill server, all of which decode servers ask about rooms."""
TRACE_BLOCK_TOKENS: Final = 512
"""Tokens of a block in traces of requests, as in Mooncake's."""
