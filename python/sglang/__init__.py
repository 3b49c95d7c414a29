"""An LLM serving engine whose prefix cache spans device memory, host memory and Mooncake Store."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang.srt.constants import VERSION

if TYPE_CHECKING:
    from sglang.srt.entrypoints.engine import Engine

__version__ = VERSION
__all__ = ["Engine", "__version__"]


def __getattr__(name: str) -> Any:
    """Import `Engine` on first use: it imports torch, which command-line help does not need."""
    if name == "Engine":
        from sglang.srt.entrypoints.engine import Engine

        return Engine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
