"""The files of a checkpoint as they were loaded, and the identity of their weights.

The identity may be needed long after loading, when the files may contain other weights. So their
names, sizes, times and inodes are recorded before they are read.
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
    """config.json and the weight files of a checkpoint. Create it before reading the weights.

    Attributes:
        weights: The weight files, sorted by name.
    """

    def __init__(self, model_path: str, load_format: str) -> None:
        """Raises ValueError: from `weight_files`, or there is no config.json."""
        self._path = model_path
        self._format = load_format
        config = config_file(model_path)
        self.weights = weight_files(Path(model_path), load_format)
        self._noted = _signatures([config, *self.weights])
        self._identity: str | None = None

    def identity(self) -> str:
        """Identity of the loaded weights. The first call reads all files, unless their digests are
        cached. The result stays valid even if the files change later.

        Raises:
            ValueError: A file has changed since it was loaded; names the file and the remedy.
        """
        if self._identity is None:
            self._check_unchanged()
            identity = weights_identity(self._path, load_format=self._format)
            self._check_unchanged()  # a file may have changed while it was hashed
            self._identity = identity
        return self._identity

    def _check_unchanged(self) -> None:
        changes = self._changes()
        if changes:
            more = f" (and {len(changes) - 1} more)" if len(changes) > 1 else ""
            raise ValueError(
                f"{self._path}: {changes[0]}{more} since the weights were loaded, so the files no "
                "longer identify the weights in memory: restart this server"
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
            listed = []  # an index is damaged, or names a missing file
        changes = [f"{file.name} was added" for file in listed if file not in self._noted]
        return changes or ([] if listed == self.weights else ["the index has changed"])


def _signatures(files: Iterable[Path]) -> dict[Path, _Signature]:
    """Signatures of the files that exist. Links are followed."""
    found = {}
    for file in files:
        try:
            stat = file.stat()
        except OSError:
            continue
        found[file] = (stat.st_size, stat.st_mtime_ns, stat.st_ino)
    return found
