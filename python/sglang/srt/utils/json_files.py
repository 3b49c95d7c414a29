"""Reads JSON files of a checkpoint, which strangers write, and refuses pointers of Git LFS: small
files that replace large ones in a checkout until they are fetched."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

_FIRST_LINE: Final = b"version https://git-lfs.github.com/spec/"
_MAX_LEVELS: Final = 32
"""Most levels of objects and lists in a JSON file. Libraries copy and print them recursively."""
_MAX_INTEGER: Final = (1 << 63) - 1
"""Greatest integer of a JSON file. Libraries fail in many ways at greater ones."""


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


def read_json(path: Path) -> dict[str, Any] | None:
    """The JSON object in the file `path`; None if there is no such file.

    Raises:
        ValueError: The file cannot be read or is not a JSON object.
    """
    refuse_lfs_pointer(path)
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read as JSON ({error}): copy it again") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object: copy it again")
    if _is_deeper(value, _MAX_LEVELS):
        raise ValueError(
            f"{path} has objects or lists in more than {_MAX_LEVELS} levels: copy it again"
        )
    greatest = next((name for name, one in _leaves("", value) if _is_too_great(one)), None)
    if greatest is not None:
        raise ValueError(f"{path}: {greatest} is above {_MAX_INTEGER}: copy it again")
    return value


def _is_too_great(value: object) -> bool:
    return isinstance(value, int) and abs(value) > _MAX_INTEGER


def _leaves(name: str, value: object) -> Iterator[tuple[str, object]]:
    """All values inside of objects and lists; `a.b` is `b` in the object `a`, and `a.1` the second
    item of the list `a`."""
    if isinstance(value, dict):
        items: Iterable[tuple[object, object]] = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    else:
        yield name, value
        return
    for key, one in items:
        yield from _leaves(f"{name}.{key}" if name else str(key), one)


def _is_deeper(value: object, levels: int) -> bool:
    """True if objects and lists are nested in more than this many levels."""
    if not isinstance(value, dict | list):
        return False
    inner = value.values() if isinstance(value, dict) else value
    return levels == 0 or any(_is_deeper(one, levels - 1) for one in inner)
