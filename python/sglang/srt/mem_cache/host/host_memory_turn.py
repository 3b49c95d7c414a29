"""Turns of servers that take host memory for L2.

A server may size L2 by the host's free memory. It measures the free memory, and takes its share
seconds later. Two servers that measure at the same time would take the same memory. Therefore such
a server waits until no other server takes memory, and all others wait for it. Servers with a fixed
size of L2 take memory at the same time as each other.

The turn is a `flock` on a file of the user in the temporary directory: the kernel ends it with the
process. It does not reach servers of other users, or in containers with other temporary files.
"""

from __future__ import annotations

import fcntl
import logging
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

logger = logging.getLogger(__name__)

_LONGEST_WAIT_S: Final = 600.0
"""Taking a terabyte needs minutes."""
_POLL_S: Final = 0.1


def lock_path() -> Path:
    """The file of this user's servers."""
    return Path(tempfile.gettempdir()) / f"sglang-host-memory-{os.getuid()}.lock"


@contextmanager
def host_memory_turn(*, alone: bool, wait_s: float = _LONGEST_WAIT_S) -> Iterator[None]:
    """Context manager that holds this server's turn. Take memory inside the block.

    If the lock cannot be taken, a warning is logged, and the block runs without it.

    Args:
        alone: True if no other server may take memory meanwhile.
        wait_s: Most seconds to wait for the others.
    """
    descriptor = None
    try:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(lock_path(), flags, 0o600)
        if not _lock(descriptor, fcntl.LOCK_EX if alone else fcntl.LOCK_SH, wait_s):
            logger.warning(
                "another server has held %s for %.0f s: L2 is sized beside it, and the two may "
                "take more than the host has", lock_path(), wait_s,
            )  # fmt: skip
    except OSError as error:
        logger.warning(
            "cannot lock %s (%s): servers that start together may size L2 by the same memory",
            lock_path(), error.strerror,
        )  # fmt: skip
    try:
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _lock(descriptor: int, mode: int, wait_s: float) -> bool:
    """True once the lock is held; False if that takes longer than `wait_s`."""
    end = time.monotonic() + wait_s
    is_told = False
    while True:
        try:
            fcntl.flock(descriptor, mode | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= end:
                return False
            if not is_told:
                logger.info("waiting for another server of this machine that takes host memory")
                is_told = True
            time.sleep(_POLL_S)
        else:
            return True
