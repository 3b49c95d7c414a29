"""Checks the answers of a storage backend against its contract.

Answers decide which pages are good and which are written. An answer of a wrong type or length says
nothing about any page, so it is never cut, extended or converted: StorageUnavailable, which names
class and call, then counts as a failure of the store. Pure, any thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, NoReturn

import numpy as np
import torch

from sglang.srt.mem_cache.storage.types import CacheOutcome, PoolTransferResult, StorageUnavailable


def flag(backend: object, call: str, answer: object) -> bool:
    """Check a bool. Numbers are refused: for some libraries 1 means success, for others 0."""
    if not isinstance(answer, bool | np.bool_):
        _refuse(backend, call, f"{_describe(answer)} where True or False is due")
    return bool(answer)


def page_count(backend: object, call: str, answer: object, asked: int) -> int:
    """Check a number of leading pages, of the `asked` ones, that the store has."""
    if isinstance(answer, bool) or not isinstance(answer, int | np.integer):
        _refuse(backend, call, f"{_describe(answer)} where a number of pages is due")
    if not 0 <= answer <= asked:
        _refuse(backend, call, f"{answer} pages, having been asked about {asked}")
    return int(answer)


class PromptHit(NamedTuple):
    """Leading pages of a prompt that the store has: in all pools, and in the primary pool."""

    pages: int
    primary_pages: int


def prompt_hits(
    backend: object, call: str, answer: object, asked: Sequence[int]
) -> list[PromptHit]:
    """Check the numbers of leading pages that the store has of several prompts.

    Args:
        backend: The backend, for error messages.
        call: Name of its method.
        answer: One `PoolTransferResult` for each prompt.
        asked: Pages of each prompt.
    """
    results = _sequence(backend, call, answer, len(asked), "prompts")
    hits = []
    for result, pages in zip(results, asked, strict=True):
        if not isinstance(result, PoolTransferResult):
            _refuse(backend, call, f"{_describe(result)} where a PoolTransferResult is due")
        found = (result.kv_hit_pages, result.primary_pages)
        hits.append(PromptHit(*(page_count(backend, call, one, pages) for one in found)))
    return hits


def page_outcomes(
    backend: object, call: str, answer: object, asked: int, *, pool: str, otherwise: CacheOutcome
) -> list[CacheOutcome]:
    """Check the outcomes of the `asked` pages of `pool`; False becomes `otherwise`."""
    if not isinstance(answer, Mapping):
        _refuse(backend, call, f"{_describe(answer)} where results by pool are due")
    if pool not in answer:
        _refuse(backend, call, f"nothing about pool {str(pool)!r}")
    results = _sequence(backend, call, answer[pool], asked, "pages")
    return [
        result
        if isinstance(result, CacheOutcome)
        else CacheOutcome.LANDED
        if flag(backend, call, result)
        else otherwise
        for result in results
    ]


def values(backend: object, call: str, answer: object, asked: int) -> list[torch.Tensor | None]:
    """Check the values of the `asked` keys; None for a key without a value."""
    found: list[torch.Tensor | None] = []
    for value in _sequence(backend, call, answer, asked, "keys"):
        if not (value is None or isinstance(value, torch.Tensor)):
            _refuse(backend, call, f"{_describe(value)} where a tensor or None is due")
        found.append(value)
    return found


def _sequence(
    backend: object, call: str, answer: object, length: int, what: str
) -> Sequence[object]:
    if isinstance(answer, str | bytes) or not isinstance(answer, Sequence):
        _refuse(backend, call, f"{_describe(answer)} where a list is due")
    if len(answer) != length:
        _refuse(backend, call, f"{len(answer)} results for {length} {what}")
    return answer


def _describe(answer: object) -> str:
    """A short description, because the answer may be a page."""
    scalar = answer is None or isinstance(answer, bool | int | float)
    return f"{answer!r:.40}" if scalar else f"a value of type {type(answer).__name__}"


def _refuse(backend: object, call: str, problem: str) -> NoReturn:
    raise StorageUnavailable(f"{type(backend).__name__}.{call} answered {problem}")
