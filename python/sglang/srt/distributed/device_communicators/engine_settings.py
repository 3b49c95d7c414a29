"""Settings of a process's Transfer Engine, resolved and checked before anything starts."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Final

from sglang.srt.distributed.device_communicators.mooncake_mem_pool import (
    CustomMemPool,
    check_mooncake_custom_mem_pool_enabled,
)
from sglang.srt.distributed.device_communicators.mooncake_protocol import (
    ENGINE_FIELD,
    IB_PROTOCOLS,
    RdmaDevice,
    choose_devices,
    resolve_mooncake_protocol,
)
from sglang.srt.distributed.device_communicators.transfer_types import (
    BATCH_BYTES,
    COPIES_BYTES,
    COPY_BYTES,
    REQUEST_BYTES,
)
from sglang.srt.environ import EnvField, envs
from sglang.srt.hardware_backend.device_kinds import CUDA, NPU, device_kind
from sglang.srt.utils.network import get_free_port

logger = logging.getLogger(__name__)

_ON_CUDA: Final = ("nvlink", "nvlink_intra")
_ON_PLAIN_MEMORY: Final = ("efa", "nvlink_intra")
"""Protocols that register only memory from `cudaMalloc`."""
_NEEDS: Final = {
    "tcp": envs.MC_FORCE_TCP,
    "nvlink": envs.MC_FORCE_MNNVL,
    "nvlink_intra": envs.MC_INTRANODE_NVLINK,
    "barex": envs.USE_BAREX,
}
"""Variables that force a protocol. TCP needs its variable only if Mooncake would prefer another
protocol."""


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Resolved settings, checked as far as possible on this machine."""

    requested: str
    protocol: str
    hostname: str
    """Name or address of this process for its peers."""
    local_name: str
    """Name for the engine: the hostname; on Ascend, with a port and the NPU."""
    ib_device: str
    """InfiniBand devices, comma separated; empty: the transport chooses."""
    variable: EnvField[str | None] | None = None
    """Variable that must be set for Mooncake to install this protocol's transport."""
    request_bytes: int = REQUEST_BYTES
    batch_bytes: int = BATCH_BYTES

    @property
    def is_fallback(self) -> bool:
        """True if the protocol in use is not the requested one, which the user has allowed."""
        return self.requested != self.protocol

    @property
    def stays_on_host(self) -> bool:
        """True if peers on other hosts are out of reach."""
        return self.protocol == "nvlink_intra"

    def export(self) -> None:
        """Set the environment variable that makes Mooncake's engine install this protocol's
        transport.

        The engine ignores the protocol's name, and chooses by its devices and such variables. Call
        this before other threads read the environment. The variable stays set.
        """
        if self.variable is not None and not self.variable.is_set():
            self.variable.set("1")


def settle_engine(
    hostname: str,
    *,
    device: str,
    gpu_id: int | None,
    ib_device: str,
    devices: Sequence[RdmaDevice],
    supported: Collection[str],
) -> EngineSettings:
    """Choose the protocol, and refuse settings that cannot work here. Uses no transport.

    Args:
        hostname: Name or address at which peers reach this process.
        device: Device of this process, as given to `mark_device_set`.
        gpu_id: Index of the rank's device, which identifies an NPU unless ASCEND_NPU_PHY_ID is set.
        ib_device: InfiniBand devices, comma separated; empty: any.
        devices: All InfiniBand devices of the host.
        supported: Protocols of the installed wheel.

    Raises:
        ValueError: In one line: the setting and the remedy.
    """
    requested = envs.MOONCAKE_PROTOCOL.get()
    if envs.ENABLE_ASCEND_TRANSFER_WITH_MOONCAKE.get():
        requested = "ascend"
    protocol = resolve_mooncake_protocol(
        requested,
        allow_tcp_fallback=envs.SGLANG_MOONCAKE_ALLOW_TCP_FALLBACK.get(),
        devices=choose_devices(ib_device, devices, field=ENGINE_FIELD)
        if requested in IB_PROTOCOLS
        else devices,
        supported=supported,
    )
    if protocol != "tcp" and envs.MC_FORCE_TCP.is_set():
        raise ValueError(
            f"MOONCAKE_PROTOCOL={protocol}, but MC_FORCE_TCP is set, which makes Mooncake use TCP: "
            "unset MC_FORCE_TCP, or set MOONCAKE_PROTOCOL=tcp"
        )
    _check_memory(protocol)
    if protocol in _ON_CUDA and device_kind(device) is not CUDA:
        raise ValueError(
            f"MOONCAKE_PROTOCOL={protocol} connects CUDA devices, and this process is on {device}: "
            "set MOONCAKE_PROTOCOL=rdma, or tcp where there is no RDMA device"
        )
    if protocol not in IB_PROTOCOLS and ib_device:
        logger.warning("%s uses no InfiniBand device: %s is ignored", protocol, ib_device)
    local_name = _ascend_name(hostname, device, gpu_id) if protocol == "ascend" else hostname
    variable = _NEEDS.get(protocol)
    if protocol == "tcp" and not devices and not set(_ON_CUDA) & set(supported):
        variable = None
    settings = EngineSettings(requested, protocol, hostname, local_name, ib_device, variable)
    if settings.stays_on_host:
        # Requests are copied one by one at 5 us each, so smaller ones would gain nothing.
        return replace(settings, request_bytes=COPY_BYTES, batch_bytes=COPIES_BYTES)
    return settings


def _check_memory(protocol: str) -> None:
    """Check that the protocol can register the kind of memory that the settings select."""
    pool = check_mooncake_custom_mem_pool_enabled()
    if protocol not in _ON_PLAIN_MEMORY:
        return
    is_plain = protocol == "nvlink_intra" and pool == CustomMemPool.INTRA_NODE_NVLINK
    if pool is not None and not is_plain:
        raise ValueError(
            f"MOONCAKE_PROTOCOL={protocol} cannot register memory of a custom pool: unset "
            f"SGLANG_MOONCAKE_CUSTOM_MEM_POOL ({pool})"
        )
    for field in (envs.PYTORCH_CUDA_ALLOC_CONF, envs.PYTORCH_ALLOC_CONF):
        if _has_expandable_segments(field.get()):
            raise ValueError(
                f"MOONCAKE_PROTOCOL={protocol} cannot register expandable segments: take "
                f"expandable_segments:True out of {field.name} ({field.get()})"
            )


def _has_expandable_segments(conf: str) -> bool:
    """True if `conf` turns on expandable segments. Parsed like in torch: comma-separated
    `key:value` pairs, of which the last one counts."""
    values = [
        value.strip().lower()
        for key, _, value in (part.partition(":") for part in conf.split(","))
        if key.strip().lower() == "expandable_segments"
    ]
    return bool(values) and values[-1] in ("true", "1")


def _ascend_name(hostname: str, device: str, gpu_id: int | None) -> str:
    if device_kind(device) is not NPU:
        raise ValueError(
            f"MOONCAKE_PROTOCOL=ascend connects NPUs, and this process is on {device}: set "
            "MOONCAKE_PROTOCOL=rdma or tcp, and unset ENABLE_ASCEND_TRANSFER_WITH_MOONCAKE"
        )
    npu = envs.ASCEND_NPU_PHY_ID.get()
    if npu == -1:
        npu = gpu_id if gpu_id is not None else -1
    if npu < 0:
        raise ValueError(
            f"ASCEND_NPU_PHY_ID={npu} is no NPU, and the rank's device is not known: set it to "
            "the physical id of this process's NPU"
        )
    return f"{hostname}:{get_free_port()}:npu_{npu}"
