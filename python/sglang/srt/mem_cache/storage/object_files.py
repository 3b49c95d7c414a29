"""The files of the `file` backend: where they lie, and how they are read, written and removed.

Several threads and processes may use one root at once. A rename makes a file appear whole or not
at all.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import re
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
_NOTES: Final = ".notes"
_NAMESPACE: Final = re.compile("[0-9a-f]{32}")
"""`CacheNamespace.digest`."""
_SPREAD: Final = re.compile("[0-9a-f]{2}")
_OBJECT: Final = re.compile("(?:[A-Za-z0-9_-]|%[0-9A-F]{2})+|%|~[0-9a-f]{64}")
"""Names that `escape` returns."""
_RENAMES: Final = 5
"""Attempts to move a file into a folder that others may remove because it is empty."""


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

    def path(self, namespace: str, rest: str) -> Path:
        """The file of an object. Objects are spread over 256 folders."""
        spread = hashlib.sha256(rest.encode("utf-8", "surrogatepass")).hexdigest()[:2]
        return self.root / escape(namespace) / spread / escape(rest)

    def note(self, namespace: str, name: str) -> Path:
        """The file of a note, which is no object."""
        return self.root / _NOTES / escape(f"{namespace}-{name}")

    def read(self, path: Path, buffers: Sequence[memoryview]) -> int:
        """Fill `buffers`, in order, with the whole file. Returns its time of modification in ns.

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
            return status.st_mtime_ns
        finally:
            os.close(fd)

    def write(self, path: Path, buffers: Sequence[memoryview], mtime_ns: int | None = None) -> None:
        """Write `buffers` to the file, whole or not at all. Raises OSError.

        Args:
            mtime_ns: The file's time of modification; None: now.
        """
        name = f"{os.getpid()}-{next(self._sequence)}-{os.urandom(8).hex()}"
        temporary = self._temporary / name
        try:
            fd = self._create(temporary)
            try:
                pending = list(buffers)
                while pending:
                    _consume(pending, os.writev(fd, pending))
                if mtime_ns is not None:
                    with contextlib.suppress(OSError):
                        os.utime(fd, ns=(mtime_ns, mtime_ns))
            finally:
                os.close(fd)
            self._move_into_place(temporary, path)
        except OSError:
            self.remove(temporary)
            raise

    def _move_into_place(self, temporary: Path, path: Path) -> None:
        """Rename a file, and make its folder if needed, which others may remove at any time."""
        for rest in reversed(range(_RENAMES)):
            try:
                os.rename(temporary, path)
                return
            except FileNotFoundError:
                if not rest:
                    raise
            # `mkdir` fails so if a folder above goes meanwhile.
            with contextlib.suppress(FileNotFoundError):
                path.parent.mkdir(parents=True, exist_ok=True)

    def renew(self, path: Path, mtime_ns: int) -> None:
        """Set the time of modification, as far as that is possible."""
        with contextlib.suppress(OSError):
            os.utime(path, ns=(mtime_ns, mtime_ns), follow_symlinks=False)

    def modified(self, path: Path) -> int | None:
        """Time of modification in ns; None: no regular file, or an error."""
        try:
            status = os.lstat(path)
        except OSError:
            return None
        return status.st_mtime_ns if stat.S_ISREG(status.st_mode) else None

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
        folder = self.root / escape(namespace)
        for entry in list(_scan(folder)):
            for file in list(_scan(Path(entry.path))):
                removed += self.remove(Path(file.path))
            self.remove_empty(Path(entry.path))
        self.remove_empty(folder)
        return removed

    def remove_empty(self, folder: Path) -> None:
        """Remove a folder if it is empty."""
        with contextlib.suppress(OSError):
            folder.rmdir()

    def folders(self, namespace: str) -> Iterator[Path]:
        """The folders with objects of engines, and those of `namespace`.

        Others may add and remove folders meanwhile. Links are not followed, and other folders in
        the root do not count.
        """
        own = escape(namespace)
        for entry in list(_scan(self.root)):
            if (entry.name == own or _NAMESPACE.fullmatch(entry.name)) and _is_folder(entry):
                for spread in list(_scan(Path(entry.path))):
                    if _SPREAD.fullmatch(spread.name) and _is_folder(spread):
                        yield Path(spread.path)

    def objects(self, folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
        """The objects in one of `folders`, as they are when they are yielded."""
        for entry in list(_scan(folder)):
            if not _OBJECT.fullmatch(entry.name):
                continue
            try:
                status = entry.stat(follow_symlinks=False)
            except OSError:
                continue
            if stat.S_ISREG(status.st_mode):
                yield Path(entry.path), status

    def namespaces(self) -> set[str]:
        """Namespaces of engines that have files."""
        return {entry.name for entry in _scan(self.root) if _NAMESPACE.fullmatch(entry.name)}

    def remove_stale_temporaries(self) -> int:
        """Remove temporary files and notes that dead writers left at least an hour ago."""
        oldest = time.time() - _STALE_SECONDS  # noqa: TID251 (the clock of file times)
        removed = 0
        for entry in [*_scan(self._temporary), *_scan(self.root / _NOTES)]:
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


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir(follow_symlinks=False)
    except OSError:
        return False
