"""A trace as paths of pages in one tree, as the prefix cache sees it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sglang.benchmark.workload import TraceRequest, TraceScale


@dataclass(frozen=True, slots=True)
class PagePath:
    """The whole pages of one request, from the root."""

    pages: tuple[int, ...]
    usable: int
    """Most pages of a hit; the last prompt token is always computed."""


@dataclass(frozen=True, slots=True)
class PageTrace:
    """Requests in order, over pages numbered from 0."""

    requests: Sequence[PagePath]
    parents: Sequence[int]
    """For each page the page before it; -1 for a first page."""

    @property
    def num_pages(self) -> int:
        """Number of distinct pages: the working set."""
        return len(self.parents)

    @property
    def longest_pages(self) -> int:
        """Pages of the longest request."""
        return max((len(request.pages) for request in self.requests), default=0)


def make_page_trace(paths: Iterable[tuple[Sequence[int], int]]) -> PageTrace:
    """Number the pages of requests, which are given as labels.

    Args:
        paths: For each request the labels of its whole pages, and the number of usable pages. A
            page is identified by its label together with the labels before it.
    """
    numbers: dict[tuple[int, int], int] = {}
    parents: list[int] = []
    requests = []
    for labels, usable in paths:
        pages = []
        parent = -1
        for label in labels:
            page = numbers.setdefault((parent, label), len(parents))
            if page == len(parents):
                parents.append(parent)
            pages.append(page)
            parent = page
        requests.append(PagePath(tuple(pages), usable))
    return PageTrace(requests, parents)


def page_trace_of(trace: Sequence[TraceRequest], scale: TraceScale, page_size: int) -> PageTrace:
    """The pages of a scaled trace. A block must be a whole number of pages.

    Raises:
        ValueError: A block is not a whole number of pages; the message says what to change.
    """
    if scale.block_tokens % page_size:
        raise ValueError(
            f"a block of {scale.block_tokens} tokens is not a whole number of pages of {page_size} "
            "tokens: lower the page size, or change the scale of the lengths"
        )
    per_block = scale.block_tokens // page_size

    def paths() -> Iterable[tuple[list[int], int]]:
        for request in trace:
            tokens = scale.prompt_tokens(request)
            labels = [
                block * per_block + page for block in request.hash_ids for page in range(per_block)
            ]
            yield labels[: tokens // page_size], (tokens - 1) // page_size

    return make_page_trace(paths())


def several(trace: Sequence[TraceRequest], copies: int) -> list[TraceRequest]:
    """The trace of `copies` groups of users at once: each group repeats it with ids of its own."""
    beyond = 1 + max((one for request in trace for one in request.hash_ids), default=0)
    return [
        dataclasses.replace(
            request, hash_ids=tuple(copy * beyond + one for one in request.hash_ids)
        )
        for request in trace
        for copy in range(copies)
    ]
