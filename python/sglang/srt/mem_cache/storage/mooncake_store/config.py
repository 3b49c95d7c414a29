"""Settings of the Mooncake Store client, from extra config, JSON file and environment, and checks
whether they can work on this host."""

from __future__ import annotations

import json
import logging
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

from sglang.srt.constants import MIB
from sglang.srt.distributed.device_communicators.mooncake_library import (
    STORE_USER,
    load_mooncake,
)
from sglang.srt.distributed.device_communicators.mooncake_protocol import (
    IB_PROTOCOLS,
    SUPPORTED_PROTOCOLS,
    choose_devices,
    get_ib_devices_for_gpu,
    list_rdma_devices,
    resolve_mooncake_protocol,
    wheel_protocols,
)
from sglang.srt.environ import envs, parse_size
from sglang.srt.hardware_backend.device_kinds import NPU, device_kind
from sglang.srt.mem_cache.storage.types import StorageUnreachable
from sglang.srt.utils.network import can_connect

logger = logging.getLogger(__name__)

DEVICE_FIELD: Final = "MOONCAKE_DEVICE (device_name)"
"""Setting of the InfiniBand devices, for errors."""
_NOT_IN_STORE: Final = {
    "nvlink": "Mooncake's store has no such transport",
    "nvlink_intra": "it moves memory of GPUs, and the store's pages are in host memory",
    "barex": "Mooncake's store has no such transport",
}
"""Protocols of Mooncake's engine with which no store client can be set up, and why."""
_LEAST_SEGMENT_BYTES: Final = 16 * MIB
"""Mooncake refuses less, and names the reason in its own log alone."""
_REACH_SECONDS: Final = 1.5
"""Limit of a TCP connect to the master. TCP repeats a lost packet after one second; Mooncake's own
set-up tries for 90 s."""
_REFUSED = {
    "enable_ssd_offload": "offloading to SSD",
    "ssd_offload_path": "offloading to SSD",
}


@dataclass(frozen=True, slots=True)
class MooncakeStoreConfig:
    """The resolved settings of a Mooncake Store client."""

    local_hostname: str
    """Host name or address at which other clients reach this one."""
    metadata_server: str
    global_segment_size: int
    """Bytes that this client lends to the store; 0 if store nodes hold the objects."""
    protocol: str
    """The configured protocol, not yet checked against the host."""
    device_name: str
    master_server_address: str
    master_metrics_port: int
    check_server: bool
    standalone_storage: bool = False
    """True to attach to a `mooncake_client` process on this host, which holds the objects. Pages
    move through shared memory."""
    client_server_address: str = ""
    """host:port of that process."""
    enable_ssd_offload: bool = False
    ssd_offload_path: str | None = None
    local_buffer_size: int = 0
    """Bytes of scratch memory of the client."""

    @property
    def host_allocator_type(self) -> str:
        """The allocator of host pools: `mooncake` for memory that a stand-alone client can map."""
        return "mooncake" if self.standalone_storage else "default"

    def __post_init__(self) -> None:
        for name, what in _REFUSED.items():
            if getattr(self, name):
                raise ValueError(f"Mooncake setting {name}: {what} is not supported; leave it out")
        if not self.master_server_address:
            raise ValueError(
                "Mooncake: no master; set MOONCAKE_MASTER=host:port, or master_server_address in "
                "--hicache-storage-backend-extra-config"
            )
        self.master_host_port()
        if self.standalone_storage and not self.client_server_address:
            raise ValueError(
                "Mooncake setting standalone_storage: no mooncake_client to attach to; set "
                "MOONCAKE_CLIENT=host:port, or client_server_address"
            )
        self.client_host_port()
        # A stand-alone client lends memory itself, of a size of its own.
        if not self.standalone_storage and 0 < self.global_segment_size < _LEAST_SEGMENT_BYTES:
            raise ValueError(
                f"MOONCAKE_GLOBAL_SEGMENT_SIZE (global_segment_size): Mooncake lends no less than "
                f"{_LEAST_SEGMENT_BYTES} bytes, not {self.global_segment_size}: give 16mb or more, "
                "or 0 where store nodes hold the objects"
            )

    @staticmethod
    def from_file() -> MooncakeStoreConfig:
        """Load from the file at SGLANG_HICACHE_MOONCAKE_CONFIG_PATH and from the environment.

        Raises:
            ValueError: The path is not set, the file is unreadable, or a value is malformed.
        """
        if envs.SGLANG_HICACHE_MOONCAKE_CONFIG_PATH.get() is None:
            raise ValueError("SGLANG_HICACHE_MOONCAKE_CONFIG_PATH is not set")
        return MooncakeStoreConfig.load_from_extra_config({})

    @staticmethod
    def load_from_env() -> MooncakeStoreConfig:
        """Load from the environment only. Raises ValueError for a malformed variable."""
        return _build(_from_env())

    @staticmethod
    def load_from_extra_config(extra_config: Mapping[str, Any] | None) -> MooncakeStoreConfig:
        """Load from extra config, JSON file and environment, in this order of precedence.

        Ignores keys other than Mooncake's. Raises ValueError that names the setting.
        """
        extra = extra_config or {}
        known = {field.name for field in fields(MooncakeStoreConfig)}
        chosen = {name: value for name, value in extra.items() if name in known}
        return _build(_from_env() | _read_file() | chosen)

    def master_host_port(self) -> tuple[str, int] | None:
        """TCP address of the master; None if the setting is an address of a discovery service."""
        if "://" in self.master_server_address:
            return None
        return _host_port("MOONCAKE_MASTER (master_server_address)", self.master_server_address)

    def client_host_port(self) -> tuple[str, int] | None:
        """TCP address of the stand-alone client, or None."""
        if not self.standalone_storage:
            return None
        return _host_port("MOONCAKE_CLIENT (client_server_address)", self.client_server_address)


def _host_port(name: str, address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"{name} is {address!r}; it must be host:port")
    return host.strip("[]"), int(port)


def _from_env() -> dict[str, Any]:
    return {
        "local_hostname": envs.MOONCAKE_LOCAL_HOSTNAME.get(),
        "metadata_server": envs.MOONCAKE_TE_META_DATA_SERVER.get(),
        "global_segment_size": envs.MOONCAKE_GLOBAL_SEGMENT_SIZE.get(),
        "local_buffer_size": envs.MOONCAKE_LOCAL_BUFFER_SIZE.get(),
        "protocol": envs.MOONCAKE_PROTOCOL.get(),
        "device_name": envs.MOONCAKE_DEVICE.get(),
        "master_server_address": envs.MOONCAKE_MASTER.get() or "",
        "master_metrics_port": envs.MOONCAKE_MASTER_METRICS_PORT.get(),
        "check_server": envs.MOONCAKE_CHECK_SERVER.get(),
        "client_server_address": envs.MOONCAKE_CLIENT.get() or "",
    }


def _read_file() -> dict[str, Any]:
    path = envs.SGLANG_HICACHE_MOONCAKE_CONFIG_PATH.get()
    if path is None:
        return {}
    try:
        settings = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"SGLANG_HICACHE_MOONCAKE_CONFIG_PATH={path}: {error}") from error
    if not isinstance(settings, dict):
        raise ValueError(f"SGLANG_HICACHE_MOONCAKE_CONFIG_PATH={path}: not a JSON object")
    known = {field.name for field in fields(MooncakeStoreConfig)}
    unknown = sorted(set(settings) - known)
    if unknown:
        logger.warning("%s: unknown settings are ignored: %s", path, ", ".join(unknown))
    return {name: value for name, value in settings.items() if name in known}


def _build(settings: Mapping[str, Any]) -> MooncakeStoreConfig:
    checked: dict[str, Any] = {}
    for name, value in settings.items():
        if name.endswith("_size"):
            checked[name] = _size(name, value)
        elif name == "master_metrics_port":
            if isinstance(value, bool) or not str(value).isdecimal():
                raise ValueError(f"Mooncake setting {name}: {value!r} is not a port")
            checked[name] = int(value)
        elif name in ("check_server", "standalone_storage", "enable_ssd_offload"):
            if not isinstance(value, bool):
                raise ValueError(f"Mooncake setting {name}: true or false, not {value!r}")
            checked[name] = value
        else:
            if not isinstance(value, str | None):
                raise ValueError(f"Mooncake setting {name}: a string, not {value!r}")
            checked[name] = value or ""
    # The address of a client selects it, unless the config has `false`.
    checked.setdefault("standalone_storage", bool(checked.get("client_server_address")))
    return MooncakeStoreConfig(**checked)


def _size(name: str, value: object) -> int:
    """Bytes of `512mb`, `4gb` or a whole number."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    if isinstance(value, str):
        try:
            return parse_size(value)
        except ValueError as error:
            raise ValueError(f"Mooncake setting {name}: {error}") from error
    raise ValueError(f"Mooncake setting {name}: bytes or a size like 512mb, not {value!r}")


# -- what can work on this host -----------------------------------------------------------------


def check_store_protocol(config: MooncakeStoreConfig) -> None:
    """Refuse a protocol that only Mooncake's engine has. Raises ValueError with one line.

    A stand-alone client has a transport of its own, and pages reach it through shared memory.
    """
    if config.standalone_storage or config.protocol not in _NOT_IN_STORE:
        return
    usable = ", ".join(one for one in SUPPORTED_PROTOCOLS if one not in _NOT_IN_STORE)
    raise ValueError(
        f"{STORE_USER} cannot use MOONCAKE_PROTOCOL={config.protocol}: "
        f"{_NOT_IN_STORE[config.protocol]}; set protocol in "
        f"--hicache-storage-backend-extra-config to one of: {usable}"
    )


def settle_protocol(config: MooncakeStoreConfig, device: str) -> tuple[str, str]:
    """The protocol and the InfiniBand devices (comma separated; empty: Mooncake chooses) for this
    process; see `mooncake_protocol`.

    Args:
        device: Device of this process, as given to `mark_device_set`.

    Raises:
        ValueError: One line with the setting and the remedy.
    """
    load_mooncake()
    check_store_protocol(config)
    devices = list_rdma_devices()
    names = ""
    if config.protocol in IB_PROTOCOLS:
        _, _, index = device.partition(":")
        gpu_id = int(index) if index else None
        names = get_ib_devices_for_gpu(config.device_name, gpu_id, field=DEVICE_FIELD) or ""
        devices = choose_devices(names, devices, field=DEVICE_FIELD)
    protocol = resolve_mooncake_protocol(
        config.protocol,
        allow_tcp_fallback=envs.SGLANG_MOONCAKE_ALLOW_TCP_FALLBACK.get(),
        devices=devices,
        supported=wheel_protocols(),
    )
    if protocol == "ascend" and device_kind(device) is not NPU:
        raise ValueError(
            f"MOONCAKE_PROTOCOL=ascend connects NPUs, and this process is on {device}: set "
            "MOONCAKE_PROTOCOL (protocol) to rdma or tcp"
        )
    return protocol, names if protocol in IB_PROTOCOLS else ""


def is_reachable(config: MooncakeStoreConfig) -> bool:
    """True if the master, and the stand-alone client if there is one, accept connections."""
    return _answers(config.master_host_port()) and _answers(config.client_host_port())


def _answers(address: tuple[str, int] | None) -> bool:
    """True if a port accepts connections, within `_REACH_SECONDS`."""
    return address is None or can_connect(*address, timeout=_REACH_SECONDS)


def check_reachable(config: MooncakeStoreConfig) -> None:
    """Raise StorageUnreachable, without delay, if master or client does not answer."""
    if not _answers(config.master_host_port()):
        raise StorageUnreachable(
            f"no mooncake_master answers at MOONCAKE_MASTER={config.master_server_address}: start "
            "one there, or set MOONCAKE_MASTER (master_server_address) to where it runs"
        )
    if not _answers(config.client_host_port()):
        raise StorageUnreachable(
            f"no mooncake_client answers at MOONCAKE_CLIENT={config.client_server_address}: start "
            "one on this host, or unset MOONCAKE_CLIENT (client_server_address)"
        )
    if config.check_server:
        check_health(config)


def check_health(config: MooncakeStoreConfig) -> None:
    """Ask the master's metrics port for its health. Raises StorageUnreachable."""
    address = config.master_host_port()
    host = address[0] if address else "localhost"
    bracketed = f"[{host}]" if ":" in host else host
    url = f"http://{bracketed}:{config.master_metrics_port}/health"
    try:
        with urllib.request.urlopen(url, timeout=_REACH_SECONDS):
            return
    except (urllib.error.URLError, OSError) as error:
        raise StorageUnreachable(
            f"mooncake_master is not healthy at {url}: {error}; check MOONCAKE_MASTER and "
            "MOONCAKE_MASTER_METRICS_PORT, or unset MOONCAKE_CHECK_SERVER"
        ) from error
