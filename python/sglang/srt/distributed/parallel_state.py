"""The groups of ranks of this process. Only this module and `torch_symm_mem` use torch.distributed.

The world has all `tp_size` ranks of a server, in `attn_dp_size` DP groups of consecutive ranks. A
DP group has ticks and a tree of its own, and consists of `attn_cp_size` sets. The ranks of a set
are consecutive and split the heads of attention (attention TP). Ranks at the same index of
different sets have the same heads, and split the tokens of a prefill (attention CP). Ranks
at the same index of different DP groups exchange tokens for their experts. Each group has
a second group over gloo for messages between CPUs. One thread of each rank uses the groups.
"""

from __future__ import annotations

import atexit
import hashlib
import logging
import platform
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist

from sglang.srt.constants import KIB
from sglang.srt.distributed.rank_group import RankLost
from sglang.srt.distributed.rendezvous import Rendezvous
from sglang.srt.distributed.tensor_group import PeerParts, PendingSum, TensorGroup
from sglang.srt.distributed.torch_symm_mem import TorchSymmMemCommunicator
from sglang.srt.environ import envs
from sglang.srt.hardware_backend.device_runtime import device_runtime
from sglang.srt.utils.network import interface_towards, is_loopback

logger = logging.getLogger(__name__)

_all_gather: Final[Callable[..., object]] = (
    getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
)
"""`all_gather_single`, which was called `all_gather_into_tensor` before torch 2.13."""
_reduce_scatter: Final[Callable[..., object]] = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)
"""Likewise."""
JOIN_TIMEOUT: Final = timedelta(minutes=10)
"""Timeout for all ranks to reach the rendezvous; the first start of a process can be slow."""
_TRANSPORT_ERRORS: Final = (dist.DistBackendError, dist.DistNetworkError)
_GLOO_TRANSPORT: Final = "gloo/transport/"
"""Text in gloo's connection errors, whose type is RuntimeError."""
_GLOO_SOURCE: Final = re.compile(r"^\[[^]]*\.cc:\d+\] ")
_SHORT_BYTES: Final = 256 * KIB
_NEVER: Final = timedelta(days=365)
"""Timeout of collectives. Ranks wait in a broadcast while the server is idle, so a shorter timeout
would end idle servers. `RankWatch` ends ranks that wait for a lost rank."""


class GroupCoordinator(TensorGroup):
    """The ranks of one group, as this rank sees them.

    Attributes:
        ranks: Ranks of the group by their numbers in the world, ascending.
        device_group: The group for tensors on the device; None: no other ranks.
        cpu_group: The same ranks over gloo; None: no other ranks.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        rank_in_world: int,
        device_group: dist.ProcessGroup | None,
        cpu_group: dist.ProcessGroup | None,
    ) -> None:
        self.ranks = tuple(ranks)
        self.device_group = device_group
        self.cpu_group = cpu_group
        self.rank = self.ranks.index(rank_in_world)
        self.size = len(self.ranks)
        self._symm_mem: TorchSymmMemCommunicator | None = None

    def open_symmetric_memory(self, device: torch.device) -> None:
        """Open symmetric memory; later sums of small tensors use it. A collective. If this fails on
        one rank, no rank uses such memory, and the log has the reason.

        Args:
            device: Device of this rank, with its index.
        """
        if self.cpu_group is None or self.device_group is None:
            return
        found, why = None, self._why_devices_are_apart(device)
        if self._all_can(why is None):
            try:
                found = TorchSymmMemCommunicator(self.device_group, device)
            except RuntimeError as error:
                why = str(error).partition("\n")[0]
        if self._all_can(found is not None):
            self._symm_mem = found
        else:
            logger.info(
                "small sums over %d ranks use no symmetric memory, like large ones: %s",
                self.size,
                why or "another rank has no symmetric memory",
            )

    def _why_devices_are_apart(self, device: torch.device) -> str | None:
        """Reason why this device cannot read the other devices' memory; None: it can."""
        machine = hashlib.sha256(platform.node().encode()).digest()[:7]
        mine = torch.tensor([int.from_bytes(machine, "little"), device.index])
        rows = [torch.empty_like(mine) for _ in self.ranks]
        with _naming_lost_ranks():
            dist.all_gather(rows, mine, group=self.cpu_group)
        for name, index in (row.tolist() for row in rows):
            if name != mine[0]:
                return "they are on different machines"
            if index != device.index and not device_runtime(device).can_read(index):
                return f"GPU {device.index} cannot read the memory of GPU {index}"
        return None

    def _all_can(self, this_can: bool) -> bool:
        flag = torch.tensor([int(this_can)])
        self.min_on_cpu(flag)
        return bool(flag)

    def empty_part(self, shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
        if self._symm_mem is not None and self._symm_mem.should_defer(shape, like.dtype):
            return self._symm_mem.empty_part(shape, like.dtype)
        return super().empty_part(shape, like)

    def sum_later(self, x: torch.Tensor) -> torch.Tensor | PendingSum:
        if self._symm_mem is not None and self._symm_mem.should_defer(x.shape, x.dtype):
            return PendingSum(self, *self._symm_mem.defer(x))
        return self.all_reduce(x)

    def shared_keys(self, count: int) -> tuple[torch.Tensor, PeerParts] | None:
        return None if self._symm_mem is None else self._symm_mem.shared_keys(count)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        if self._symm_mem is not None and self._symm_mem.should_allreduce(x):
            return self._symm_mem.all_reduce(x)
        if self.device_group is not None:
            with _naming_lost_ranks():
                if self._goes_by_first(x, self.device_group):
                    self._reduce_at_first(x, torch.sum, self.device_group)
                else:
                    dist.all_reduce(x, group=self.device_group)
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        if self.device_group is None:
            return x.unsqueeze(0)
        gathered = torch.empty((self.size, *x.shape), dtype=x.dtype, device=x.device)
        with _naming_lost_ranks():
            _all_gather(gathered.flatten(0, 1), x, group=self.device_group)
        return gathered

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        if self.device_group is None:
            return x[0]
        own = torch.empty(x.shape[1:], dtype=x.dtype, device=x.device)
        with _naming_lost_ranks():
            _reduce_scatter(own, x.flatten(0, 1), group=self.device_group)
        return own

    def broadcast_on_cpu(self, values: torch.Tensor) -> None:
        """Overwrite a CPU tensor with the one of the group's first rank."""
        if self.cpu_group is not None:
            with _naming_lost_ranks():
                dist.broadcast(values, self.ranks[0], group=self.cpu_group)

    def min_on_cpu(self, values: torch.Tensor) -> None:
        """Overwrite a CPU tensor with the element-wise MIN over the ranks."""
        if self.cpu_group is None:
            return
        with _naming_lost_ranks():
            if self._goes_by_first(values, self.cpu_group):
                self._reduce_at_first(values, torch.amin, self.cpu_group)
            else:
                dist.all_reduce(values, dist.ReduceOp.MIN, group=self.cpu_group)

    def _goes_by_first(self, values: torch.Tensor, group: dist.ProcessGroup) -> bool:
        """True if `_reduce_at_first` is faster than gloo's own algorithm, which waits for a
        neighbour 2 * (size - 1) times and uses the links well only for long tensors.
        benchmark/results/2026-11-22-ballot.md has the measurements."""
        is_short = self.size > 2 and values.nbytes <= _SHORT_BYTES
        return is_short and dist.get_backend(group) == dist.Backend.GLOO

    def _reduce_at_first(
        self, values: torch.Tensor, reduce: Callable[..., torch.Tensor], group: dist.ProcessGroup
    ) -> None:
        """Overwrite `values` on all ranks: the first rank gathers, reduces and broadcasts them.

        Args:
            values: A contiguous tensor.
            reduce: A function that reduces a tensor over one dimension, like `torch.sum`.
        """
        rows = None
        if self.rank == 0:
            table = values.new_empty((self.size, *values.shape))
            rows = list(table.unbind())
        dist.gather(values, rows, self.ranks[0], group=group)
        if rows is not None:
            reduce(table, 0, out=values)
        dist.broadcast(values, self.ranks[0], group=group)


@dataclass(slots=True)
class _Groups:
    world: GroupCoordinator
    dp_group: GroupCoordinator
    attention_tp: GroupCoordinator
    attention_cp: GroupCoordinator
    across_dp: GroupCoordinator


_groups: _Groups | None = None
_rendezvous_host = "127.0.0.1"
"""Host of the rendezvous. The groups listen on the interface towards it."""


def init_distributed_environment(backend: str, rendezvous: Rendezvous | None = None) -> None:
    """Join the world of this server's ranks, unless this process has joined one already.

    A single rank needs no port, because its store is in its own memory. On one machine gloo and
    NCCL listen on loopback. The process leaves the world when it ends, because NCCL warns
    otherwise. Call this in one thread, before the device's libraries need a rank.

    Args:
        backend: `DeviceKind.process_group`, or another that torch knows.
        rendezvous: Rendezvous of the ranks; None: this is the only rank.

    Raises:
        RuntimeError, ValueError: torch has no such backend, or a rank does not join in time; with
            torch's message.
    """
    if dist.is_initialized():
        return
    global _rendezvous_host
    rank, size = 0, 1
    if rendezvous is not None:
        rank, size, _rendezvous_host = rendezvous.rank, rendezvous.size, rendezvous.host
    _steer_nccl_towards(_rendezvous_host)
    with _gloo_listening_towards(_rendezvous_host):
        dist.init_process_group(
            backend,
            store=make_store(rendezvous),
            rank=rank,
            world_size=size,
            timeout=_NEVER,
        )
    atexit.register(_leave, dist.group.WORLD)


def make_store(rendezvous: Rendezvous | None) -> Any:
    """The store through which ranks find each other. Rank 0's first call creates it; every other
    call makes a new connection to it."""
    if rendezvous is None:
        return dist.HashStore()  # type: ignore[attr-defined]  # public, and not in torch's stubs
    arguments: dict[str, Any] = {"is_master": False}
    if rendezvous.listener is not None and rendezvous.listener.fileno() >= 0:
        arguments = {"is_master": True, "master_listen_fd": rendezvous.listener.detach()}
    return dist.TCPStore(  # type: ignore[attr-defined]  # likewise
        rendezvous.host,
        rendezvous.port,
        wait_for_workers=False,
        timeout=JOIN_TIMEOUT,
        **arguments,
    )


def initialize_model_parallel(
    tensor_model_parallel_size: int, attn_cp_size: int = 1, attn_dp_size: int = 1
) -> None:
    """Divide the world into groups. All ranks call this once. Raises ValueError if the world has
    another size, or the sizes do not divide each other."""
    global _groups
    world = dist.get_world_size()
    if world != tensor_model_parallel_size:
        raise ValueError(f"tp_size={tensor_model_parallel_size}, but the world has {world} ranks")
    if world % (attn_cp_size * attn_dp_size):
        sizes = f"attn_cp_size={attn_cp_size}"
        if attn_dp_size > 1:
            sizes += f" times attn_dp_size={attn_dp_size}"
        raise ValueError(f"{sizes} does not divide tp_size={world}")
    each = world // attn_dp_size
    attn_tp_size = each // attn_cp_size
    dp_groups = [list(range(first, first + each)) for first in range(0, world, each)]
    sets = [list(range(first, first + attn_tp_size)) for first in range(0, world, attn_tp_size)]
    across = [ranks[first::attn_tp_size] for ranks in dp_groups for first in range(attn_tp_size)]
    across_dp = [list(range(first, world, each)) for first in range(each)]
    with _gloo_listening_towards(_rendezvous_host):
        whole = _make_group([list(range(world))])
        own = whole if attn_dp_size == 1 else _make_group(dp_groups)
        _groups = _Groups(
            whole,
            own,
            own if attn_cp_size == 1 else _make_group(sets),
            own if attn_tp_size == 1 else _make_group(across),
            whole if each == 1 else _make_group(across_dp),
        )


def create_custom_parallel_group(
    group_ranks: list[int], backend: str = "gloo"
) -> dist.ProcessGroup | None:
    """Make a group of ranks that each rank chooses itself; None: it has no other ranks. All ranks
    of the world call this.

    Args:
        group_ranks: The ranks of this rank's group, including itself, in any order; the same on
            each of them.

    Raises:
        ValueError: This rank is not in its own group, or the ranks' groups are no partition.
    """
    world, rank = dist.get_world_size(), dist.get_rank()
    mine = torch.full((world,), world, dtype=torch.int64)
    mine[: len(set(group_ranks))] = torch.tensor(sorted(set(group_ranks)))
    rows = [torch.empty_like(mine) for _ in range(world)]
    dist.all_gather(rows, mine, group=_known().world.cpu_group)
    lists = [tuple(place for place in row.tolist() if place < world) for row in rows]
    for owner, named in enumerate(lists):
        if owner not in named or any(lists[other] != named for other in named):
            raise ValueError(
                f"the groups of the ranks are no partition: rank {owner} names {list(named)} of "
                f"{[list(one) for one in lists]}"
            )
    mine_made = None
    with _gloo_listening_towards(_rendezvous_host):
        for named in sorted(set(lists)):
            if len(named) > 1:
                made = dist.new_group(list(named), backend=backend, timeout=_NEVER)
                mine_made = made if rank in named else mine_made
    return mine_made


def destroy_custom_parallel_group(group: dist.ProcessGroup | None) -> None:
    """End a group of `create_custom_parallel_group`. No collective. Ignores None."""
    if group is not None and dist.is_initialized():
        dist.destroy_process_group(group)


def get_world_group() -> GroupCoordinator:
    """All ranks of the server."""
    return _known().world


def get_dp_group() -> GroupCoordinator:
    """The ranks that have the same ticks and equal trees: this rank's DP group, which is the world
    if there is only one."""
    return _known().dp_group


def get_attention_tp_group() -> GroupCoordinator:
    """The ranks that split the heads of attention with this one."""
    return _known().attention_tp


def get_attention_cp_group() -> GroupCoordinator:
    """The ranks that have the same heads as this one."""
    return _known().attention_cp


def get_across_dp_group() -> GroupCoordinator:
    """The ranks at this one's place in each of the DP groups."""
    return _known().across_dp


def _known() -> _Groups:
    if _groups is None:
        raise RuntimeError(
            "this process has no groups of ranks yet: call initialize_model_parallel first "
            "(ModelRunner.init_torch_distributed does)"
        )
    return _groups


def _make_group(partition: list[list[int]]) -> GroupCoordinator:
    """Make this rank's group of a partition of the world, and its second group over gloo. All ranks
    make all groups in the same order, which torch requires."""
    rank, mine = dist.get_rank(), []
    for ranks in partition:
        device_group = cpu_group = None
        if len(ranks) > 1:
            device_group = dist.new_group(ranks, backend=dist.get_backend(), timeout=_NEVER)
            cpu_group = dist.new_group(ranks, backend="gloo", timeout=_NEVER)
        if rank in ranks:
            mine.append(GroupCoordinator(ranks, rank, device_group, cpu_group))
    (own,) = mine
    return own


@contextmanager
def _naming_lost_ranks() -> Iterator[None]:
    """Context that turns transport errors into `RankLost`, but not this rank's own errors, such as
    a shortage of memory."""
    try:
        yield
    except RuntimeError as error:
        text = str(error)
        if not isinstance(error, _TRANSPORT_ERRORS) and _GLOO_TRANSPORT not in text:
            raise
        raise RankLost(f"another rank is gone: {_cause_in(text)}") from error


def _cause_in(text: str) -> str:
    """The description in a transport's error message, without gloo's source line and advice."""
    line = text.strip().partition("\n")[0]
    return _GLOO_SOURCE.sub("", line).partition(" This is typically")[0].rstrip(".")


def _gloo_listening_towards(host: str) -> AbstractContextManager[None]:
    """Context in which gloo listens on the interface towards `host`. Gloo's default is the address
    of the hostname, which other machines can reach."""
    interface = envs.GLOO_SOCKET_IFNAME
    return nullcontext() if interface.is_set() else interface.override(_interface_towards(host))


def _steer_nccl_towards(host: str) -> None:
    """Make NCCL's sockets listen on the interface towards `host`, unless the user has chosen one.
    Other machines can reach its default interface.

    The variable stays set, because NCCL reads it when the process makes its first communicator,
    which can be long after the group.
    """
    if not envs.NCCL_SOCKET_IFNAME.is_set():
        envs.NCCL_SOCKET_IFNAME.set(f"={_interface_towards(host)}")  # NCCL takes "lo" for a prefix.


def _interface_towards(host: str) -> str:
    return "lo" if is_loopback(host) else interface_towards(host)


def _leave(world: dist.ProcessGroup | None) -> None:
    """Leave `world`, if it is still the world of this process."""
    if dist.is_initialized() and dist.group.WORLD is world:
        dist.destroy_process_group()
