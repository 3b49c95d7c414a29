"""Objects as files: names that cannot leave the root, atomic writes, scattered reads.

Several threads and processes may use one root at once. A rename makes a file appear whole or not
at all. The object's trailer detects files that a power failure tore.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import stat
import string
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

_PLAIN: Final = frozenset(string.ascii_letters + string.digits + "-_")
_MAX_NAME: Final = 200
"""Bytes of a file name; file systems take 255."""
_STALE_SECONDS: Final = 3600.0
_TEMPORARY: Final = ".tmp"


class MalformedObject(Exception):
    """A file is not an object of the expected size: truncated, foreign or not a regular file."""


def escape(part: str) -> str:
    """A file name for any text: injective, without separators, never empty, hidden, `.` or `..`."""
    raw = part.encode("utf-8", "surrogatepass")
    name = "".join(chr(b) if chr(b) in _PLAIN else f"%{b:02X}" for b in raw) or "%"
    if len(name) <= _MAX_NAME:
        return name
    # No escaped name contains `~`, so a long name never equals a short one.
    return "~" + hashlib.sha256(raw).hexdigest()


class ObjectFiles:
    """The files of one root: `root/<namespace>/<2 hex digits>/<rest of the key>`."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        """Create the root. Raises OSError if that fails and there is no directory to read."""
        self.root = Path(root)
        self._sequence = itertools.count()
        self._temporary = self.root / _TEMPORARY
        self.root.mkdir(parents=True, exist_ok=True)

    def is_writable_by_others(self) -> bool:
        """True if the root belongs to another user than root, or is writable by all.

        This matters because a checksum detects damage, but not a foreign writer.
        """
        status = self.root.stat()
        return status.st_uid not in (os.geteuid(), 0) or bool(status.st_mode & stat.S_IWOTH)

    def folder(self, namespace: str) -> Path:
        """The folder of a namespace."""
        return self.root / escape(namespace)

    def path(self, namespace: str, rest: str) -> Path:
        """The file of an object. Objects are spread over 256 folders."""
        spread = hashlib.sha256(rest.encode("utf-8", "surrogatepass")).hexdigest()[:2]
        return self.folder(namespace) / spread / escape(rest)

    def exists(self, path: Path) -> bool:
        """True if `path` is a regular file. Any error counts as absent."""
        try:
            return stat.S_ISREG(os.lstat(path).st_mode)
        except OSError:
            return False

    def read(self, path: Path, buffers: Sequence[memoryview]) -> None:
        """Fill `buffers`, in order, with the whole file.

        Raises:
            FileNotFoundError: There is no such file.
            MalformedObject: It is not a regular file of exactly this size.
            OSError: It cannot be read.
        """
        # Foreign symbolic links are not followed, and foreign pipes do not block.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            status = os.fstat(fd)
            size = sum(len(buffer) for buffer in buffers)
            if not stat.S_ISREG(status.st_mode) or status.st_size != size:
                raise MalformedObject(f"{path}: {status.st_size} bytes, expected {size}")
            offset = 0
            pending = list(buffers)
            while pending:
                done = os.preadv(fd, pending, offset)
                if not done:
                    raise MalformedObject(f"{path}: ended after {offset} of {size} bytes")
                offset += done
                _consume(pending, done)
        finally:
            os.close(fd)

    def write(self, path: Path, buffers: Sequence[memoryview]) -> None:
        """Write `buffers` to the file, whole or not at all. Raises OSError."""
        name = f"{os.getpid()}-{next(self._sequence)}-{os.urandom(8).hex()}"
        temporary = self._temporary / name
        try:
            fd = self._create(temporary)
            try:
                pending = list(buffers)
                while pending:
                    _consume(pending, os.writev(fd, pending))
            finally:
                os.close(fd)
            try:
                os.rename(temporary, path)
            except FileNotFoundError:
                path.parent.mkdir(parents=True, exist_ok=True)
                os.rename(temporary, path)
        except OSError:
            self.remove(temporary)
            raise

    def remove(self, path: Path) -> bool:
        """Remove a file. False if it is missing or cannot be removed."""
        try:
            os.unlink(path)
        except OSError:
            return False
        return True

    def clear(self, namespace: str) -> int:
        """Remove a namespace's files and its empty folders. Returns the number of files."""
        removed = 0
        folder = self.folder(namespace)
        for entry in list(_scan(folder)):
            for file in list(_scan(Path(entry.path))):
                removed += self.remove(Path(file.path))
            _remove_empty(Path(entry.path))
        _remove_empty(folder)
        return removed

    def remove_stale_temporaries(self) -> int:
        """Remove temporary files that dead writers left at least an hour ago."""
        oldest = time.time() - _STALE_SECONDS  # noqa: TID251 (the clock of file times)
        removed = 0
        for entry in list(_scan(self._temporary)):
            try:
                is_stale = entry.stat(follow_symlinks=False).st_mtime < oldest
            except OSError:
                continue
            removed += is_stale and self.remove(Path(entry.path))
        return removed

    def _create(self, temporary: Path) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            return os.open(temporary, flags, 0o600)
        except FileNotFoundError:
            self._temporary.mkdir(parents=True, exist_ok=True)
            return os.open(temporary, flags, 0o600)


def _consume(pending: list[memoryview], done: int) -> None:
    """Drop the first `done` bytes of the buffers in place."""
    while pending and done >= len(pending[0]):
        done -= len(pending.pop(0))
    if done:
        pending[0] = pending[0][done:]


def _scan(folder: Path) -> Iterator[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            yield from entries
    except OSError:
        return


def _remove_empty(folder: Path) -> None:
    try:
        folder.rmdir()
    except OSError:
        return
