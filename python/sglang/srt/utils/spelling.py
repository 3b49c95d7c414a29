"""Suggestions for misspelt names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Final

_LEAST_RATIO: Final = 0.75
"""Excludes `npu` for `tpu`, and `lfu` for `lru` (both 0.67)."""


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """The end of a message: `; did you mean page_first?` for a similar known name, else empty."""
    by_lower = {one.lower(): one for one in known}
    close = difflib.get_close_matches(str(name).lower(), by_lower, n=1, cutoff=_LEAST_RATIO)
    return f"; did you mean {by_lower[close[0]]}?" if close else ""
