"""Facts that several layers share. Plain values, no imports of ours."""

from __future__ import annotations

from pathlib import Path
from typing import Final

VERSION: Final = "0.1.0"
"""Of the engine; the package's metadata is made from it."""

DEFAULT_HOST: Final = "127.0.0.1"
DEFAULT_PORT: Final = 30000

DEFAULT_PAGE_SIZE: Final = 1
"""Tokens per page where only the device tier exists."""
DEFAULT_HIERARCHICAL_PAGE_SIZE: Final = 64
"""Tokens per page with the hierarchical cache: copies and store objects want larger blocks."""

KIB: Final = 1 << 10
MIB: Final = 1 << 20
GIB: Final = 1 << 30
GB: Final = 10**9
"""The unit of `--hicache-size`, as upstream counts it."""

BUILTIN_MODEL_DIR: Final = Path(__file__).resolve().parents[1] / "builtin_model"
"""The model that is served when no `--model-path` is given; package data."""
BUILTIN_MODEL_NAME: Final = "sglang-builtin"

HEALTH_CHECK_RID_PREFIX: Final = "HEALTH_CHECK"
"""Request ids with this prefix are probes: not counted, not logged, not cached."""

LONGEST_STORAGE_CHANGE_S: Final = 100.0
"""A change of L3 at run time that takes longer is given up, in seconds. Clients wait longer."""
