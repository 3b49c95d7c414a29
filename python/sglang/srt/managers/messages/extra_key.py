"""The key that separates prefixes: `extra_key` and `cache_salt` of a request in one string."""

from __future__ import annotations

import re
from typing import Final


def combine_extra_key(extra_key: str | None, cache_salt: str | None) -> str | None:
    """Combine `extra_key` and `cache_salt` into one key; None: neither is given, and prefixes are
    shared.

    Equal keys mean equal inputs: the key has the tag, length and text of each given part. A crafted
    value of one part cannot look like the other part, and an empty text differs from an absent one.
    """
    parts = [
        f"{tag}{len(text)}:{text}"
        for tag, text in (("e", extra_key), ("s", cache_salt))
        if text is not None
    ]
    return "".join(parts) or None


_EXTRA_KEY: Final = re.compile(r"e(\d+):", re.ASCII)


def split_extra_key(combined: str | None) -> tuple[str | None, str]:
    """The `extra_key` in a key of `combine_extra_key`, and the part that `cache_salt` gave: its
    tag, length and text, or the empty text."""
    head = _EXTRA_KEY.match(combined or "")
    if head is None:
        return None, combined or ""
    end = head.end() + int(head[1])
    return (combined or "")[head.end() : end], (combined or "")[end:]


def tenant_of(combined: str | None) -> str | None:
    """Whose requests have a key of `combine_extra_key`: the part that `cache_salt` gave; without
    one, the whole key."""
    return split_extra_key(combined)[1] or combined
