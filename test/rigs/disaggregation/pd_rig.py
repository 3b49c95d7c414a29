"""A prefill and a decode scheduler in this process, which move keys and values between their pools.

A transport's engine carries the bytes, or `LocalMover`, which copies memory.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

import msgspec
import torch

from rigs.disaggregation.pd_pair import NEVER_ASKED, PdPair
from rigs.schedulers.checkable_worker import CheckableRig
from rigs.schedulers.scheduler_rig import SchedulerRig
from sglang.embedded_mooncake import LOOPBACK
from sglang.srt.arg_groups.disaggregation import DisaggregationMode
from sglang.srt.disaggregation.base.bootstrap_route import BootstrapError, Route
from sglang.srt.disaggregation.base.conn import KVArgs
from sglang.srt.disaggregation.common.conn import (
    CommonKVDecodeManager,
    CommonKVManager,
    CommonKVPrefillManager,
)
from sglang.srt.disaggregation.common.prefill_server import FindRank
from sglang.srt.disaggregation.common.prefill_servers import PrefillServers
from sglang.srt.disaggregation.common.room_server import RoomServer
from sglang.srt.disaggregation.common.sessions import Engine
from sglang.srt.disaggregation.common.staging import UNIT_BYTES, LinkCosts
from sglang.srt.disaggregation.decode import DecodeRole
from sglang.srt.disaggregation.prefill import PrefillRole
from sglang.srt.disaggregation.roles import changing_role_of, role_of
from sglang.srt.disaggregation.utils import MetadataBuffers
from sglang.srt.distributed.device_communicators.transfer_types import (
    Block,
    BlockOutcome,
    Transfer,
    TransferError,
    TransferOp,
)
from sglang.srt.distributed.rank_group import RankGroup, SingleRank
from sglang.srt.managers.scheduler.role_switch import MakeRole, Routes
from sglang.srt.mem_cache.device.base_device_pool import BaseDevicePool
from sglang.srt.messages.io_struct import PDRoleSwitchReqInput, ToScheduler

SLOW_BLOCKS = LinkCosts(block_s=10.0, bytes_per_s=1e12, packing_s=0.0, unit_s=0.0)
"""A link on which pages are packed wherever that makes fewer blocks of them, however long the
prefill server takes for the first unit."""


def one_rank(endpoint: str, instance_id: str = "instance") -> Route:
    """The route of a server of one rank."""
    return Route(rank=0, endpoint=endpoint, instance_id=instance_id, num_ranks=1, attn_tp_size=1)


@dataclass
class RigSettings:
    """The settings of a server that a transport uses."""

    host: str = LOOPBACK
    disaggregation_secret: str | None = None
    disaggregation_ib_device: str | None = None
    enable_pd_role_switch: bool = False


def make_manager(
    mode: DisaggregationMode,
    pools: Sequence[BaseDevicePool],
    engine: Engine,
    find_rank: FindRank | None = None,
    ranks: RankGroup | None = None,
    *,
    identity: str = "w",
    host: str = LOOPBACK,
    link: LinkCosts | None = None,
    unit_bytes: int = UNIT_BYTES,
    hidden_bytes: int = 0,
    group: tuple[int, int] = (0, 1),
) -> CommonKVManager:
    """A rank's manager, over `engine`."""
    args = KVArgs(
        ranks=ranks or SingleRank(),
        pools=pools,
        weights_identity=identity,
        dtype=torch.float32,
        aux_buffers=MetadataBuffers.beside(pools[0].device, hidden_bytes),
        dp_rank=group[0],
        dp_size=group[1],
    )
    reads = mode == DisaggregationMode.DECODE
    kind = CommonKVDecodeManager if reads else CommonKVPrefillManager
    return kind(
        args,
        mode,
        RigSettings(host),
        engine=engine,
        find_rank=find_rank,
        link=link,
        unit_bytes=unit_bytes,
        prepares_staging=False,
    )


class LocalMover:
    """Reads memory of this process. Any thread.

    Attributes:
        hold: Reads stay in flight until `release`.
        fails: Called with each read's blocks; returns the read's error.
        begun: Reads so far.
        stays_on_host: See `MooncakeTransferEngine`.
        gone: Endpoints that accept no connection.
        forgotten: Peers whose connections were given up.
    """

    def __init__(self) -> None:
        self.stays_on_host = False
        self.hold = False
        self.fails: Callable[[Sequence[Block]], TransferError | None] = lambda blocks: None
        self.begun: list[Transfer] = []
        self.gone: set[str] = set()
        self.forgotten: list[str] = []
        self._peers: dict[int, str] = {}
        """Peer of each transfer that nobody finishes yet, by its `id`."""

    def batch_register(self, ptrs: Sequence[int], lengths: Sequence[int]) -> int:
        return 0

    def batch_deregister(self, ptrs: Sequence[int]) -> int:
        return 0

    def is_registered(self, ptr: int, length: int) -> bool:
        return False

    def get_session_id(self) -> str:
        return "this process"

    def forget_peer(self, session_id: str) -> None:
        self.forgotten.append(session_id)

    def begin(
        self, peer: str, op: TransferOp, blocks: Sequence[Block], *, timeout: float | None
    ) -> Transfer:
        assert op is TransferOp.READ
        transfer = Transfer(blocks, on_settled=lambda: None)
        transfer.begin(0, len(blocks) - 1, None)
        self._peers[id(transfer)] = peer
        self.begun.append(transfer)  # Last: `release` may run in another thread.
        if not self.hold:
            self.finish(transfer)
        return transfer

    def finish(self, transfer: Transfer) -> None:
        """Move the transfer's bytes, or let it fail. Of several threads the first one does: bytes
        that came a second time would come after the reader's checks."""
        if (peer := self._peers.pop(id(transfer), None)) is None:
            return
        error = self.fails(transfer.blocks)
        if error is None:
            try:
                self.move(peer, transfer.blocks)
                transfer.end(0, len(transfer.blocks) - 1, BlockOutcome.DONE)
            except TransferError as failure:
                error = failure
        transfer.settle(error)

    def move(self, peer: str, blocks: Sequence[Block]) -> None:
        """Copy the bytes. Raises TransferError."""
        assert peer == self.get_session_id()
        for block in blocks:
            ctypes.memmove(block.local, block.remote, block.length)

    def release(self) -> None:
        """End the reads in flight, and hold no more."""
        self.hold = False
        for transfer in self.begun:
            if not transfer.is_settled:
                self.finish(transfer)

    def release_beside(self) -> None:
        """`release` in a thread for each read: a read from a stopped server hangs."""
        self.hold = False
        for transfer in self.begun:
            if not transfer.is_settled:
                threading.Thread(target=self.finish, args=(transfer,), daemon=True).start()


class EngineMover(LocalMover):
    """A `LocalMover` through an engine, from any process."""

    def __init__(self, engine: RigEngine) -> None:
        super().__init__()
        self._engine = engine
        self.stays_on_host = engine.stays_on_host

    def batch_register(self, ptrs: Sequence[int], lengths: Sequence[int]) -> int:
        return self._engine.batch_register(ptrs, lengths)

    def batch_deregister(self, ptrs: Sequence[int]) -> int:
        return self._engine.batch_deregister(ptrs)

    def is_registered(self, ptr: int, length: int) -> bool:
        return self._engine.is_registered(ptr, length)

    def get_session_id(self) -> str:
        return self._engine.get_session_id()

    def forget_peer(self, session_id: str) -> None:
        self._engine.forget_peer(session_id)

    def move(self, peer: str, blocks: Sequence[Block]) -> None:
        done = self._engine.begin(peer, TransferOp.READ, blocks, timeout=30)
        done.wait()
        if done.error is not None:
            raise done.error
        if not done.is_done:
            raise TransferError(f"{[outcome.value for outcome in done.outcomes]}")


class RecordedEngine:
    """A Transfer Engine whose registrations can all be undone."""

    def __init__(self, engine: RigEngine) -> None:
        self._engine = engine
        self._registered: list[int] = []
        self.get_session_id = engine.get_session_id
        self.begin = engine.begin
        self.forget_peer = engine.forget_peer
        self.is_registered = engine.is_registered
        self.stays_on_host = engine.stays_on_host

    def batch_register(self, ptrs: Sequence[int], lengths: Sequence[int]) -> int:
        self._registered += ptrs
        return self._engine.batch_register(ptrs, lengths)

    def deregister_all(self) -> None:
        registered, self._registered = self._registered, []
        self._engine.batch_deregister(registered)


class RigEngine(Engine, Protocol):
    """An engine whose registrations can be undone."""

    def batch_deregister(self, ptrs: Sequence[int]) -> int: ...


class RoleRig(SchedulerRig):
    """One of the two schedulers. Arguments beyond those of `SchedulerRig`:

    Args:
        mode: `prefill` or `decode`.
        engine: Moves the bytes.
        find_rank: The function by which a decode server finds prefill servers.
        identity: Identity of the weights.
        unit_bytes: Bytes of a unit of packed pages; None: pages are not packed.
        dp_group: Its DP group, and their number.
    """

    tick_s: ClassVar[float] = 0.001

    def __init__(
        self,
        model_path: Path,
        *,
        mode: DisaggregationMode,
        engine: RigEngine,
        find_rank: FindRank,
        identity: str = "rig",
        unit_bytes: int | None = None,
        dp_group: tuple[int, int] = (0, 1),
        **args: Any,
    ) -> None:
        self.routes: list[Route] = []
        self.engine = RecordedEngine(engine)
        link = None if unit_bytes is None else SLOW_BLOCKS

        def make_role(pools: Sequence[BaseDevicePool]) -> MakeRole:
            group = args.get("group") or SingleRank()
            manager = make_manager(
                mode,
                pools,
                self.engine,
                find_rank,
                group,
                identity=identity,
                link=link,
                unit_bytes=unit_bytes or UNIT_BYTES,
                hidden_bytes=self.worker.req_to_token_pool.hidden_bytes,
                group=dp_group,
            )
            self.routes = manager.register_to_bootstrap()
            self._remake = changing_role_of(manager, group)
            return role_of(mode, manager, group)

        args["disaggregation_mode"] = mode
        super().__init__(model_path, make_role=make_role, remake_role=self._remake_role, **args)

    def _remake_role(self, mode: DisaggregationMode) -> tuple[MakeRole, Routes]:
        make, routes = self._remake(mode)
        self.routes = msgspec.convert(routes, list[Route])
        return make, routes

    def switch(self, new_role: DisaggregationMode) -> dict[str, Any]:
        """Ask for the other role; data of the answer. Raises ValueError if it is a refusal."""
        self.step(PDRoleSwitchReqInput(req_id="switch", new_role=new_role))
        answer = self.answers.pop()
        if not answer.success:
            raise ValueError(answer.message)
        return answer.data

    @property
    def manager(self) -> CommonKVManager:
        """The transport of the present role."""
        role = self.scheduler._role
        assert isinstance(role, PrefillRole | DecodeRole)
        assert isinstance(role._kv_manager, CommonKVManager)
        return role._kv_manager

    @property
    def rooms(self) -> RoomServer:
        """Rooms of a prefill server."""
        assert isinstance(self.manager, CommonKVPrefillManager)
        return self.manager.rooms

    @property
    def prefill_servers(self) -> PrefillServers:
        """Prefill servers that a decode server knows."""
        assert isinstance(self.manager, CommonKVDecodeManager)
        return self.manager.prefill_servers

    @property
    def endpoint(self) -> str:
        """Endpoint of a prefill server's first rank."""
        return self.routes[0].endpoint


class CheckableRoleRig(CheckableRig, RoleRig):
    """A server whose model checks every key and value that it reads."""


_MODES = (DisaggregationMode.PREFILL, DisaggregationMode.DECODE)


class PdRig(PdPair[RoleRig]):
    """Both schedulers.

    Args:
        model_path: See `SchedulerRig`.
        engine: Moves the bytes; a function makes an engine for each server.
        checkable: The model is a `CheckableWorker`.
        prefill: Arguments of the prefill scheduler alone.
        decode: Arguments of the decode scheduler alone.
        groups: DP groups of the prefill and of the decode server.
        args: Arguments of both; see `RoleRig`.

    Attributes:
        sides: The schedulers of each server's groups; `prefill` and `decode` are the first ones.
        endpoints: Endpoints at which groups of the prefill server are found, if not their own.
    """

    def __init__(
        self,
        model_path: Path,
        engine: RigEngine | Callable[[], RigEngine],
        *,
        checkable: bool = False,
        prefill: dict[str, Any] | None = None,
        decode: dict[str, Any] | None = None,
        groups: tuple[int, int] = (1, 1),
        **args: Any,
    ) -> None:
        super().__init__()
        kind = CheckableRoleRig if checkable else RoleRig
        args["find_rank"] = self._find
        self.engine = engine
        self.other: RoleRig | None = None
        """Another prefill scheduler that the decode scheduler finds in place of its own one."""
        self.endpoints: dict[int, str] = {}
        own = dict(
            zip(_MODES, zip(groups, (prefill or {}, decode or {}), strict=True), strict=True)
        )

        def make(mode: DisaggregationMode) -> list[RoleRig]:
            size, more = own[mode]
            mover = engine() if callable(engine) else engine
            return [
                kind(
                    model_path,
                    **{**args, **more, "mode": mode, "engine": mover, "dp_group": (dp_rank, size)},
                )
                for dp_rank in range(size)
            ]

        self._make = make
        self._ended: list[RoleRig] = []
        """Schedulers of servers that were replaced."""
        self.sides: dict[str, list[RoleRig]] = {mode: make(mode) for mode in _MODES}
        self.prefill, self.decode = (side[0] for side in self.sides.values())
        self.strangers: dict[str, Route | None] = {}
        """Other prefill servers that requests may name, by host; None: it is not found."""

    def _find(self, host: str, port: int, rank: int, dp_rank: int) -> Route:
        if host in self.strangers:
            stranger = self.strangers[host]
            if stranger is None:
                raise BootstrapError(f"nobody is at {host}")
            return stranger
        assert (host, port, rank) == (LOOPBACK, NEVER_ASKED, 0)
        rig = self.other or self.sides[DisaggregationMode.PREFILL][dp_rank]
        (route,) = rig.routes
        endpoint = self.endpoints.get(dp_rank, route.endpoint)
        return msgspec.structs.replace(route, endpoint=endpoint)

    def step_each(self, messages: Mapping[RoleRig, Sequence[ToScheduler]]) -> None:
        """Run a tick of each group, with its messages."""
        for rig in self.rigs:
            rig.step(*messages.get(rig, ()))
        if all(rig.scheduler.poll_timeout_ms() for rig in self.rigs):
            time.sleep(0.0005)

    def swap(self) -> None:
        """Change the roles of both, which are idle."""
        for rig, mode in zip(self.rigs, reversed(_MODES), strict=True):
            assert rig.switch(mode)["role"] == mode
        self.prefill, self.decode = self.decode, self.prefill
        self.sides = dict(zip(_MODES, ([self.prefill], [self.decode]), strict=True))

    def restart(self, mode: DisaggregationMode) -> None:
        """Replace a server by a new one. It has no read in flight; its memory stays until
        `close`."""
        ended = self.sides[mode]
        for rig in reversed(ended):
            rig.close()
            rig.engine.deregister_all()
        self._ended += ended
        self.sides[mode] = self._make(mode)
        self.prefill, self.decode = (side[0] for side in self.sides.values())

    def close(self) -> None:
        for rig in reversed(self.rigs):
            rig.close()
        self._ended.clear()
        # The next pair's pools may be where these were.
        for rig in self.rigs:
            rig.engine.deregister_all()

    @property
    def rigs(self) -> list[RoleRig]:
        return [rig for side in self.sides.values() for rig in side]
