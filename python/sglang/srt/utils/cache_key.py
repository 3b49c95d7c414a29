"""One string for everything beside its tokens that separates a request's cached prefix."""

from __future__ import annotations


def combine_extra_key(extra_key: str | None, cache_salt: str | None) -> str | None:
    """`extra_key` and `cache_salt` as one key; equal results mean equal inputs.

    Each part that is given is written as tag, length and text, so that no crafted value of one
    part can look like the other, and an empty text differs from an absent one.

    Returns:
        None where neither is given: such requests share the plain namespace.
    """
    parts = [
        f"{tag}{len(text)}:{text}"
        for tag, text in (("e", extra_key), ("s", cache_salt))
        if text is not None
    ]
    return "".join(parts) or None
