"""The engine that moves pages between this process and other servers."""

from __future__ import annotations

from typing import Any

from sglang.srt.distributed.device_communicators.mooncake_transfer_engine import (
    get_mooncake_transfer_engine,
)
from sglang.srt.distributed.device_communicators.nixl_transfer_engine import (
    get_nixl_transfer_engine,
)


def describe_transfer_engine() -> dict[str, Any] | None:
    """Settings, memory and peers of the engine, for the server info; None: there is none. A process
    with both has Mooncake's for its weights."""
    engine = get_nixl_transfer_engine() or get_mooncake_transfer_engine()
    return None if engine is None else engine.describe()
