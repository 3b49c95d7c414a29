"""Rendezvous of a server's ranks. Needs no torch."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """Address at which a server's ranks join, and the number of this rank."""

    rank: int
    size: int
    host: str
    port: int
    listener: socket.socket | None = field(default=None, repr=False)
    """Rank 0's socket, which listens at `host` and `port`, for the store to take over."""

    def for_rank(self, rank: int) -> Rendezvous:
        """The same rendezvous for another rank of this machine."""
        return replace(self, rank=rank, listener=self.listener if rank == 0 else None)


@contextmanager
def open_rendezvous(
    size: int, host: str = "127.0.0.1", port: int = 0, *, first_rank: int = 0
) -> Iterator[Rendezvous]:
    """Context with the rendezvous of the first rank of a machine. It closes the socket of this
    process at its end; processes that were given the socket have a copy.

    Args:
        port: Port to listen on; 0: a free one.
        first_rank: First rank of this machine; rank 0's machine listens.

    Raises:
        ValueError: This machine cannot listen at the address.
    """
    if first_rank:
        yield Rendezvous(rank=first_rank, size=size, host=host, port=port)
        return
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family)
    except OSError as error:
        # Python adds the address, which the message already has.
        why = str(error.strerror or error).partition(" (while")[0]
        raise ValueError(
            f"the ranks cannot meet at {host}:{port} ({why}): give an address of this machine and "
            "a free port with --dist-init-addr"
        ) from error
    with listener:
        bound = int(listener.getsockname()[1])
        yield Rendezvous(rank=0, size=size, host=host, port=bound, listener=listener)
