"""Makes the half of a prefill or a decode server: memory that peers read, sockets, threads."""

from __future__ import annotations

import functools
import logging
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

import msgspec
import torch

from sglang.srt.arg_groups.disaggregation import DisaggregationMode
from sglang.srt.disaggregation.common.bootstrap_client import find
from sglang.srt.disaggregation.common.bootstrap_route import ROUTE_DECODER, Route
from sglang.srt.disaggregation.common.conversation import Patience
from sglang.srt.disaggregation.common.geometry import STAGING_BYTES, PoolGeometry
from sglang.srt.disaggregation.common.link_costs import UNIT_BYTES, LinkCosts
from sglang.srt.disaggregation.common.metadata_reader import MetadataReader
from sglang.srt.disaggregation.common.packing import Packer
from sglang.srt.disaggregation.common.page_reads import Mover
from sglang.srt.disaggregation.common.protocol import RowsOffer
from sglang.srt.disaggregation.common.rank_map import RankPlace
from sglang.srt.disaggregation.common.room_desk import RoomDesk
from sglang.srt.disaggregation.common.sessions import Peers, Sessions
from sglang.srt.disaggregation.common.staging import Staging
from sglang.srt.disaggregation.common.whole_prompt import FindRank, Means
from sglang.srt.disaggregation.control.deployment_secret import DeploymentSecret
from sglang.srt.disaggregation.decode import DecodeHalf
from sglang.srt.disaggregation.prefill import PrefillHalf
from sglang.srt.disaggregation.prefill_servers import PrefillServers
from sglang.srt.disaggregation.utils import (
    NUM_ROWS,
    MetadataBuffers,
    host_identity,
    metadata_device,
)
from sglang.srt.distributed.rank_group import RankGroup, SingleRank, gather_texts
from sglang.srt.environ import EnvInt, envs
from sglang.srt.hardware_backend.device_runtime import device_runtime
from sglang.srt.mem_cache.tree.on_all_ranks import on_all_ranks
from sglang.srt.utils.network import address_for_peers

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler.half import Half
    from sglang.srt.managers.scheduler.parts import Holder
    from sglang.srt.managers.scheduler.state import SchedulerState
    from sglang.srt.mem_cache.device.base_device_pool import BaseDevicePool

logger = logging.getLogger(__name__)

_FIND_S: Final = 5.0
"""Time limit of one request to a bootstrap server, in seconds."""
MakeHalf = Callable[["SchedulerState", "Holder"], "Half"]
_ROUTE_BYTES: Final = 2048
"""Most bytes of a rank's route as JSON."""


class Engine(Mover, Peers, Protocol):
    """The part of the Transfer Engine that halves use; see `MooncakeTransferEngine`."""

    def batch_register(self, ptrs: Sequence[int], lengths: Sequence[int]) -> int: ...
    def is_registered(self, ptr: int, length: int) -> bool: ...
    def get_session_id(self) -> str: ...
    @property
    def stays_on_host(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class HalfServer:
    """The half of a server, with the routes by which other servers find its ranks."""

    make: MakeHalf
    routes: list[Route]
    """Routes of all ranks, for the bootstrap server; empty on a decode server, which has none."""


def make_half_server(
    mode: DisaggregationMode,
    host: str,
    pools: Sequence[BaseDevicePool],
    weights_identity: str,
    dtype: torch.dtype,
    engine: Engine,
    find_rank: FindRank | None = None,
    group: RankGroup | None = None,
    *,
    secret: DeploymentSecret | None = None,
    link: LinkCosts | None = None,
    unit_bytes: int = UNIT_BYTES,
    prepares_staging: bool = False,
) -> HalfServer:
    """Register the pools with the Transfer Engine, and listen. A collective.

    Args:
        mode: What the server computes of its requests; not `NULL`.
        host: Address that this server listens on.
        pools: Pools of the model.
        dtype: Dtype in which the model computes.
        find_rank: Finds ranks of prefill servers for a decode server; None: asks their bootstrap
            servers.
        group: The ranks of this server; None: this rank alone.
        secret: The secret that both servers of a pair prove; None: neither has one.
        link: Costs of the link, if packing pages may pay on it; both servers of a pair need them.
        unit_bytes: With `link`, bytes of a unit of packed pages, at least `STAGING_BYTES`.
        prepares_staging: Whether to make the staging buffers now; see `Staging.prepare`.

    Raises:
        ValueError: On any rank, the host is not an address of the machine, or a time limit in the
            environment is not positive.
        RuntimeError: The transport refuses the memory.
    """
    ranks = group or SingleRank()
    geometry = PoolGeometry.of(pools, weights_identity, dtype)
    # Whole allocations, since over NVLink a peer on the same host can map nothing smaller.
    ranges = device_runtime(pools[0].device).allocations_of(geometry.tensors)
    assert all(
        any(begin <= address < begin + size for begin, size in ranges.items())
        for address in geometry.addresses
    ), "a pool has memory that its geometry does not name"
    _register(engine, ranges)
    metadata = _make_metadata(engine, pools[0].device, ranges)
    packs = link is not None
    staging = Staging(engine, pools[0].device, ranges, unit_bytes if packs else STAGING_BYTES)
    if prepares_staging and (packs or mode == DisaggregationMode.DECODE):
        staging.prepare()
    if mode == DisaggregationMode.PREFILL:
        packer = Packer(geometry.page_rows(), staging) if packs else None
        return _prefill(host, geometry, engine, ranks, packer, metadata, secret)
    means = Means(
        place=_place(ranks),
        geometry=geometry,
        mover=engine,
        staging=staging,
        metadata=MetadataReader(metadata, host_identity()),
        sessions=Sessions(engine),
        find_rank=find_rank or functools.partial(find, timeout=_FIND_S, secret=secret),
        patience=_patience(),
        secret=secret,
        link=link,
    )
    return HalfServer(_decode(means, ranks), [])


def _register(engine: Engine, allocations: dict[int, int]) -> dict[int, int]:
    """Register allocations, address to bytes, that are not registered yet; these are returned. On a
    GPU pools, rows of metadata, and weights that other servers may read can share one."""
    new = {
        address: size
        for address, size in allocations.items()
        if not engine.is_registered(address, size)
    }
    if new:
        engine.batch_register(list(new), list(new.values()))
    return new


def _place(ranks: RankGroup) -> RankPlace:
    return RankPlace(ranks.rank, ranks.size, ranks.attn_tp_size)


def _make_metadata(
    engine: Engine, pages: torch.device, ranges: dict[int, int]
) -> MetadataBuffers | None:
    """Registered rows for metadata; None: metadata is sent over the control connection.

    Args:
        ranges: Registered memory, address to bytes; the rows' memory is added.
    """
    device = metadata_device(pages)
    if device is None:
        return None
    metadata = MetadataBuffers(NUM_ROWS, device)
    try:
        new = _register(engine, metadata.allocations())
    except RuntimeError as error:
        raise RuntimeError(
            f"metadata in memory of {device}: {error}; set SGLANG_MOONCAKE_SEND_AUX_TCP=1 to send "
            "it over the control connection, or "
            "SGLANG_MOONCAKE_CUSTOM_MEM_POOL=INTRA_NODE_NVLINK to keep it beside the pages"
        ) from error
    ranges.update(new)
    logger.info("metadata is in rows in memory of %s, and is read as pages are", device)
    return metadata


def _prefill(
    host: str,
    geometry: PoolGeometry,
    engine: Engine,
    ranks: RankGroup,
    packer: Packer | None,
    metadata: MetadataBuffers | None,
    secret: DeploymentSecret | None,
) -> HalfServer:
    place = _place(ranks)
    instance_id = uuid.uuid4().hex
    wait_s = _seconds(envs.SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT)
    unknown_s = _seconds(envs.SGLANG_DISAGGREGATION_UNKNOWN_ROOM_TIMEOUT)
    silent_s = _silence()

    rows = None if metadata is None else _rows_offer(metadata, engine)

    def listen() -> RoomDesk:
        unit_bytes = packer.unit_bytes if packer is not None else 0
        session_id = engine.get_session_id()
        offer = geometry.offer(instance_id, session_id, unit_bytes=unit_bytes, rows=rows)
        try:
            return RoomDesk(
                offer, host, unwanted_s=wait_s, silent_s=silent_s, secret=secret, packer=packer
            )
        except ValueError as error:
            raise ValueError(f"--host {host}: for decode servers: {error}") from error

    desk = on_all_ranks(ranks, listen, RoomDesk.close)
    address = address_for_peers(host)
    bracketed = f"[{address}]" if ":" in address else address
    route = Route(
        rank=place.rank,
        endpoint=f"tcp://{bracketed}:{desk.port}",
        instance_id=instance_id,
        num_ranks=place.num_ranks,
        attn_tp_size=place.attn_tp_size,
    )
    logger.info("decode servers are answered at %s, instance %s", route.endpoint, instance_id)
    texts = gather_texts(ranks, msgspec.json.encode(route).decode(), _ROUTE_BYTES)
    routes = [ROUTE_DECODER.decode(text) for text in texts]
    return HalfServer(
        lambda state, _: PrefillHalf(state, desk, wait_s, unknown_s, ranks, metadata), routes
    )


def _rows_offer(metadata: MetadataBuffers, engine: Engine) -> RowsOffer:
    (address,), (num_bytes,), (row_bytes,) = metadata.get_buf_infos()
    host = host_identity() if engine.stays_on_host else ""
    return RowsOffer(address, row_bytes, num_bytes // row_bytes, host)


def _patience() -> Patience:
    return Patience(
        bootstrap=_seconds(envs.SGLANG_DISAGGREGATION_UNKNOWN_ROOM_TIMEOUT),
        waiting=_seconds(envs.SGLANG_DISAGGREGATION_WAITING_TIMEOUT),
        silence=_silence(),
    )


def _decode(means: Means, ranks: RankGroup) -> MakeHalf:
    failure_prob = envs.SGLANG_TEST_DISAGG_FAILURE_PROB.get()
    if failure_prob:
        logger.warning("%.0f%% of the requests fail, for tests", 100 * failure_prob)
    drawn = uuid.uuid4().hex.encode() if ranks.rank == 0 else None
    servers = PrefillServers(means, ranks.broadcast(drawn).decode(), failure_prob)
    wait_s = _seconds(envs.SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT)
    silent_s = means.patience.silence
    return lambda state, holder: DecodeHalf(state, holder, servers, wait_s, silent_s, ranks)


def _silence() -> int:
    """Seconds without a message after which the other server counts as gone."""
    interval = _seconds(envs.SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL)
    return interval * _seconds(envs.SGLANG_DISAGGREGATION_HEARTBEAT_MAX_FAILURE)


def _seconds(field: EnvInt) -> int:
    """The value of a time limit in the environment.

    Raises:
        ValueError: The value is not positive.
    """
    value = field.get()
    if value < 1:
        raise ValueError(f"environment variable {field.name}={value}: it must be at least 1")
    return value
