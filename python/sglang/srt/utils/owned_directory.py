"""Temporary directories that belong to a live process, and are removed after it if it was killed.

The owner holds a `flock` on the directory itself, which the kernel drops with the process, however
that ends. So a directory whose lock can be had has lost its owner. Names, process ids and ages say
nothing: a name may be anybody's, an id is used again, and a server may run for a year.
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
"""What follows the prefix: the owner's process id, for people who look, and `mkdtemp`'s letters."""
_FLAGS: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NO_LOCKS: Final = (errno.EBADF, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)
"""What `flock` of a directory says on file systems without it (NFS wants a file to write to)."""


class OwnedDirectory:
    """A fresh directory (mode 0700) of this process in the temporary directory.

    Any thread. A forked child that lives on holds the lock too; a spawned one does not.
    """

    def __init__(self, prefix: str) -> None:
        """Make it.

        Args:
            prefix: How its name begins; tells `remove_orphans` which are of the same kind.

        Raises:
            OSError: The temporary directory is full, read-only or the like.
        """
        while True:
            self.path = tempfile.mkdtemp(prefix=f"{prefix}{os.getpid()}-")
            descriptor = _lock_new(self.path)
            if descriptor is not None:
                break
        self._locks = [descriptor]
        """The open descriptor that holds the lock; empty once removed."""

    def remove(self) -> None:
        """Remove it with what is in it. Idempotent."""
        shutil.rmtree(self.path, ignore_errors=True)
        with contextlib.suppress(IndexError):
            os.close(self._locks.pop())


def remove_orphans(prefix: str) -> list[str]:
    """Remove this user's directories whose owner has ended without removing them; their paths.

    Safe beside owners that make or remove theirs, and beside others that do this.

    Args:
        prefix: As it was given to `OwnedDirectory`.
    """
    pattern = re.compile(re.escape(prefix) + _RANDOM)
    parent = tempfile.gettempdir()
    try:
        names = os.listdir(parent)
    except OSError:
        return []  # One may make directories in it all the same.
    paths = [f"{parent}/{name}" for name in names if pattern.fullmatch(name)]
    return [path for path in paths if _remove_orphan(path)]


def _lock_new(path: str) -> int | None:
    """Lock a directory just made; None if it was taken for an orphan before, and is gone."""
    try:
        descriptor = os.open(path, _FLAGS)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    except OSError as error:
        # Where the file system knows no locks nobody else gets one, and orphans stay.
        if error.errno not in _NO_LOCKS:
            os.close(descriptor)
            raise
    if os.path.exists(path):
        return descriptor
    os.close(descriptor)
    return None


def _remove_orphan(path: str) -> bool:
    """Remove `path` if it is this user's and nobody holds its lock; whether that was so."""
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
