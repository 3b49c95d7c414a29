"""`extra_key` and `cache_salt` of a request as one key of the prefix cache, and back."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

_PART: Final = re.compile(r"([es])(\d{1,9}):", re.ASCII)


class KeyParts(NamedTuple):
    """Parts of the key that a request gave. Missing parts are None."""

    extra_key: str | None = None
    cache_salt: str | None = None


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


def split_extra_key(combined: str | None) -> KeyParts | None:
    """The inputs of `combine_extra_key`; None: `combined` is not of its making."""
    rest = combined or ""
    parts: dict[str, str] = {}
    while rest:
        head = _PART.match(rest)
        if head is None:
            return None
        end = head.end() + int(head[2])
        parts[head[1]], rest = rest[head.end() : end], rest[end:]
    found = KeyParts(parts.get("e"), parts.get("s"))
    return found if combine_extra_key(*found) == combined else None


def tenant_of(combined: str | None) -> str | None:
    """Whose requests have a key of `combine_extra_key`: the part that `cache_salt` gave; without
    one, the whole key."""
    parts = split_extra_key(combined)
    if parts is None or parts.cache_salt is None:
        return combined
    return combine_extra_key(None, parts.cache_salt)
