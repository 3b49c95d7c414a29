"""Chooses Mooncake's transport; finds out which ones the host and the wheel support.

Mooncake accepts any string, and silently falls back to TCP if there is no RDMA device. Here it is
an error to ask for a protocol that the host cannot provide.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from sglang.srt.utils.spelling import did_you_mean

logger = logging.getLogger(__name__)

SUPPORTED_PROTOCOLS: Final = (
    "rdma",
    "tcp",
    "efa",
    "ascend",
    "nvlink",
    "nvlink_intra",
    "barex",
)
IB_PROTOCOLS: Final = ("rdma", "efa", "barex")
"""Protocols that InfiniBand devices carry."""
UNSUPPORTED_PROTOCOLS: Final = (
    "cxl",
    "flagcx",
    "hip",
    "maca",
    "musa",
    "nvmeof",
    "rdma_twosided",
    "sunrise_link",
    "ub",
    "ubshmem",
)
"""Other transports of Mooncake, which were never tested with this engine."""

_BUILD_FLAGS: Final = {
    "efa": "SUPPORT_EFA",
    "nvlink": "SUPPORT_MNNVL",
    "nvlink_intra": "SUPPORT_INTRA_NVLINK",
}
"""Attributes of `mooncake.engine` that say whether the wheel has a protocol."""
_TRANSPORT_CLASSES: Final = {
    "ascend": (b"21AscendDirectTransport", b"13HcclTransport", b"26HeterogeneousRdmaTransport"),
    "barex": (b"14BarexTransport",),
}
"""Classes of transports without such an attribute, as mangled names, length first. The wheel's
libraries contain the name of a class only if they have the class."""

_EFA_DRIVER: Final = "efa"


@dataclass(frozen=True, slots=True)
class RdmaDevice:
    """A device that the kernel lists under InfiniBand, of any transport."""

    name: str
    driver: str
    """The kernel's driver: `mlx5_core`, `efa`, ...; empty if sysfs does not name it."""

    @property
    def is_efa(self) -> bool:
        """True for an EFA device: it has Amazon's own transport, but not the reliable connections
        that `rdma` needs."""
        return self.driver == _EFA_DRIVER


def resolve_mooncake_protocol(
    requested: str,
    *,
    allow_tcp_fallback: bool,
    devices: Sequence[RdmaDevice],
    supported: Collection[str] | None = None,
) -> str:
    """The transport for Mooncake: `requested`, or `tcp` if the user has allowed a fallback.

    Args:
        requested: Protocol from the extra config, the JSON file or MOONCAKE_PROTOCOL, in that
            order.
        allow_tcp_fallback: SGLANG_MOONCAKE_ALLOW_TCP_FALLBACK: use `tcp` for `rdma` if there is no
            device.
        devices: Devices of the host that may be used; see `choose_devices`.
        supported: Protocols that the installed wheel was built with; None: not known.

    Raises:
        ValueError: The name is unknown or not supported, the wheel lacks it, or the host has no
            device for it. One line with the remedy.
    """
    _check_name(requested)
    if supported is not None and requested not in supported:
        raise ValueError(
            f"MOONCAKE_PROTOCOL={requested}: the installed mooncake wheel was built without it; "
            f"it has: {', '.join(sorted(supported))}"
        )
    names = ", ".join(device.name for device in devices)
    if requested == "efa" and not any(device.is_efa for device in devices):
        remedy = f"rdma, which {names} can do, or tcp" if devices else "tcp"
        raise ValueError(
            "MOONCAKE_PROTOCOL=efa, but this host has no EFA device: set MOONCAKE_PROTOCOL="
            f"{remedy}"
        )
    if requested not in ("rdma", "barex") or not all(device.is_efa for device in devices):
        return requested
    if devices:
        # Mooncake would use it as an RDMA device, and fail at the first connection.
        raise ValueError(
            f"MOONCAKE_PROTOCOL={requested}, but the only devices here ({names}) are EFA's, which "
            "have no such connections: set MOONCAKE_PROTOCOL=efa, with a mooncake wheel that has "
            "it, or tcp"
        )
    if requested == "barex":
        raise ValueError(
            "MOONCAKE_PROTOCOL=barex, but this host has no eRDMA or RDMA device: set "
            "MOONCAKE_PROTOCOL=tcp"
        )
    if allow_tcp_fallback:
        logger.warning("no RDMA device: Mooncake uses tcp (SGLANG_MOONCAKE_ALLOW_TCP_FALLBACK)")
        return "tcp"
    raise ValueError(
        "MOONCAKE_PROTOCOL=rdma, but this host has no RDMA device: set MOONCAKE_PROTOCOL=tcp"
    )


def _check_name(requested: str) -> None:
    known = ", ".join(SUPPORTED_PROTOCOLS)
    if requested in UNSUPPORTED_PROTOCOLS:
        raise ValueError(
            f"MOONCAKE_PROTOCOL={requested}: Mooncake has it, but this engine does not support it; "
            f"use one of: {known}"
        )
    if requested not in SUPPORTED_PROTOCOLS:
        hint = did_you_mean(requested, SUPPORTED_PROTOCOLS)
        raise ValueError(f"MOONCAKE_PROTOCOL={requested!r} is unknown; use one of: {known}{hint}")


def list_rdma_devices(root: str | Path = "/sys/class/infiniband") -> list[RdmaDevice]:
    """The host's RDMA devices, sorted by name; empty if there are none.

    Args:
        root: Directory in which sysfs lists them.
    """
    try:
        entries = sorted(Path(root).iterdir())
    except OSError:
        return []
    return [RdmaDevice(entry.name, _driver(entry)) for entry in entries]


def choose_devices(
    chosen: str | None, devices: Sequence[RdmaDevice], *, field: str
) -> list[RdmaDevice]:
    """The devices of the host that `chosen` names.

    Args:
        chosen: Names, comma separated, as `get_ib_devices_for_gpu` returns them; None or empty: all
            devices.
        devices: All devices of the host.
        field: Setting that `chosen` comes from, for the error.

    Raises:
        ValueError: The host has devices, and not all that are named.
    """
    names = [name.strip() for name in (chosen or "").split(",") if name.strip()]
    there = {device.name: device for device in devices}
    missing = [name for name in names if name not in there]
    if missing and devices:
        raise ValueError(
            f"{field} names {', '.join(missing)}, which this host does not have; it has: "
            f"{', '.join(there)}"
        )
    return [there[name] for name in names if name in there] if names else list(devices)


def _driver(device: Path) -> str:
    """Name of the kernel driver behind a device's entry in sysfs."""
    link = device / "device" / "driver"
    return link.resolve().name if link.exists() else ""


def wheel_protocols() -> frozenset[str]:
    """Supported protocols, except those that the installed wheel was built without. Imports
    Mooncake."""
    # Not by an attribute of the package, which is missing while another thread imports it.
    engine = importlib.import_module("mooncake.engine")
    lacking = {
        protocol for protocol, flag in _BUILD_FLAGS.items() if not getattr(engine, flag, True)
    }
    folder = Path(str(engine.__file__)).parent
    return frozenset(SUPPORTED_PROTOCOLS) - lacking - protocols_without_class(folder)


@functools.cache
def protocols_without_class(folder: Path) -> frozenset[str]:
    """Protocols of `_TRANSPORT_CLASSES` whose transport is in no shared library of `folder`, the
    package's own. Imports nothing."""
    lacking = set(_TRANSPORT_CLASSES)
    for library in folder.glob("*.so"):
        content = library.read_bytes()
        lacking = {
            protocol
            for protocol in lacking
            if not any(name in content for name in _TRANSPORT_CLASSES[protocol])
        }
    return frozenset(lacking)
