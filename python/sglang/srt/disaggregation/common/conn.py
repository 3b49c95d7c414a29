"""The conversation between prefill and decode servers: the decode server reads.

A transport adds an engine that moves bytes. No server writes to the memory of another. The pages of
a decode server are free again as soon as its own reads have ended, even if the prefill server has
failed.
"""

from __future__ import annotations

import functools
import logging
import math
import uuid
from abc import abstractmethod
from collections import Counter
from collections.abc import Sequence
from typing import Final, NoReturn

import msgspec

from sglang.srt.arg_groups.disaggregation import DisaggregationMode
from sglang.srt.disaggregation.base.bootstrap_route import ROUTE_DECODER, Route, find
from sglang.srt.disaggregation.base.conn import (
    AuxBuffers,
    BaseKVManager,
    BaseKVReceiver,
    BaseKVSender,
    BootstrapAddr,
    KVArgs,
    KVPoll,
    KVTransferError,
    KVTransferMetric,
    ServerSettings,
)
from sglang.srt.disaggregation.base.deployment_secret import DeploymentSecret
from sglang.srt.disaggregation.base.timeouts import Timeouts, seconds, silence_s
from sglang.srt.disaggregation.common.asked_room import AskedRoom
from sglang.srt.disaggregation.common.geometry import (
    NO_STATES,
    STAGING_BYTES,
    PoolGeometry,
    RankPlace,
    StateSlots,
)
from sglang.srt.disaggregation.common.metadata_reader import (
    CONTROL,
    TRANSPORT,
    MetadataReader,
    host_identity,
)
from sglang.srt.disaggregation.common.packing import Packer
from sglang.srt.disaggregation.common.prefill_groups import PrefillGroups
from sglang.srt.disaggregation.common.prefill_server import DecodeRank, FindRank, PrefillServer
from sglang.srt.disaggregation.common.prefill_servers import PrefillServers, PromptRead
from sglang.srt.disaggregation.common.room_checksums import RoomChecksums
from sglang.srt.disaggregation.common.room_server import RoomServer
from sglang.srt.disaggregation.common.sessions import Engine, Sessions
from sglang.srt.disaggregation.common.shard_read import (
    OwnSlots,
    SharedReads,
)
from sglang.srt.disaggregation.common.staging import (
    UNIT_BYTES,
    LinkCosts,
    Staging,
    register_new,
)
from sglang.srt.disaggregation.control.protocol import RowsLayout
from sglang.srt.distributed.rank_group import gather_texts
from sglang.srt.environ import envs
from sglang.srt.hardware_backend.device_runtime import device_runtime
from sglang.srt.mem_cache.tree.on_all_ranks import on_all_ranks
from sglang.srt.messages.first_token import FirstToken
from sglang.srt.utils.network import address_for_peers

logger = logging.getLogger(__name__)

_FIND_S: Final = 5.0
"""Time limit of one request to a bootstrap server, in seconds."""
_ROUTE_BYTES: Final = 2048
"""Most bytes of a rank's route as JSON."""


class CommonKVManager(BaseKVManager):
    """A rank's end of a transport: registered memory, and the choice how metadata travels.
    `manager_class` gives the class for a role.

    Args:
        disaggregation_mode: The part of requests that the server computes; not `NULL`.
        server_args: Address to listen on, and the deployment's secret.
        engine: Moves the bytes.
        transport: Name of the engine's kind; servers with unlike ones refuse each other.
        find_rank: Finds ranks of prefill servers; None: asks their bootstrap servers.
        link: Costs of the link, if packing pages may pay on it; both servers of a pair need them.
        unit_bytes: Bytes of a unit of packed pages, at least `STAGING_BYTES`, if there is a `link`.
        prepares_staging: True to make the staging buffers now; see `Staging.prepare`.
        staging: The buffers of the manager with the other role; None: there is none yet.

    Attributes:
        checksums: Hashes pages of this rank.

    Raises:
        ValueError: On any rank, the host is not an address of the machine, or a time limit in the
            environment is not positive.
        RuntimeError: The transport refuses the memory.
    """

    def __init__(
        self,
        args: KVArgs,
        disaggregation_mode: DisaggregationMode,
        server_args: ServerSettings,
        *,
        engine: Engine,
        transport: str = "mooncake",
        find_rank: FindRank | None = None,
        link: LinkCosts | None = None,
        unit_bytes: int = UNIT_BYTES,
        prepares_staging: bool = True,
        staging: Staging | None = None,
    ) -> None:
        self._args = args
        self._engine, self._transport = engine, transport
        self._settings, self._find_rank, self._link = server_args, find_rank, link
        self._host = server_args.host
        self._place = RankPlace(args.ranks.rank, args.ranks.size, args.ranks.attn_tp_size)
        self._secret = DeploymentSecret.of(server_args.disaggregation_secret)
        self.checksums = RoomChecksums(args.pools, envs.SGLANG_HICACHE_CHECKED_SHARE.get())
        self._geometry = PoolGeometry.of(args.pools, args.weights_identity, args.dtype, transport)
        self.register_buffer_to_engine()
        packs = link is not None
        if staging is None:
            staging = Staging(engine, args.pools[0].device, unit_bytes if packs else STAGING_BYTES)
            reads = disaggregation_mode == DisaggregationMode.DECODE
            if prepares_staging and (packs or reads or server_args.enable_pd_role_switch):
                staging.prepare()
        self._staging = staging
        self._start(staging, link, find_rank)

    @abstractmethod
    def _start(self, staging: Staging, link: LinkCosts | None, find_rank: FindRank | None) -> None:
        """Start the role's threads. A collective."""

    def in_role(self, disaggregation_mode: DisaggregationMode) -> CommonKVManager:
        return manager_class(disaggregation_mode)(
            self._args,
            disaggregation_mode,
            self._settings,
            engine=self._engine,
            transport=self._transport,
            find_rank=self._find_rank,
            link=self._link,
            staging=self._staging,
        )

    def register_buffer_to_engine(self) -> None:
        """Register pools and rows of metadata. Raises RuntimeError if the transport refuses the
        memory."""
        geometry, rows = self._geometry, self._args.aux_buffers
        # Whole allocations, since over NVLink a peer on the same host can map nothing smaller.
        ranges = device_runtime(self._args.pools[0].device).allocations_of(geometry.tensors)
        assert all(
            any(begin <= address < begin + size for begin, size in ranges.items())
            for address in geometry.addresses
        ), "a pool has memory that its geometry does not name"
        register_new(self._engine, ranges)
        if rows is None:
            return
        try:
            register_new(self._engine, rows.allocations())
        except RuntimeError as error:
            raise RuntimeError(
                f"metadata in memory of {rows.device}: {error}; set SGLANG_MOONCAKE_SEND_AUX_TCP=1 "
                "to send it over the control connection, or "
                "SGLANG_MOONCAKE_CUSTOM_MEM_POOL=INTRA_NODE_NVLINK to keep it beside the pages"
            ) from error
        logger.info("metadata is in rows in memory of %s, and is read as pages are", rows.device)

    def send_aux(self, sender: CommonKVSender, metadata: FirstToken) -> bool:
        """Let a request's metadata be read: from a row, where there are rows and it fits into one,
        else inline, in the message that says that all pages are there. `metadata_device` has the
        reasons; a decode server that cannot read rows gets it inline too. False: all rows are in
        use, so that it was not sent."""
        rows, row = self._args.aux_buffers, None
        if rows is not None:
            if (row := rows.alloc()) is None:
                return False
            if not rows.set_buf(row, sender.bootstrap_room, metadata):
                rows.free(row)
                row = None
        sender.complete(metadata, row)
        return True

    def free_aux(self, row: int) -> None:
        assert self._args.aux_buffers is not None, "it had one"
        self._args.aux_buffers.free(row)


def manager_class(
    mode: DisaggregationMode,
) -> type[CommonKVDecodeManager | CommonKVPrefillManager]:
    """The class of a role's manager."""
    return CommonKVDecodeManager if mode == DisaggregationMode.DECODE else CommonKVPrefillManager


class CommonKVPrefillManager(CommonKVManager):
    """A rank of a prefill server. It has the threads of `RoomServer` and `Packer`.

    Attributes:
        rooms: Answers decode servers.
    """

    rooms: RoomServer

    def _start(self, staging: Staging, link: LinkCosts | None, find_rank: FindRank | None) -> None:
        packer = None if link is None else Packer(self._geometry.page_rows(), staging)
        self.rooms = self._listen(packer)

    def _listen(self, packer: Packer | None) -> RoomServer:
        ranks, rows = self._args.ranks, self._args.aux_buffers
        unwanted_s = seconds(envs.SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT)
        unknown_s = seconds(envs.SGLANG_DISAGGREGATION_UNKNOWN_ROOM_TIMEOUT)
        silent_s = silence_s()

        def listen() -> RoomServer:
            layout = self._geometry.layout(
                uuid.uuid4().hex,
                self._engine.get_session_id(),
                unit_bytes=0 if packer is None else packer.unit_bytes,
                rows=None if rows is None else self._rows_layout(rows),
            )
            try:
                return RoomServer(
                    layout,
                    self._host,
                    unwanted_s=unwanted_s,
                    silent_s=silent_s,
                    # Decode servers name rooms to the first rank alone.
                    unknown_s=math.inf if ranks.rank else unknown_s,
                    secret=self._secret,
                    packer=packer,
                )
            except ValueError as error:
                raise ValueError(f"--host {self._host}: for decode servers: {error}") from error

        return on_all_ranks(ranks, listen, RoomServer.close)

    def _rows_layout(self, rows: AuxBuffers) -> RowsLayout:
        (address,), (num_bytes,), (row_bytes,) = rows.get_buf_infos()
        host = host_identity() if self._engine.stays_on_host else ""
        return RowsLayout(address, row_bytes, num_bytes // row_bytes, host)

    def register_to_bootstrap(self) -> list[Route]:
        address = address_for_peers(self._host)
        bracketed = f"[{address}]" if ":" in address else address
        route = Route(
            rank=self._place.rank,
            endpoint=f"tcp://{bracketed}:{self.rooms.port}",
            instance_id=self.rooms.instance_id,
            num_ranks=self._place.num_ranks,
            attn_tp_size=self._place.attn_tp_size,
            dp_rank=self._args.dp_rank,
            dp_size=self._args.dp_size,
        )
        logger.info(
            "decode servers are answered at %s, instance %s", route.endpoint, route.instance_id
        )
        texts = gather_texts(self._args.ranks, msgspec.json.encode(route).decode(), _ROUTE_BYTES)
        return [ROUTE_DECODER.decode(text) for text in texts]

    def close(self) -> None:
        self.rooms.close()


class CommonKVDecodeManager(CommonKVManager):
    """A rank of a decode server. It has the threads of `PrefillServers` and `CommonKVReceiver`.

    Attributes:
        prefill_servers: The servers to read from.
    """

    prefill_servers: PrefillServers

    def _start(self, staging: Staging, link: LinkCosts | None, find_rank: FindRank | None) -> None:
        reads = SharedReads(
            engine=self._engine,
            staging=staging,
            checksums=self.checksums,
            metadata=MetadataReader(self._args.aux_buffers, host_identity()),
            sessions=Sessions(self._engine),
            timeouts=Timeouts.from_environment(),
            link=link,
        )
        rank = DecodeRank(
            place=self._place,
            geometry=self._geometry,
            reads=reads,
            find_rank=find_rank or functools.partial(find, timeout=_FIND_S, secret=self._secret),
            secret=self._secret,
        )
        failure_prob = envs.SGLANG_TEST_DISAGG_FAILURE_PROB.get()
        if failure_prob:
            logger.warning("%.0f%% of the requests fail, for tests", 100 * failure_prob)
        ranks = self._args.ranks
        drawn = uuid.uuid4().hex.encode() if ranks.rank == 0 else None
        self.prefill_servers = PrefillServers(rank, ranks.broadcast(drawn).decode(), failure_prob)

    def register_to_bootstrap(self) -> list[Route]:
        return []

    def close(self) -> None:
        self.prefill_servers.close()


class CommonKVSender(BaseKVSender):
    """A request's room. If no row of metadata is free, a computed request waits for one."""

    def __init__(
        self, mgr: CommonKVPrefillManager, bootstrap_addr: BootstrapAddr, bootstrap_room: int
    ) -> None:
        self.bootstrap_room = bootstrap_room
        self._mgr = mgr
        self._rooms = mgr.rooms
        self._room = self._rooms.open_room(bootstrap_room)
        self._unsent: FirstToken | None = None

    @property
    def num_sent(self) -> int:
        return len(self._room.pages)

    def send(self, kv_indices: Sequence[int]) -> None:
        checksums = self._mgr.checksums.draw_pages(kv_indices)
        with self._rooms.lock:
            self._room.pages += kv_indices
            self._room.checksums += checksums
        self._rooms.wake()

    def send_aux(self, metadata: FirstToken) -> None:
        self._unsent = None if self._mgr.send_aux(self, metadata) else metadata

    def complete(self, metadata: FirstToken, row: int | None) -> None:
        """Note that all pages are sent, and the metadata can be read.

        Args:
            row: Row that has the metadata until the room ends; None: it is sent inline.
        """
        slots = StateSlots(metadata.state_slot, metadata.request_row)
        state_checksums = self._mgr.checksums.draw_state(slots) if slots != NO_STATES else []
        with self._rooms.lock:
            room = self._room
            room.state_checksums = state_checksums
            room.metadata, room.row, room.is_complete = metadata, row, True
        self._rooms.wake()

    def poll(self) -> KVPoll:
        """See `RoomServer.poll`."""
        if self._unsent is not None:
            self.send_aux(self._unsent)
        return self._rooms.poll(self._room)

    def failure_exception(self) -> NoReturn:
        raise KVTransferError(self._room.failure or "")

    def abort(self, reason: str) -> None:
        row = self._room.row
        self._unsent = None
        self._rooms.end_room(self._room, reason)
        if row is not None:
            self._mgr.free_aux(row)

    def clear(self) -> None:
        self._rooms.forget_room(self._room)


class CommonKVReceiver(BaseKVReceiver):
    """Receives one prompt on one rank.

    A `PrefillGroups` first asks whether the prefill server has the request. Then a `PromptRead`
    reads the prompt. Both say how far they are. Scheduler's thread.
    """

    def __init__(
        self, mgr: CommonKVDecodeManager, bootstrap_addr: BootstrapAddr, bootstrap_room: int
    ) -> None:
        self.bootstrap_room, self.metadata = bootstrap_room, None
        self._servers = mgr.prefill_servers
        self._address = bootstrap_addr
        self._room = self._asked = AskedRoom(bootstrap_room)
        """The room of the server's first group, and of the group whose word counts."""
        self._group: PrefillServer | None = None
        """The group whose word counts; None: no server is asked yet, or can be."""
        self._server: PrefillGroups | None = None
        self._read: PromptRead | None = None

    def init(self) -> None:
        self._server = self._servers.ask(self._address, self._room)
        if self._server is not None:
            self._group = self._server.groups[0]

    def send_metadata(
        self,
        kv_indices: Sequence[int],
        *,
        state_indices: Sequence[int] = (),
        decode_prefix_len: int = 0,
        request_row: int | None = None,
    ) -> None:
        group = self._group
        assert group is not None and self._asked.sources, "the prefill server has the request"
        group.leave(self._asked)
        page_size = self._servers.rank.geometry.pools[0].page_size
        own = OwnSlots(
            pages=kv_indices,
            first_page=decode_prefix_len // page_size,
            states=StateSlots(next(iter(state_indices), None), request_row),
        )
        self._read = self._servers.read(group, self._asked, own)

    def poll(self) -> KVPoll:
        read = self._read
        if read is None:
            if self._server is not None and self._room in self._server.sought:
                self._group, self._asked = self._server.pick(self._room)
            if self._asked.failure is not None:
                return KVPoll.Failed
            return KVPoll.WaitingForInput if self._asked.sources else KVPoll.Bootstrapping
        self.metadata = read.metadata
        if self.metadata is not None:
            return KVPoll.Success
        return KVPoll.Transferring if read.failure is None else KVPoll.Failed

    def failure_exception(self) -> NoReturn:
        part = self._asked if self._read is None else self._read
        raise KVTransferError(part.failure or "")

    @property
    def has_ended(self) -> bool:
        return self._read is None or self._read.has_ended

    def get_transfer_metric(self) -> KVTransferMetric:
        """Amounts read so far, and the seconds of the slowest shard."""
        shards = () if self._read is None else self._read.shards
        return KVTransferMetric(
            max((shard.seconds for shard in shards), default=0.0),
            sum(shard.num_bytes for shard in shards),
            {way: sum(one.metadata_bytes[way] for one in shards) for way in (CONTROL, TRANSPORT)},
            sum((one.checked for one in shards), Counter()),
        )

    def abort(self, reason: str) -> None:
        if self._read is not None:
            self._read.fail(reason)
            return
        self.poll()  # A group may have got the room since the last call.
        found = self._group if self._asked.sources else None
        self._servers.decline(self._address, self.bootstrap_room, reason, found)
        if found is not None:
            found.leave(self._asked)
        if self._server is not None:
            self._server.leave(self._room)
