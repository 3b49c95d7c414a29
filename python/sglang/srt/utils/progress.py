"""Progress of long work: a bar on a terminal, a line from time to time elsewhere."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from typing import Any, Final

from tqdm import tqdm

LINE_S: Final = 10.0
"""Seconds to the first line, and between two lines."""


class _Lines(io.TextIOBase):
    """A file for `tqdm`. Each redrawing of the bar becomes a line."""

    def __init__(self, log: Callable[[str], object]) -> None:
        self._log = log

    def write(self, text: str) -> int:
        line = text.strip()
        if line:
            self._log(line)
        return len(text)


def progress_bar(
    log: Callable[[str], object],
    *,
    desc: str,
    total: int | None = None,
    disable: bool = False,
    **options: Any,
) -> tqdm[Any]:
    """A `tqdm` that redraws itself on a terminal. Elsewhere, as redrawings would make one endless
    line, it logs a line every `LINE_S` seconds, and none if it ends before the first is due.

    Args:
        log: Gets these lines, e.g. `logger.info`.
        total: Units of all; None: not known yet, set the attribute.
        options: Units, as `tqdm` has them.
    """
    if not sys.stderr.isatty():
        options |= {"file": _Lines(log), "mininterval": LINE_S, "delay": LINE_S, "ncols": 0}
    return tqdm(desc=desc, total=total, disable=disable, **options)
