"""The server process's side of several DP groups, for random drivers: where each message goes."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from typing import Final

from rigs.schedulers.scheduler_rig import Collected, SchedulerRig
from sglang.srt.constants import LOAD_BALANCE_METHODS
from sglang.srt.managers.tokenizer.dp_groups import DPGroups, Place
from sglang.srt.managers.tokenizer.generate_request import GenerateRequest
from sglang.srt.managers.tokenizer.group_prefixes import GroupPrefixes
from sglang.srt.mem_cache.tree.held_pages import HeldPages
from sglang.srt.mem_cache.tree.radix_key import hash_str_to_int64
from sglang.srt.messages.io_struct import AbortReq, TokenizedGenerateReqInput, ToScheduler

_NAMED: Final = 0.2
"""Chance that a client names the group."""
_FAVOURED: Final = 0.8
"""Chance that a request goes to the favourite, while there is one: it runs out of memory alone, and
the others are idle."""


class FrontDoor:
    """Chooses a group for each request by the engine's own code.

    Args:
        rng: Source of randomness.
        num_groups: One group draws nothing, and gets everything.
        page_size: Tokens of a page.
    """

    def __init__(self, rng: random.Random, num_groups: int, page_size: int) -> None:
        self._rng = rng
        self.num_groups = num_groups
        self.method = "auto"
        if num_groups > 1 and rng.random() < 0.3:
            self.method = rng.choice(LOAD_BALANCE_METHODS[1:4])
        by_prefix = num_groups > 1 and self.method == "auto"
        self._prefixes = GroupPrefixes(num_groups, page_size) if by_prefix else None
        self.notes = [
            HeldPages(page_size, group) if by_prefix else None for group in range(num_groups)
        ]
        self._page_size = page_size
        self._groups = DPGroups(num_groups, self.method, self._prefixes)
        self._places: dict[str, Place] = {}
        """Requests that have not ended."""
        self._of_prompts: dict[str, int] = {}
        self.favourite: int | None = None

    def draw_favourite(self) -> None:
        """For a while, one group may get nearly all requests."""
        if self.num_groups > 1:
            self.favourite = self._rng.choice((None, None, *range(self.num_groups)))

    def deliver(self, messages: Sequence[ToScheduler]) -> list[list[ToScheduler]]:
        """The messages of a tick, for each group: a request goes to one, its abort to the same, and
        everything else to all."""
        boxes: list[list[ToScheduler]] = [[] for _ in range(self.num_groups)]
        for message in messages:
            if isinstance(message, TokenizedGenerateReqInput):
                boxes[self._group_of(message)].append(message)
            elif isinstance(message, AbortReq) and message.rid in self._places:
                boxes[self._places[message.rid].dp_rank].append(message)
            else:
                for box in boxes:
                    box.append(copy.copy(message) if self.num_groups > 1 else message)
        return boxes

    def _group_of(self, message: TokenizedGenerateReqInput) -> int:
        rid = message.rid
        if rid not in self._places:
            request = GenerateRequest(
                rid=rid, sample_of=message.sample_of, dp_rank=self._named(message.sample_of)
            )
            self._places[rid] = self._groups.enter(request, message.input_ids, self._of_prompts)
        return self._places[rid].dp_rank

    def _named(self, sample_of: str | None) -> int | None:
        if self.num_groups == 1 or sample_of is not None:
            return None
        if self.favourite is not None and self._rng.random() < _FAVOURED:
            return self.favourite
        return self._rng.randrange(self.num_groups) if self._rng.random() < _NAMED else None

    def group_of(self, rid: str) -> int | None:
        """The group of a request; None: it has ended."""
        place = self._places.get(rid)
        return None if place is None else place.dp_rank

    def may_skip(self, rig: SchedulerRig, box: Sequence[ToScheduler]) -> bool:
        """True if the group blocks on messages in this tick, as an idle one does, or is slow."""
        if self.num_groups == 1 or box:
            return False
        is_idle = rig.scheduler.is_idle() and not rig.tree.needs_tick
        return self._rng.random() < (0.9 if is_idle else 0.1)

    def hear(self, rig: SchedulerRig) -> None:
        """Take a group's reports, and note which of its requests have a word."""
        for report in rig.reports:
            self._groups.note_pages(report)
        rig.reports.clear()

    def on_output(self, rid: str, got: Collected) -> None:
        place = self._places.get(rid)
        if place is None:
            return
        if got.output_ids and place.uncomputed:
            self._groups.computed(place)
        if got.finish_reason is not None:
            self._groups.leave(self._places.pop(rid))

    def check_at_rest(self, rigs: Sequence[SchedulerRig]) -> None:
        """Assert that no load is left, and that the door knows the pages of every group."""
        self._of_prompts.clear()
        assert not self._places
        loads = [(one.requests, one.tokens, one.uncomputed) for one in self._groups._loads]
        assert loads == [(0, 0, 0)] * self.num_groups, loads
        if self._prefixes is None:
            return
        for group, rig in enumerate(rigs):
            self.hear(rig)
            # Pages that a driver evicts have no tick.
            notes = self.notes[group]
            if notes is not None and (report := notes.take()) is not None:
                self._groups.note_pages(report)
            nodes = [one for one in rig.tree.nodes() if not one.evicted or one.backuped]
            pages = {
                hash_str_to_int64(page)
                for one in nodes
                for page in one.page_hashes(self._page_size)
            }
            assert self._prefixes._held[group] == pages, f"pages of group {group}"
