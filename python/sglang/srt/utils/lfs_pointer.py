"""Git LFS pointers: small files that replace large ones in a checkout until they are fetched."""

from __future__ import annotations

from pathlib import Path
from typing import Final

_FIRST_LINE: Final = b"version https://git-lfs.github.com/spec/"


def refuse_lfs_pointer(file: Path) -> None:
    """Raise ValueError if `file` is a pointer; the message names it and the remedy. Ignores files
    that cannot be read."""
    try:
        with file.open("rb") as opened:
            start = opened.read(len(_FIRST_LINE))
    except OSError:
        return
    if start == _FIRST_LINE:
        raise ValueError(
            f"{file} is a git-lfs pointer, not the file itself: run `git lfs install` and "
            f"`git lfs pull` in {file.parent}"
        )
