"""Settings of the Mooncake Store client, from extra config, JSON file and environment."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from sglang.srt.environ import envs, parse_size

logger = logging.getLogger(__name__)

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
