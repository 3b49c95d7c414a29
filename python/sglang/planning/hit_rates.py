"""Hit rates of a trace for caches of every size, in one pass.

Stack distances: in a list of all pages, the last used first, a page's distance is the number of
tokens up to its end. Least recently used (LRU) eviction keeps exactly the pages whose distance is
at most the size of the cache, so one pass gives the hit rate for all sizes. Source: Mattson et al.,
"Evaluation techniques for storage hierarchies" (1970).

The engine evicts leaves of its tree, the least recently used first, and of a long leaf only its
end. A request uses its whole prefix at the same time, so parents are never older than children, and
the same pages are left as with a list in which a request's pages stand in the order of the prompt,
but for the parts in which leaves are divided (`pool_tier.LEAST_LEAVING`).

Answers are cached behind their prompts. A trace does not say which prompts repeat them, so they
take room and are never found.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from sglang.benchmark.workload import BLOCK_TOKENS, TraceRequest


@dataclass(slots=True)
class _Block:
    """A block of a prompt, together with all blocks before it."""

    last_use: int
    """Number of the last request that used it."""
    tokens: int = 0
    """Tokens of it that were computed, whole pages."""
    children: dict[int, _Block] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StackDistances:
    """Runs of tokens that were used before: run i has distances from `begins[i]` (exclusive) to
    `ends[i]`, and belongs to request `requests[i]`."""

    lengths: npt.NDArray[np.int64]
    """Tokens of each prompt, in whole pages."""
    distinct_tokens: int
    """Tokens of all different pages, of prompts and answers: the working set."""
    requests: npt.NDArray[np.int64]
    begins: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts, in whole pages."""
        return int(self.lengths.sum())

    def hits(self, size_tokens: float) -> npt.NDArray[np.float64]:
        """Tokens of each prompt that an LRU cache of this size has."""
        found = np.zeros(len(self.lengths))
        np.add.at(found, self.requests, (np.minimum(self.ends, size_tokens) - self.begins).clip(0))
        return found

    def hit_rate(self, size_tokens: float) -> float:
        """Share of the prompts' tokens that an LRU cache of this size has."""
        if not self.prompt_tokens:
            return 0.0
        return float(self.hits(size_tokens).sum()) / self.prompt_tokens


class _Sums:
    """Sums over the last requests: a Fenwick tree of one number for each request."""

    def __init__(self, size: int) -> None:
        self._tree = [0] * (size + 1)
        self._total = 0

    def add(self, index: int, amount: int) -> None:
        self._total += amount
        at = index + 1
        while at < len(self._tree):
            self._tree[at] += amount
            at += at & -at

    def after(self, index: int) -> int:
        """Sum of the numbers behind `index`."""
        at, up_to = index + 1, 0
        while at:
            up_to += self._tree[at]
            at -= at & -at
        return self._total - up_to


def stack_distances(trace: Sequence[TraceRequest], page_size: int) -> StackDistances:
    """Replay a trace, one request after the other.

    Args:
        page_size: Tokens; prompts and answers are cached in whole pages, except the last token of
            an answer. The last token of a prompt is always computed.
    """
    root = _Block(last_use=-1)
    sums = _Sums(len(trace))
    distinct = 0
    lengths: list[int] = []
    requests: list[int] = []
    begins: list[int] = []
    ends: list[int] = []
    for number, request in enumerate(trace):
        cached = request.input_length // page_size * page_size
        usable = (request.input_length - 1) // page_size * page_size
        lengths.append(cached)
        at, start, last_use, begin = root, 0, -1, 0
        for block_id in request.hash_ids:
            want = max(0, min(cached - start, BLOCK_TOKENS))
            found = at.children.get(block_id)
            if found is None:
                found = at.children[block_id] = _Block(last_use=-1)
            if found.last_use >= 0:
                # Blocks of one earlier request follow each other in the list.
                if found.last_use != last_use:
                    last_use = found.last_use
                    begin = sums.after(last_use)
                hit = max(0, min(found.tokens, usable - start))
                if hit:
                    requests.append(number)
                    begins.append(begin)
                    ends.append(begin + hit)
                begin += found.tokens
            at, start = found, start + BLOCK_TOKENS
            if not want:
                break
        distinct += _use(root, request.hash_ids, number, cached, sums)
        known = request.input_length + request.output_length - 1
        answer = max(0, known // page_size * page_size - cached)
        sums.add(number, answer)
        distinct += answer
    return StackDistances(
        np.array(lengths, np.int64),
        distinct,
        np.array(requests, np.int64),
        np.array(begins, np.int64),
        np.array(ends, np.int64),
    )


def _use(root: _Block, hash_ids: Iterable[int], number: int, cached: int, sums: _Sums) -> int:
    """Move the blocks of request `number` to the front of the list. Returns the tokens of new
    pages."""
    at, new = root, 0
    for block_id in hash_ids:
        want = min(cached, BLOCK_TOKENS)
        if want <= 0:
            break
        at = at.children[block_id]
        if at.last_use >= 0:
            sums.add(at.last_use, -at.tokens)
        new += max(0, want - at.tokens)
        at.tokens, at.last_use = max(at.tokens, want), number
        sums.add(number, at.tokens)
        cached -= BLOCK_TOKENS
    return new
