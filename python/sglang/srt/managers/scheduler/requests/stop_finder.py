"""Finds where a growing text completes a stop: strings and patterns.

The work for a token does not grow with the output: each token is decoded once, and only the end of
the text is searched. Positions are characters of the whole output."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from sglang.srt.sampling.stop_regex import MAX_MATCH_CHARS, compile_stop_regex

if TYPE_CHECKING:
    import regex

    from sglang.srt.managers.detokenizer.detokenizer_manager import TextDecoder
    from sglang.srt.sampling.sampling_params import SamplingParams

MATCH_BURST: Final = 0.002
"""CPU seconds that a request's patterns may use beyond `MATCH_COST`."""
MATCH_COST: Final = 0.0002
"""CPU seconds for each token. A search that backtracks little takes microseconds; catastrophic
backtracking does not end."""
_TAIL_CHARS: Final = 2 * MAX_MATCH_CHARS
"""Characters kept for patterns: the searched part, and the context of lookbehinds and `^`."""


class StopRegexTooSlow(Exception):
    """Matching a request's patterns took more CPU time than they may use."""


@dataclass(frozen=True, slots=True, order=True)
class StopMatch:
    """The stop that ended an output."""

    begin: int
    """Characters of the output before it."""
    stop: str
    """The string or the pattern, as the client gave it."""


class StopFinder:
    """Decodes one request's output with a new `decoder`, and looks for the stops of normalised
    `params`."""

    def __init__(self, params: SamplingParams, decoder: TextDecoder) -> None:
        self._decoder = decoder
        self._stops = params.stop_strings
        self._scans = [_PatternScan(pattern) for pattern in params.stop_patterns]
        self._credit = _MatchCredit()
        longest = max(map(len, self._stops), default=1)
        self._keep = max(longest - 1, _TAIL_CHARS if self._scans else 0)
        self._text = ""
        """The end of the text, `_keep` characters of it between two calls."""
        self._offset = 0
        """Characters before `_text`."""
        self._num_fed = 0
        self.match: StopMatch | None = None
        """The stop that ended the output, once `advance` has found it."""

    def shown_chars(self, *, ended: bool) -> int | None:
        """Characters of the output that may be shown; see `RequestOutput.shown_chars`. They end at
        the stop that was found, or while the output grows, where one may begin."""
        if self.match is not None:
            return self.match.begin
        if ended:
            return None
        held = max((_overlap(self._text, stop) for stop in self._stops), default=0)
        end = self._offset + len(self._text) - held
        return min(end, *(scan.begin for scan in self._scans)) if self._scans else end

    def advance(self, output_ids: Sequence[int], *, may_stop: bool) -> StopMatch | None:
        """Search the text that the new tokens of `output_ids`, which is all of the output, add.
        Returns the stop that they complete; the first in the text, if several. A stop that is
        complete before `may_stop` never ends the output.

        Raises:
            StopRegexTooSlow: The patterns have used up their time.
        """
        self._credit.add(len(output_ids) - self._num_fed)
        fresh = self._decoder.feed(output_ids[self._num_fed :])
        self._num_fed = len(output_ids)
        if not fresh:
            return None
        old = len(self._text)
        self._text += fresh
        found = self._find_strings(old) if may_stop else []
        for scan in self._scans:
            begin = scan.search(self._text, self._offset, self._credit, may_stop=may_stop)
            if begin is not None:
                found.append(StopMatch(begin, scan.source))
        if found:
            self.match = min(found)
        self._forget(len(self._text) - self._keep)
        return self.match

    def _find_strings(self, old: int) -> list[StopMatch]:
        """Stop strings that end after the first `old` characters of the text."""
        found = []
        for stop in self._stops:
            position = self._text.find(stop, max(0, old - len(stop) + 1))
            if position >= 0:
                found.append(StopMatch(self._offset + position, stop))
        return found

    def _forget(self, count: int) -> None:
        if count > 0:
            self._text = self._text[count:]
            self._offset += count


def _overlap(text: str, stop: str) -> int:
    """Characters at the end of `text` that `stop` begins with, fewer than all of `stop`."""
    position = text.find(stop[0], max(len(text) - len(stop) + 1, 0))
    while position >= 0:
        if stop.startswith(text[position:]):
            return len(text) - position
        position = text.find(stop[0], position + 1)
    return 0


class _MatchCredit:
    """The CPU time that a request's patterns may still use."""

    def __init__(self) -> None:
        self._seconds = MATCH_BURST

    def add(self, num_tokens: int) -> None:
        self._seconds = min(self._seconds + num_tokens * MATCH_COST, MATCH_BURST)

    def search(self, pattern: regex.Pattern[str], text: str, begin: int) -> regex.Match[str] | None:
        """The first match that begins at or after `begin`; if there is none, the first partial
        match that the end of the text cuts off."""
        while self._seconds > 0:
            limit = self._seconds
            started = time.thread_time()
            try:
                match = pattern.search(text, begin, partial=True, timeout=limit)
            except TimeoutError:
                # The library's limit is wall time: a thread that was descheduled may try again.
                if time.thread_time() - started >= limit / 2:
                    self._seconds = 0.0
                continue
            used = time.thread_time() - started
            if used < limit:  # Else a garbage collection ran meanwhile: the search has ended.
                self._seconds -= used
            return match
        raise StopRegexTooSlow


class _PatternScan:
    """Search for one pattern in a growing text.

    A search finds the place where the end of the text cuts a match off; no later match begins
    before it. One exception: an assertion such as `\\B` may have failed only because the text ended
    there. Therefore the place from the previous search is used: the end that it saw is inside the
    text now.
    """

    def __init__(self, source: str) -> None:
        self.source = source
        self.begin = 0
        """No match begins before this place."""
        self._next_begin = 0
        self._pattern = compile_stop_regex(source)

    def search(self, text: str, offset: int, credit: _MatchCredit, *, may_stop: bool) -> int | None:
        """Position at which the first match begins, None if there is none. `text` is the end of the
        output, `offset` the characters before it. Without `may_stop` all matches are skipped."""
        position = self.begin - offset
        match = credit.search(self._pattern, text, position)
        begin = self._next_begin
        while match is not None and not match.partial:
            if may_stop:
                return offset + int(match.start())
            position = max(match.end(), position + 1)
            begin = offset + position
            if position > len(text):
                break
            match = credit.search(self._pattern, text, position)
        end = offset + len(text)
        self.begin = max(begin, end - MAX_MATCH_CHARS)
        cut_off = offset + match.start() if match is not None else end
        self._next_begin = max(cut_off, self.begin)
        return None
