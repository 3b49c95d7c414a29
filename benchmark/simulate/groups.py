"""Hit rates and loads of DP groups, by `--load-balance-method`, on a request trace.

The engine's own chooser places the requests (`DPGroups`). Each group has an LRU cache of pages and
one device, which computes prompts in the order of arrival at a fixed rate; then they decode for a
fixed time a token. All requests come so fast that the groups would be busy for 90% of the time
without any cache. The figure `l3` is the share of tokens that a group lacks and the shared L3
has, because any group had them before. In the times here, it costs as much as computing.

`bound` has one cache of all groups' memory, and places by `total_tokens`. `auto_unstreamed` learns
that a prompt is computed only from the end of its answer. Loads are means over windows: the most
tokens computed by a group, divided by the mean of the groups.

A minute for the whole synthetic trace.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import statistics
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from benchmark.command import Command, Refused
from benchmark.report import Report
from benchmark.simulate.trace import EXCERPT
from rigs.bench.page_trace import PagePath, page_trace_of
from sglang.benchmark.workload import TraceRequest, TraceScale, read_trace
from sglang.srt.managers.tokenizer.dp_groups import DPGroups, Place
from sglang.srt.managers.tokenizer.generate_request import GenerateRequest
from sglang.srt.managers.tokenizer.group_prefixes import GroupPrefixes
from sglang.srt.mem_cache.tree.radix_key import TokenArray

_PAGE: Final = 512
_TOKENS_PER_S: Final = 10_000
_DECODE_S: Final = 0.02
"""Seconds of an output token."""
_BUSY: Final = 0.9
_WINDOW_S: Final = 60.0
_METHODS: Final = {"bound": "total_tokens", "auto_unstreamed": "auto"}
_CASES: Final = ("round_robin", "total_requests", "total_tokens", "auto", *_METHODS)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dataset-path", default=str(EXCERPT), help="a trace, JSON lines")
    parser.add_argument("--groups", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument(
        "--fractions",
        type=float,
        nargs="+",
        default=[0.1, 0.3, 1.0],
        help="L1 and L2 of all groups, as a part of the working set",
    )
    parser.add_argument(
        "--shared-pages", type=int, default=0, help="pages with which all prompts begin"
    )


class _Cache:
    """Pages of a group, of which the least recently used leave. A prompt's first pages count as
    used last, so that no page outlives the one before it."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._pages: OrderedDict[int, None] = OrderedDict()

    def match(self, path: PagePath) -> int:
        """Tokens of the longest prefix."""
        usable = path.pages[: path.usable]
        found = next((n for n, one in enumerate(usable) if one not in self._pages), len(usable))
        return found * _PAGE

    def use(self, path: PagePath) -> None:
        for page in reversed(path.pages):
            self._pages.pop(page, None)
            self._pages[page] = None
        while len(self._pages) > self._size:
            self._pages.popitem(last=False)


class _Known(GroupPrefixes):
    """Knows the prefixes of the next prompt, as if the groups had reported them."""

    def __init__(self, num_groups: int) -> None:
        super().__init__(num_groups, _PAGE)
        self.found: list[int] = []

    def lengths(self, tokens: TokenArray, extra_key: str | None) -> list[int]:
        return self.found


@dataclass(frozen=True, slots=True)
class _Prompt:
    at_s: float
    tokens: int
    path: PagePath
    decode_s: float


@dataclass
class _Outcome:
    prompt_tokens: int = 0
    hits: int = 0
    from_l3: int = 0
    first_token_s: list[float] = field(default_factory=list)
    windows: dict[int, list[int]] = field(default_factory=dict)


class _Server:
    """One run."""

    def __init__(self, case: str, num_groups: int, pages: int) -> None:
        self._known = _Known(num_groups)
        method = _METHODS.get(case, case)
        prefixes = self._known if case.startswith("auto") else None
        self._groups = DPGroups(num_groups, method, prefixes)
        self._is_streamed = case != "auto_unstreamed"
        self._caches = [_Cache(pages // num_groups) for _ in range(num_groups)]
        if case == "bound":
            self._caches = [_Cache(pages)] * num_groups
        self._free_s = [0.0] * num_groups
        self._ever: set[int] = set()
        self._events: list[tuple[float, int, bool, Place, PagePath]] = []
        """Ends of prompts (True) and of answers, with a number that keeps their order."""
        self._number = itertools.count()
        self.outcome = _Outcome(windows=defaultdict(lambda: [0] * num_groups))

    def send(self, prompt: _Prompt) -> None:
        self._advance(prompt.at_s)
        self._known.found = [cache.match(prompt.path) for cache in self._caches]
        place = self._groups.enter(GenerateRequest(), np.zeros(prompt.tokens, np.uint32), {})
        dp_rank = place.dp_rank
        hit = self._known.found[dp_rank]
        new = prompt.tokens - hit
        begin = max(prompt.at_s, self._free_s[dp_rank])
        end = self._free_s[dp_rank] = begin + new / _TOKENS_PER_S
        self._note(prompt, hit, end - prompt.at_s)
        self.outcome.windows[int(prompt.at_s / _WINDOW_S)][dp_rank] += new
        for at_s, is_prompt in ((end, True), (end + prompt.decode_s, False)):
            event = (at_s, next(self._number), is_prompt, place, prompt.path)
            heapq.heappush(self._events, event)

    def _note(self, prompt: _Prompt, hit: int, seconds: float) -> None:
        outcome, usable = self.outcome, prompt.path.pages[: prompt.path.usable]
        known = next((n for n, one in enumerate(usable) if one not in self._ever), len(usable))
        self._ever.update(prompt.path.pages)
        outcome.prompt_tokens += prompt.tokens
        outcome.hits += hit
        outcome.from_l3 += max(0, known * _PAGE - hit)
        outcome.first_token_s.append(seconds)

    def _advance(self, now_s: float) -> None:
        while self._events and self._events[0][0] <= now_s:
            _, _, is_prompt, place, path = heapq.heappop(self._events)
            if not is_prompt:
                self._groups.leave(place)
                continue
            self._caches[place.dp_rank].use(path)
            if self._is_streamed:
                self._groups.computed(place)


def _prompts(
    trace: Sequence[TraceRequest], paths: Sequence[PagePath], shared: int, num_groups: int
) -> Iterator[_Prompt]:
    """The trace with a common beginning of `shared` pages, at the rate for `num_groups`."""
    lengths = [one.input_length + shared * _PAGE for one in trace]
    seconds = sum(lengths) / (_BUSY * num_groups * _TOKENS_PER_S)
    scale = seconds / max(trace[-1].timestamp_ms, 1)
    first = tuple(range(-shared, 0))
    for request, path, tokens in zip(trace, paths, lengths, strict=True):
        yield _Prompt(
            request.timestamp_ms * scale,
            tokens,
            PagePath(first + path.pages, shared + path.usable),
            request.output_length * _DECODE_S,
        )


def _add(report: Report, outcome: _Outcome, case: dict[str, object]) -> None:
    tokens = outcome.prompt_tokens
    shares = {"hit_rate": outcome.hits / tokens, "l3": outcome.from_l3 / tokens}
    report.add_all("share", shares, case)
    loads = [max(one) / statistics.mean(one) for one in outcome.windows.values() if sum(one)]
    report.add("load", statistics.mean(loads), "ratio", case)
    slowest = statistics.quantiles(outcome.first_token_s, n=100)[98]
    times = {"first_token": statistics.mean(outcome.first_token_s), "first_token_p99": slowest}
    report.add_all("s", times, case)


def run(args: argparse.Namespace, report: Report) -> None:
    try:
        trace = read_trace(args.dataset_path)
    except ValueError as error:
        raise Refused(str(error)) from None
    pages = page_trace_of(trace, TraceScale(), _PAGE)
    for num_groups, fraction, case in itertools.product(args.groups, args.fractions, _CASES):
        server = _Server(case, num_groups, round(fraction * pages.num_pages))
        for prompt in _prompts(trace, pages.requests, args.shared_pages, num_groups):
            server.send(prompt)
        _add(report, server.outcome, {"groups": num_groups, "fraction": fraction, "case": case})


COMMAND: Final = Command(run=run, add_options=add_options, quick={"groups": [2]})
