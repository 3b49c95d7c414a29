"""One string for the fields of a request that separate its cached prefix from equal tokens."""

from __future__ import annotations


def combine_extra_key(extra_key: str | None, cache_salt: str | None) -> str | None:
    """Combine `extra_key` and `cache_salt` into one key. Equal keys mean equal inputs.

    The key has the tag, length and text of each given part. A crafted value of one part cannot look
    like the other part, and an empty text differs from an absent one.

    Returns:
        The key; None if neither part is given. Requests without a key share their prefixes.
    """
    parts = [
        f"{tag}{len(text)}:{text}"
        for tag, text in (("e", extra_key), ("s", cache_salt))
        if text is not None
    ]
    return "".join(parts) or None
