"""Git LFS: the few lines that stand in a checkout for a large file that was not fetched."""

from __future__ import annotations

from pathlib import Path
from typing import Final

_FIRST_LINE: Final = b"version https://git-lfs.github.com/spec/"


def refuse_lfs_pointer(file: Path) -> None:
    """Refuse `file` if it is a pointer; a file that cannot be read is left to who reads it.

    Raises:
        ValueError: Names the file and the remedy.
    """
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
