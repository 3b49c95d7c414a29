"""The key of a prefix: its tokens, and what separates it from equal tokens of others.

Tokens are kept as one numpy array of u32, so that comparing, slicing and hashing thousands of
them is a few library calls. Nothing here knows trees or pools; any thread may call it.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator, Sequence
from typing import Final, NewType, TypeAlias

import numpy as np
import numpy.typing as npt

PageHash = NewType("PageHash", str)
"""64 hex digits that name a page and, through the chain, everything before it."""

TokenArray: TypeAlias = npt.NDArray[np.uint32]
ChildKey: TypeAlias = tuple[str | None, bytes]
"""Key of a child in its parent: the extra key and the tokens of the first page."""

_TOKEN_BYTES: Final = 4
_SEED_DOMAIN = b"sglang-extra-key\0"
_NO_TOKENS: TokenArray = np.empty(0, dtype=np.uint32)


def token_array(token_ids: Sequence[int] | TokenArray) -> TokenArray:
    """The tokens as an array; one that is an array already is returned as it is.

    Raises:
        OverflowError: A token id does not fit 32 bits.
    """
    if isinstance(token_ids, np.ndarray):
        return token_ids
    # Measured 3.5 times as fast as numpy's own conversion of a list.
    return np.frombuffer(array("I", token_ids), dtype=np.uint32) if len(token_ids) else _NO_TOKENS


def page_hash(tokens: TokenArray, prior: PageHash | None) -> PageHash:
    """sha256(prior || tokens as u32 little-endian): one link of the chain."""
    digest = hashlib.sha256(bytes.fromhex(prior) if prior else b"")
    digest.update(np.ascontiguousarray(tokens, dtype="<u4").tobytes())
    return PageHash(digest.hexdigest())


def chain_seed(extra_key: str | None) -> PageHash | None:
    """Where a chain starts: empty without an extra key, else a digest of its tagged bytes.

    The seed is itself a sha256 of a tagged string, so that no choice of key or tokens makes two
    different (key, tokens) pairs start equal chains, short of a collision of sha256.
    """
    if extra_key is None:
        return None
    raw = extra_key.encode("utf-8", "surrogatepass")
    tagged = _SEED_DOMAIN + len(raw).to_bytes(8, "little") + raw
    return PageHash(hashlib.sha256(tagged).hexdigest())


class RadixKey:
    """Tokens of a prefix (immutable) with the extra key that separates it. Equal to itself alone.

    Args:
        token_ids: Token ids, each in [0, 2**32).
        extra_key: Prefixes with different extra keys share nothing.

    Raises:
        OverflowError: A token id does not fit 32 bits.
    """

    __slots__ = ("__weakref__", "extra_key", "ids")

    def __init__(self, token_ids: Sequence[int] | TokenArray, extra_key: str | None = None) -> None:
        self.ids: TokenArray = token_array(token_ids)
        self.extra_key = extra_key

    @property
    def token_ids(self) -> TokenArray:
        """The tokens; not to be written to."""
        return self.ids

    def __len__(self) -> int:
        return len(self.ids)

    def __iter__(self) -> Iterator[int]:
        return iter(self.ids.tolist())

    def __getitem__(self, part: slice) -> RadixKey:
        return RadixKey(self.ids[part], self.extra_key)

    def __repr__(self) -> str:
        return f"RadixKey({len(self)} tokens, extra_key={self.extra_key!r})"

    def page_aligned(self, page_size: int) -> RadixKey:
        """The longest front of whole pages."""
        return self[: len(self) // page_size * page_size]

    def match(self, other: RadixKey, page_size: int = 1, begin: int = 0) -> int:
        """Tokens of the common front with `other` from its token `begin` on, in whole pages."""
        if self.extra_key != other.extra_key:
            return 0
        theirs = other.ids[begin : begin + len(self.ids)]
        common = len(theirs)
        different = self.ids[:common] != theirs
        if common:
            # argmax finds the first True; without one it says 0, so ask the element.
            first = int(different.argmax())
            common = first if different[first] else common
        return common // page_size * page_size

    def child_key(self, page_size: int = 1, begin: int = 0) -> ChildKey:
        """The key under which a node starting with the tokens from `begin` on hangs on its
        parent."""
        return self.extra_key, self.ids[begin : begin + page_size].tobytes()

    def hash_page(self, start: int, end: int, prior_hash: PageHash | None = None) -> PageHash:
        """Hash of tokens `[start, end)`, chained to `prior_hash` (or the extra key's seed)."""
        return page_hash(self.ids[start:end], prior_hash or chain_seed(self.extra_key))

    def page_hashes(self, page_size: int, prior_hash: PageHash | None = None) -> list[PageHash]:
        """Hashes of every whole page, chained to `prior_hash` (or the extra key's seed)."""
        digest = bytes.fromhex(prior_hash or chain_seed(self.extra_key) or "")
        raw = self.ids.astype("<u4", copy=False).tobytes()
        size = page_size * _TOKEN_BYTES
        hashes: list[PageHash] = []
        for start in range(0, len(raw) - size + 1, size):
            digest = hashlib.sha256(digest + raw[start : start + size]).digest()
            hashes.append(PageHash(digest.hex()))
        return hashes
