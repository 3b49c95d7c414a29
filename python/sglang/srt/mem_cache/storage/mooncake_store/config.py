"""Settings of the Mooncake Store client, from extra config, JSON file and environment, and checks
whether they can work on this host."""

from __future__ import annotations

import json
import logging
import re
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

from sglang.srt.constants import MIB
from sglang.srt.distributed.device_communicators.mooncake_library import (
    PEER_TO_PEER,
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
_SWITCHES: Final = (
    "check_server", "standalone_storage", "enable_ssd_offload", "enable_group_semantics",
)  # fmt: skip
_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")
"""Valid values of `tenant_id` and `extra_backend_tag`."""
_METADATA: Final = "MOONCAKE_TE_META_DATA_SERVER (metadata_server)"
_METADATA_PORTS: Final = {"http": 80, "https": 443, "etcd": 2379, "redis": 6379}
"""Kinds of metadata servers, and their ports where the setting names none."""
_TENANTS: Final = "/api/v1/tenant_quotas"
"""Path of the master's tenants. A master without tenants answers 409."""
_DEFAULT_TENANT: Final = "default"


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
    """True to write the objects in the memory that a store node lends to a disk of its host too; an
    engine may not do that."""
    ssd_offload_path: str | None = None
    """Folder for that; each node makes one of its own in it."""
    local_buffer_size: int = 0
    """Bytes of scratch memory of the client."""
    tenant_id: str = _DEFAULT_TENANT
    """Tenant of the master that owns the objects; a master that knows no tenants has one."""
    extra_backend_tag: str = ""
    """First part of the keys; servers with unequal tags share no objects."""
    enable_group_semantics: bool = True
    """True if a full store evicts all objects of a page or none. If false, it may evict some, and
    the rest is of no use."""

    @property
    def host_allocator_type(self) -> str:
        """The allocator of host pools: `mooncake` for memory that a stand-alone client can map."""
        return "mooncake" if self.standalone_storage else "default"

    def __post_init__(self) -> None:
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
        self.metadata_host_ports()
        # A stand-alone client lends memory itself, and has its own setting for the size.
        if not self.standalone_storage and 0 < self.global_segment_size < _LEAST_SEGMENT_BYTES:
            raise ValueError(
                f"MOONCAKE_GLOBAL_SEGMENT_SIZE (global_segment_size): Mooncake lends no less than "
                f"{_LEAST_SEGMENT_BYTES} bytes, not {self.global_segment_size}: give 16mb or more, "
                "or 0 where store nodes hold the objects"
            )
        for name in ("tenant_id", "extra_backend_tag"):
            value = getattr(self, name)
            if value and not _NAME.fullmatch(value):
                raise ValueError(
                    f"Mooncake setting {name}: {value!r} is not 1 to 64 letters, digits, ., _ or -"
                )
        if self.standalone_storage and self.has_tenant:
            raise ValueError(
                "Mooncake setting tenant_id: a mooncake_client keeps no tenants apart; unset "
                "MOONCAKE_CLIENT (client_server_address), or leave tenant_id out"
            )
        if self.enable_ssd_offload and not self.ssd_offload_path:
            raise ValueError(
                "Mooncake setting enable_ssd_offload: set ssd_offload_path "
                "(MOONCAKE_OFFLOAD_FILE_STORAGE_PATH) to a folder on a local disk"
            )

    @property
    def has_tenant(self) -> bool:
        """True if the objects are those of one tenant of several."""
        return self.tenant_id != _DEFAULT_TENANT

    @property
    def offloads(self) -> bool:
        """True if this client lends memory and writes what is in it to disk."""
        lends = self.global_segment_size > 0 and not self.standalone_storage
        return self.enable_ssd_offload and lends

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
        """TCP address of the master, or None if the setting names a discovery service."""
        if "://" in self.master_server_address:
            return None
        return _host_port("MOONCAKE_MASTER (master_server_address)", self.master_server_address)

    def client_host_port(self) -> tuple[str, int] | None:
        """TCP address of the stand-alone client, or None."""
        if not self.standalone_storage:
            return None
        return _host_port("MOONCAKE_CLIENT (client_server_address)", self.client_server_address)

    def metadata_host_ports(self) -> list[tuple[str, int]]:
        """TCP addresses of the metadata server, of which one is enough; []: the client asks none.
        Raises ValueError that names the setting."""
        if self.standalone_storage or self.metadata_server == PEER_TO_PEER:
            return []
        scheme, _, rest = self.metadata_server.rpartition("://")
        default = _METADATA_PORTS.get(scheme)
        found = []
        for one in re.split("[,;]", rest):
            address = one.partition("/")[0]
            if default is not None and not re.search(r":[^:\]]*$", address):
                address = f"{address}:{default}"
            found.append(_host_port(_METADATA, address))
        return found


def _host_port(name: str, address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"{name} is {address!r}; it must be host:port")
    return host.strip("[]"), int(port)


def _from_env() -> dict[str, Any]:
    standalone = envs.MOONCAKE_STANDALONE_STORAGE.get()
    return {
        **({} if standalone is None else {"standalone_storage": standalone}),
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
        "enable_ssd_offload": envs.MOONCAKE_ENABLE_SSD_OFFLOAD.get(),
        "ssd_offload_path": envs.MOONCAKE_OFFLOAD_FILE_STORAGE_PATH.get() or "",
        "tenant_id": envs.MOONCAKE_TENANT_ID.get(),
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
        elif name in _SWITCHES:
            if not isinstance(value, bool):
                raise ValueError(f"Mooncake setting {name}: true or false, not {value!r}")
            checked[name] = value
        elif name == "device_name" and isinstance(value, Mapping):
            checked[name] = json.dumps(dict(value))
        else:
            if not isinstance(value, str | None):
                raise ValueError(f"Mooncake setting {name}: a string, not {value!r}")
            checked[name] = value or ""
    # The address of a client selects it, unless the config has `false`.
    checked.setdefault("standalone_storage", bool(checked.get("client_server_address")))
    checked["tenant_id"] = checked.get("tenant_id") or _DEFAULT_TENANT
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


def check_engine_offloads_nothing(config: MooncakeStoreConfig) -> None:
    """Refuse an engine whose own memory would be offloaded. Raises ValueError with one line.

    `close` of such a client (0.3.13.post1) returns at once and ends nothing: its transfers go on,
    and a later client of the process reads memory that has another owner, or crashes the process.
    The client of a store node lives as long as its process.
    """
    if config.offloads:
        raise ValueError(
            "Mooncake setting enable_ssd_offload (MOONCAKE_ENABLE_SSD_OFFLOAD): only store nodes "
            "can offload, since Mooncake 0.3.13.post1 does not disconnect a client that does: set "
            "it, ssd_offload_path and MOONCAKE_GLOBAL_SEGMENT_SIZE for `python -m "
            "sglang.mooncake_node`, and global_segment_size 0 here"
        )


def settle_protocol(
    config: MooncakeStoreConfig, device: str, rank: int | None = None
) -> tuple[str, str]:
    """The protocol and the InfiniBand devices (comma separated; empty: Mooncake chooses) for this
    process; see `mooncake_protocol`.

    Args:
        device: Device of this process, as given to `mark_device_set`.
        rank: Stands for the GPU's number in a `device_name` by GPU if the process has none.

    Raises:
        ValueError: One line with the setting and the remedy.
    """
    load_mooncake()
    check_store_protocol(config)
    devices = list_rdma_devices()
    names = ""
    if config.protocol in IB_PROTOCOLS:
        _, _, index = device.partition(":")
        gpu_id = int(index) if index else rank
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
    """True if the master, and the stand-alone client if there is one, accept connections. A client
    that is set up works without its metadata server."""
    return _answers(config.master_host_port()) and _answers(config.client_host_port())


def _answers(address: tuple[str, int] | None) -> bool:
    """True if a port accepts connections, within `_REACH_SECONDS`."""
    return address is None or can_connect(*address, timeout=_REACH_SECONDS)


def check_reachable(config: MooncakeStoreConfig) -> None:
    """Raise StorageUnreachable, without delay, if master, client or metadata server does not
    answer."""
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
    servers = config.metadata_host_ports()
    if servers and not any(map(_answers, servers)):
        raise StorageUnreachable(
            f"no metadata server answers at {_METADATA}={config.metadata_server}: start one there, "
            f"or leave the setting out: {PEER_TO_PEER} needs none"
        )
    if config.check_server:
        check_health(config)
    if config.has_tenant:
        _check_tenant(config)


def _check_tenant(config: MooncakeStoreConfig) -> None:
    """Refuse a master that shows the tenant's objects to others, or does not take them.

    A master without tenants takes any tenant's name and ignores it.

    Raises:
        ValueError: It keeps no tenants apart, or does not know this one.
        StorageUnreachable: It does not tell.
    """
    setting = f"Mooncake setting tenant_id={config.tenant_id} (MOONCAKE_TENANT_ID)"
    url = _metrics_url(config, _TENANTS)
    try:
        with urllib.request.urlopen(url, timeout=_REACH_SECONDS) as answer:
            known = {one["tenant_id"] for one in json.loads(answer.read())["data"]}
    except urllib.error.HTTPError as error:
        error.close()
        raise ValueError(
            f"{setting}: mooncake_master at {config.master_server_address} keeps no tenants apart "
            f"(HTTP {error.code}), and would show the objects to all: start it with "
            "--enable_multi_tenants=true and --tenant_quota_connector_uri, or leave tenant_id out"
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StorageUnreachable(
            f"{setting}: mooncake_master does not tell its tenants at {url}: {error}; check "
            "MOONCAKE_MASTER_METRICS_PORT"
        ) from error
    if config.tenant_id not in known:
        raise ValueError(
            f"{setting}: mooncake_master at {config.master_server_address} does not know this "
            "tenant; add it to the file of --tenant_quota_connector_uri"
        )


def _metrics_url(config: MooncakeStoreConfig, path: str) -> str:
    address = config.master_host_port()
    host = address[0] if address else "localhost"
    bracketed = f"[{host}]" if ":" in host else host
    return f"http://{bracketed}:{config.master_metrics_port}{path}"


def check_health(config: MooncakeStoreConfig) -> None:
    """Ask the master's metrics port for its health. Raises StorageUnreachable."""
    url = _metrics_url(config, "/health")
    try:
        with urllib.request.urlopen(url, timeout=_REACH_SECONDS):
            return
    except (urllib.error.URLError, OSError) as error:
        raise StorageUnreachable(
            f"mooncake_master is not healthy at {url}: {error}; check MOONCAKE_MASTER and "
            "MOONCAKE_MASTER_METRICS_PORT, or unset MOONCAKE_CHECK_SERVER"
        ) from error
