"""The files of a checkpoint as they were when they were loaded, and the identity of their weights.

The identity is often asked for long after loading, and by then the files may hold other weights. So
names, sizes, times and inodes are noted before the files are read, which costs no reading.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TypeAlias

from sglang.srt.model_loader.weight_files import weight_files
from sglang.srt.model_loader.weights_identity import config_file, weights_identity

_Signature: TypeAlias = tuple[int, int, int]
"""Size, modification time in nanoseconds, inode."""


class LoadedFiles:
    """config.json and the weight files of a checkpoint. Made before the weights are read.

    Attributes:
        weights: The weight files, sorted by name.
    """

    def __init__(self, model_path: str, load_format: str) -> None:
        """Raises ValueError: see `weight_files`; or there is no config.json."""
        self._path = model_path
        self._format = load_format
        config = config_file(model_path)
        self.weights = weight_files(Path(model_path), load_format)
        self._noted = _signatures([config, *self.weights])
        self._identity: str | None = None

    def identity(self) -> str:
        """Identity of the weights that were loaded. The first call reads all files, unless their
        digests are known; what it returned stays valid whatever becomes of the files.

        Raises:
            ValueError: A file is not the one that was loaded; names it and the remedy.
        """
        if self._identity is None:
            self._check_unchanged()
            identity = weights_identity(self._path, load_format=self._format)
            self._check_unchanged()  # A file may have changed while it was hashed.
            self._identity = identity
        return self._identity

    def _check_unchanged(self) -> None:
        changes = self._changes()
        if changes:
            more = f" (and {len(changes) - 1} more)" if len(changes) > 1 else ""
            raise ValueError(
                f"{self._path}: {changes[0]}{more} since the weights were loaded, so that the "
                "files no longer tell what is in memory: restart this server"
            )

    def _changes(self) -> list[str]:
        present = _signatures(self._noted)
        changes = [
            f"{file.name} {'has changed' if file in present else 'is gone'}"
            for file, noted in self._noted.items()
            if present.get(file) != noted
        ]
        if changes:
            return changes
        try:
            listed = weight_files(Path(self._path), self._format)
        except ValueError:
            listed = []  # An index is damaged, or names what is missing.
        changes = [f"{file.name} was added" for file in listed if file not in self._noted]
        return changes or ([] if listed == self.weights else ["the index has changed"])


def _signatures(files: Iterable[Path]) -> dict[Path, _Signature]:
    """Signatures of the files that are there. Links are followed."""
    found = {}
    for file in files:
        try:
            stat = file.stat()
        except OSError:
            continue
        found[file] = (stat.st_size, stat.st_mtime_ns, stat.st_ino)
    return found
