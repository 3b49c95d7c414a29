"""Chooses Mooncake's transport and its InfiniBand devices; finds out what host and wheel support.

Mooncake accepts any string, and silently falls back to TCP if there is no RDMA device. Here it is
an error to ask for a protocol that the host cannot provide.
"""

from __future__ import annotations

import functools
import importlib
import json
import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from sglang.srt.utils.spelling import did_you_mean

logger = logging.getLogger(__name__)

SUPPORTED_PROTOCOLS: Final = ("rdma", "tcp", "efa", "ascend", "nvlink", "nvlink_intra", "barex")
IB_PROTOCOLS: Final = ("rdma", "efa", "barex")
"""Protocols that InfiniBand devices carry."""
UNSUPPORTED_PROTOCOLS: Final = tuple(
    "cxl flagcx hip maca musa nvmeof rdma_twosided sunrise_link ub ubshmem".split()
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
ENGINE_FIELD: Final = "--disaggregation-ib-device (or MOONCAKE_DEVICE)"
"""Name of the setting of a Transfer Engine's devices, for errors."""
_FORMS: Final = (
    'use a list like mlx5_0,mlx5_1, a JSON object by GPU like {"0": "mlx5_0", "1": "mlx5_1"}, or '
    "the path of a .json file with such an object"
)


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
    """The host's RDMA devices, sorted by name; empty if there are none."""
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


def parse_ib_device_config(
    ib_device_str: str | None, *, field: str = ENGINE_FIELD
) -> dict[int, str] | None:
    """Devices by GPU; None: all GPUs share one list, or there is none.

    Args:
        ib_device_str: A comma separated list, a JSON object, or the path of a file with one.
        field: Name of the setting, for the error.

    Raises:
        ValueError: The value has none of these forms; names the field and the remedy.
    """
    text = (ib_device_str or "").strip()
    shown = f"{field} {text}"
    if text.endswith(".json"):
        try:
            text = Path(text).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ValueError(f"{shown}: cannot be read ({error}); {_FORMS}") from error
    elif not text.startswith(("{", "[")):
        if text:
            _device_list(text, shown)
        return None
    return _parse_object(text, shown)


def get_ib_devices_for_gpu(
    ib_device_str: str | None, gpu_id: int | None, *, field: str = ENGINE_FIELD
) -> str | None:
    """The devices of one GPU, comma separated; None: the transport chooses.

    Args:
        gpu_id: None: the process has no GPU.

    Raises:
        ValueError: From `parse_ib_device_config`; or the object has no devices for this GPU, or
            there is no GPU.
    """
    by_gpu = parse_ib_device_config(ib_device_str, field=field)
    if by_gpu is None:
        text = (ib_device_str or "").strip()
        return _device_list(text, field) if text else None
    if gpu_id is None:
        raise ValueError(
            f"{field} has devices by GPU, and this process has none: use a list like mlx5_0,mlx5_1"
        )
    if gpu_id not in by_gpu:
        raise ValueError(
            f"{field} has no devices for GPU {gpu_id}, only for {sorted(by_gpu)}; add it"
        )
    return by_gpu[gpu_id]


def _parse_object(text: str, shown: str) -> dict[int, str]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{shown}: not JSON ({error}); {_FORMS}") from error
    if not isinstance(value, dict) or not value:
        raise ValueError(f"{shown}: not a JSON object by GPU; {_FORMS}")
    by_gpu: dict[int, str] = {}
    for gpu, devices in value.items():
        if not gpu.isdecimal() or not isinstance(devices, str):
            raise ValueError(
                f"{shown}: {gpu!r}: {devices!r} is not a GPU's number with a list; {_FORMS}"
            )
        if int(gpu) in by_gpu:
            raise ValueError(f"{shown}: GPU {int(gpu)} is named twice; {_FORMS}")
        by_gpu[int(gpu)] = _device_list(devices, shown)
    return by_gpu


def _device_list(devices: str, shown: str) -> str:
    """A list of devices without spaces; raises ValueError if it is none."""
    names = [name.strip() for name in devices.split(",")]
    wrong = [name for name in names if not name or not all(c.isalnum() or c in "_-." for c in name)]
    if wrong:
        raise ValueError(f"{shown}: {wrong[0]!r} is no device's name; {_FORMS}")
    return ",".join(names)
