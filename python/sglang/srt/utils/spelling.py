"""Suggestions for misspelt names.

A suggestion must not lead to another feature: `--dcp-size` is no misspelt `--dp-size`. A suggested
name has the same words; at most one of them has one typing error.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

_SHORTEST_WORD: Final = 4
"""Letters of the longer of two words that one typing error makes: shorter ones (`tp` and `dp`,
`lru` and `lfu`) are different words."""
_WORD: Final = re.compile(r"[a-z0-9]+")


def near_misspelling(name: object, known: Iterable[str]) -> str | None:
    """The known name that `name` misspells; None: there is none."""
    words = _words(str(name))
    return next((one for one in known if words and _is_near(words, _words(one))), None)


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """The end of a message: `; did you mean page_first?` for a misspelt known name, else empty."""
    near = near_misspelling(name, known)
    return f"; did you mean {near}?" if near is not None else ""


def _words(name: str) -> list[str]:
    return _WORD.findall(name.lower())


def _is_near(words: list[str], others: list[str]) -> bool:
    if "".join(words) == "".join(others):
        return True
    pairs = [(a, b) for a, b in zip(words, others, strict=False) if a != b]
    return len(words) == len(others) and len(pairs) == 1 and _is_typing_error(*pairs[0])


def _is_typing_error(word: str, other: str) -> bool:
    """True if one letter is missing, one too many, another one, or swapped with the next."""
    if abs(len(word) - len(other)) > 1:
        return False  # The rest takes long for the words of strangers.
    digits = re.sub(r"\D", "", word), re.sub(r"\D", "", other)
    if max(len(word), len(other)) < _SHORTEST_WORD or digits[0] != digits[1]:
        return False
    while word and other and word[0] == other[0]:
        word, other = word[1:], other[1:]
    while word and other and word[-1] == other[-1]:
        word, other = word[:-1], other[:-1]
    is_swap = len(word) == len(other) == 2 and word == other[::-1]
    return is_swap or max(len(word), len(other)) == 1
