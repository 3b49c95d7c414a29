"""Shares of a resource that strangers use side by side."""

from __future__ import annotations

from typing import Final

_SHARE: Final = 4


def is_within_share(own: int, need: int, free: int) -> bool:
    """True if one user of a resource may take more of it. A user may hold at most `_SHARE` times
    what stays free: one alone gets at most four fifths, two get four ninths each, and any number of
    users leaves some to others.

    Args:
        own: Units that the user holds.
        need: Units that it wants to take.
        free: Units that are free now.

    Source: Choudhury and Hahne, "Dynamic queue length thresholds for shared-memory packet
    switches", IEEE/ACM Transactions on Networking 6 (1998).
    """
    return own + need <= _SHARE * (free - need)
