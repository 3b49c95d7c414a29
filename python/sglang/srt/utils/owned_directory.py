"""Temporary directories that belong to a live process; those of killed processes are removed.

The owner holds a `flock` on the directory. The kernel drops it when the process ends in any way, so
a free lock proves that the owner has ended. Names, process ids and ages prove nothing: another
program may use the name, ids are reused, and a server may run for a year.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
import tempfile
from typing import Final

_RANDOM: Final = r"\d+-[a-z0-9_]{8}"
"""Name after the prefix: the owner's process id, for human readers, and `mkdtemp`'s letters."""
_FLAGS: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_UNSUPPORTED: Final = (errno.EBADF, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)
"""Errors of `flock` on file systems that cannot lock a directory, such as NFS."""


class OwnedDirectory:
    """A fresh directory (mode 0700) of this process in the temporary directory.

    Any thread. A forked child also holds the lock while it lives; a spawned child does not.
    """

    def __init__(self, prefix: str) -> None:
        """Create the directory.

        Args:
            prefix: Start of the name, common to directories of one kind; see `remove_orphans`.

        Raises:
            OSError: The directory cannot be created, e.g. because the disk is full.
        """
        while True:
            self.path = tempfile.mkdtemp(prefix=f"{prefix}{os.getpid()}-")
            descriptor = _lock_new(self.path)
            if descriptor is not None:
                break
        self._locks = [descriptor]
        """The open descriptor that holds the lock; empty after `remove`."""

    def remove(self) -> None:
        """Remove the directory with its contents. Idempotent."""
        shutil.rmtree(self.path, ignore_errors=True)
        with contextlib.suppress(IndexError):
            os.close(self._locks.pop())


def remove_orphans(prefix: str) -> list[str]:
    """Remove this user's directories whose owner has ended; return their paths.

    Safe while other processes create or remove such directories, or call this function.
    """
    pattern = re.compile(re.escape(prefix) + _RANDOM)
    parent = tempfile.gettempdir()
    try:
        names = os.listdir(parent)
    except OSError:
        return []  # A process may create directories in a directory that it cannot list.
    paths = [f"{parent}/{name}" for name in names if pattern.fullmatch(name)]
    return [path for path in paths if _remove_orphan(path)]


def _lock_new(path: str) -> int | None:
    """Lock a new directory. Returns its descriptor, or None if another process removed it as an
    orphan first."""
    try:
        descriptor = os.open(path, _FLAGS)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    except OSError as error:
        # Without locks in the file system, other processes get none either, and orphans stay.
        if error.errno not in _UNSUPPORTED:
            os.close(descriptor)
            raise
    if os.path.exists(path):
        return descriptor
    os.close(descriptor)
    return None


def _remove_orphan(path: str) -> bool:
    """Remove `path` if it belongs to this user and its lock is free. Returns whether it did."""
    try:
        descriptor = os.open(path, _FLAGS)
    except OSError:
        return False
    try:
        if os.fstat(descriptor).st_uid != os.getuid():
            return False
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    else:
        shutil.rmtree(path, ignore_errors=True)
        return True
    finally:
        os.close(descriptor)
