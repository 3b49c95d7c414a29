"""The rank of this process in torch.distributed. No other module asks torch.distributed."""

from __future__ import annotations

import atexit
from contextlib import AbstractContextManager, nullcontext

import torch.distributed as dist

from sglang.srt.environ import envs


def init_distributed_environment(backend: str) -> None:
    """Make this process the only rank of a world, unless it is in one already.

    The store is in the process's own memory, so that there is no port to choose; gloo listens on
    loopback. Takes about 3 ms. The process leaves the world when it ends: NCCL warns otherwise.
    One thread, before the device's libraries need a rank.

    Args:
        backend: `DeviceKind.process_group`, or another that torch knows.

    Raises:
        RuntimeError, ValueError: torch has no such backend; torch's words.
    """
    if dist.is_initialized():
        return
    store = dist.HashStore()  # type: ignore[attr-defined]  # public, and not in torch's stubs
    with _on_loopback():
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
    atexit.register(_leave, dist.group.WORLD)


def _on_loopback() -> AbstractContextManager[None]:
    """Where gloo listens: it takes the address of the host's name otherwise, which others reach."""
    interface = envs.GLOO_SOCKET_IFNAME
    return nullcontext() if interface.is_set() else interface.override("lo")


def _leave(world: dist.ProcessGroup | None) -> None:
    """End `world`, if it is still the one of this process."""
    if dist.is_initialized() and dist.group.WORLD is world:
        dist.destroy_process_group()
