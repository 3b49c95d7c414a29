"""What a storage backend answered, checked against its contract before it counts.

Every answer decides which pages are good, or whether anything is written at all. One that has
another length or another type than its call promises says nothing about any page: it is never cut,
filled up or converted. Pure, any thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NoReturn

import numpy as np
import torch

from sglang.srt.mem_cache.storage.types import CacheOutcome, PoolTransferResult, StorageUnavailable


class ContractBroken(StorageUnavailable):
    """A backend answered what it must not, and counts as a failing store. Names class and call."""


def flag(backend: object, call: str, answer: object) -> bool:
    """A yes or no. Numbers are refused: some libraries mean success by 1, others by 0."""
    if not isinstance(answer, bool | np.bool_):
        _refuse(backend, call, f"{_shown(answer)} where True or False is due")
    return bool(answer)


def page_count(backend: object, call: str, answer: object, asked: int) -> int:
    """How many of the first of `asked` pages the store has."""
    if isinstance(answer, bool) or not isinstance(answer, int | np.integer):
        _refuse(backend, call, f"{_shown(answer)} where a number of pages is due")
    if not 0 <= answer <= asked:
        _refuse(backend, call, f"{answer} pages, having been asked about {asked}")
    return int(answer)


def prompt_hits(backend: object, call: str, answer: object, asked: Sequence[int]) -> list[int]:
    """How many pages the store has of each prompt.

    Args:
        backend: Who answered.
        call: By which method.
        answer: One `PoolTransferResult` a prompt.
        asked: Pages of each prompt.
    """
    results = _sequence(backend, call, answer, len(asked), "prompts")
    hits = []
    for result, pages in zip(results, asked, strict=True):
        if not isinstance(result, PoolTransferResult):
            _refuse(backend, call, f"{_shown(result)} where a PoolTransferResult is due")
        hits.append(page_count(backend, call, result.kv_hit_pages, pages))
    return hits


def page_outcomes(
    backend: object, call: str, answer: object, asked: int, *, pool: str, otherwise: CacheOutcome
) -> list[CacheOutcome]:
    """What became of each of the `asked` pages of `pool`; `otherwise` is what False stands for."""
    if not isinstance(answer, Mapping):
        _refuse(backend, call, f"{_shown(answer)} where results by pool are due")
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
    """The bytes under each of the `asked` keys, None where there are none."""
    found: list[torch.Tensor | None] = []
    for value in _sequence(backend, call, answer, asked, "keys"):
        if not (value is None or isinstance(value, torch.Tensor)):
            _refuse(backend, call, f"{_shown(value)} where a tensor or None is due")
        found.append(value)
    return found


def _sequence(
    backend: object, call: str, answer: object, length: int, what: str
) -> Sequence[object]:
    if isinstance(answer, str | bytes) or not isinstance(answer, Sequence):
        _refuse(backend, call, f"{_shown(answer)} where a list is due")
    if len(answer) != length:
        _refuse(backend, call, f"{len(answer)} results for {length} {what}")
    return answer


def _shown(answer: object) -> str:
    """Short: the answer may be a page."""
    scalar = answer is None or isinstance(answer, bool | int | float)
    return f"{answer!r:.40}" if scalar else f"a value of type {type(answer).__name__}"


def _refuse(backend: object, call: str, problem: str) -> NoReturn:
    raise ContractBroken(f"{type(backend).__name__}.{call} answered {problem}")
