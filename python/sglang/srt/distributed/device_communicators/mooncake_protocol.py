"""Which transport Mooncake is to use. Deciding only, so that it is one place and tested.

Mooncake takes any string and falls back to TCP in silence where there is no RDMA device; what the
user asked for and cannot have is an error here instead.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Final

logger = logging.getLogger(__name__)

KNOWN_PROTOCOLS: Final = (
    "rdma",
    "tcp",
    "efa",
    "ascend",
    "nvlink",
    "nvlink_intra",
    "barex",
)

_BUILD_FLAGS: Final = {
    "efa": "SUPPORT_EFA",
    "nvlink": "SUPPORT_MNNVL",
    "nvlink_intra": "SUPPORT_INTRA_NVLINK",
}
"""Attributes of `mooncake.engine`. The other protocols leave no mark in the wheel."""


def resolve_mooncake_protocol(
    requested: str,
    *,
    allow_tcp_fallback: bool,
    rdma_devices: Sequence[str],
    supported: Collection[str] | None = None,
) -> str:
    """The transport to give to Mooncake: `requested`, or `tcp` where the user allowed that.

    Args:
        requested: From the extra config, the JSON file or MOONCAKE_PROTOCOL, in that order.
        allow_tcp_fallback: SGLANG_MOONCAKE_ALLOW_TCP_FALLBACK.
        rdma_devices: Names of the host's RDMA devices; see `list_rdma_devices`.
        supported: What the installed wheel was built with; None where that is not known.

    Raises:
        ValueError: The name is unknown, the wheel lacks it, or there is no RDMA device. One line
            with the remedy.
    """
    if requested not in KNOWN_PROTOCOLS:
        raise ValueError(
            f"MOONCAKE_PROTOCOL={requested!r} is unknown; use one of: {', '.join(KNOWN_PROTOCOLS)}"
        )
    if supported is not None and requested not in supported:
        raise ValueError(
            f"MOONCAKE_PROTOCOL={requested}: the installed mooncake wheel was built without it; "
            f"it has: {', '.join(sorted(supported))}"
        )
    if requested != "rdma" or rdma_devices:
        return requested
    if allow_tcp_fallback:
        logger.warning("no RDMA device: Mooncake uses tcp (SGLANG_MOONCAKE_ALLOW_TCP_FALLBACK)")
        return "tcp"
    raise ValueError(
        "MOONCAKE_PROTOCOL=rdma, but this host has no RDMA device: set MOONCAKE_PROTOCOL=tcp"
    )


def list_rdma_devices(root: str = "/sys/class/infiniband") -> list[str]:
    """Names of the host's RDMA devices, sorted; empty where there are none."""
    try:
        return sorted(entry.name for entry in Path(root).iterdir())
    except OSError:
        return []


def wheel_protocols() -> frozenset[str]:
    """Protocols that the installed wheel does not say it was built without. Imports Mooncake."""
    import mooncake.engine

    lacking = {
        protocol
        for protocol, flag in _BUILD_FLAGS.items()
        if not getattr(mooncake.engine, flag, True)
    }
    return frozenset(KNOWN_PROTOCOLS) - lacking
