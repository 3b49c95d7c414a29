"""Hints at what a misspelt name may have been meant to be."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Final

_LEAST_RATIO: Final = 0.75
"""`tpu` is not meant to be `npu` (0.67); `lru` is not `lfu`."""


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """`; did you mean page_first?` for the known name that is close, or nothing; ends a message."""
    close = difflib.get_close_matches(str(name).lower(), list(known), n=1, cutoff=_LEAST_RATIO)
    return f"; did you mean {close[0]}?" if close else ""
