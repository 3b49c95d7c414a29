"""What each waiting request gets from L3: its reads, one after the other.

A read that found too little room in L2 is followed by others as room comes. A request does not wait
for room: it is scheduled with what has landed.

A buffer holds a part of a long prompt. While its request waits, each part that has landed is loaded
to L1, which frees its room for the part after the next; the last part is loaded when the request is
scheduled. One request at a time has the *turn* to do so: all waiting prompts together would evict
each other from L1. Its turn passes on once the scheduler asks about others and not about it.

Threads: the scheduler's only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from sglang.srt.mem_cache.base_prefix_cache import (
    InitLoadBackParams,
    MatchPrefixParams,
    MatchResult,
)
from sglang.srt.mem_cache.l3.prefetch_table import PrefetchPolicy
from sglang.srt.mem_cache.l3.storage_prefetch import NoRead
from sglang.srt.mem_cache.tree.radix_key import RadixKey, TokenArray
from sglang.srt.messages.cache_report import Tier

if TYPE_CHECKING:
    from sglang.srt.mem_cache.l3.storage_prefetch import StoragePrefetch
    from sglang.srt.mem_cache.l3.store_connection import StoreConnection
    from sglang.srt.mem_cache.tree.prefix_tree import PrefixTree
    from sglang.srt.mem_cache.tree.radix_key import PageHash
    from sglang.srt.mem_cache.tree.tree_node import TreeNode
    from sglang.srt.messages.cache_report import CacheReport

_CONTINUES = (None, NoRead.JOINED, NoRead.QUEUE_FULL, NoRead.NO_HOST_MEMORY)
"""Answers after which more of a prompt may be read later."""


@dataclass(eq=False, slots=True)
class _Stream:
    """A prompt that is read in parts."""

    key: RadixKey
    """The whole prompt."""
    end: int
    """Tokens of it that a read may bring."""
    deadline: float | None
    """Seconds of the ticks' time, equal on all ranks; None: not before its turn comes."""
    report: CacheReport | None
    known: int
    """Tokens that were in L1 and L2 when its last read began, or found no room."""
    asked: int
    """Tokens at which that read ends."""
    wants_turn: bool = False
    """True once more of it was found to be missing; it is not looked up again before its turn."""


class RequestReads:
    """The reads of one tree's waiting requests.

    Args:
        match: Longest known prefix.
        load: Queues the load of a matched prefix to L1, which the next batch waits for.

    Attributes:
        is_full: True if the last read found no room in L2. No other is tried before that is set to
            False, because something has ended that held pages there. Always False above a buffer.
    """

    def __init__(
        self,
        tree: PrefixTree,
        store: StoreConnection,
        prefetch: StoragePrefetch,
        match: Callable[[MatchPrefixParams], MatchResult],
        load: Callable[[InitLoadBackParams], object],
    ) -> None:
        self.is_full = False
        self._tree = tree
        self._store = store
        self._prefetch = prefetch
        self._match = match
        self._load = load
        self._brought: dict[str, int] = {}
        """Number of tokens that L3 contributed, by request."""
        self._streams: dict[str, _Stream] = {}
        self._turn: str | None = None
        self._asked: set[str] = set()
        """Requests of `_streams` that the scheduler has asked about in this tick."""

    def begin_tick(self) -> None:
        """Let a turn pass on. For buffers."""
        if self._asked and self._turn not in self._asked:
            self._turn = None
        self._asked.clear()

    def arrive(
        self,
        req_id: str,
        node: TreeNode,
        tokens: Sequence[int] | TokenArray,
        last_hash: PageHash | None,
        prefix_keys: list[PageHash] | None,
        *,
        extra_key: str | None,
        only_join: bool,
        report: CacheReport | None,
    ) -> None:
        """See `BasePrefixCache.prefetch_from_storage`."""
        if self._store.attached is None:
            return
        usable = self._tree.longest_match(len(tokens))
        new = RadixKey(tokens[: usable // self._tree.page_size * self._tree.page_size], extra_key)
        refusal = self._prefetch.join_or_read(
            req_id, node, new, last_hash, prefix_keys, only_join=only_join, report=report
        )
        if report is not None:
            self._prefetch.explain(req_id, report, refusal)
        if refusal is not None:
            self._prefetch.note_refusal(refusal, len(new))
        if refusal not in _CONTINUES or only_join:
            return
        known = node.depth
        end, asked = known + len(new), self._reach(req_id, known)
        if self._tree.host_is_buffer or asked < end:
            path = node.path_up()[::-1]
            ids = np.concatenate([*(one.key.ids for one in path), RadixKey(tokens).ids])
            self._streams[req_id] = _Stream(
                key=RadixKey(ids, extra_key),
                end=end,
                deadline=self._deadline(len(new)),
                report=report,
                known=known,
                asked=asked,
            )

    def expect(self, req_id: str, key: RadixKey) -> None:
        """Request `req_id`, which was retracted, needs `key` again. If L2 is a buffer, what leaves
        L1 until its turn comes is read from L3."""
        if self._tree.host_is_buffer:
            end = (len(key) - 1) // self._tree.page_size * self._tree.page_size
            self._streams[req_id] = _Stream(key, end, None, None, known=0, asked=0)

    @property
    def _now(self) -> float:
        """Seconds of the tick, equal on all ranks."""
        return self._tree.sessions.now

    def _deadline(self, tokens: int) -> float:
        """When a request that needs `tokens` from L3 waits no longer."""
        assert self._store.attached is not None
        timeout = self._store.attached.settings.timeout
        waits_to_end = self._store.prefetch_policy is PrefetchPolicy.WAIT_COMPLETE
        return self._now + (timeout.max if waits_to_end else timeout.seconds_for(tokens))

    def may_schedule(self, req_id: str) -> bool:
        """See `BasePrefixCache.check_prefetch_progress`."""
        prefetch, policy = self._prefetch, self._store.prefetch_policy
        if req_id in self._streams:
            self._asked.add(req_id)
        if not prefetch.table.may_schedule(req_id, policy):
            return False
        for read in prefetch.table.reads_of(req_id):
            # Landed pages are published now. The read continues until the request is scheduled,
            # which may be much later.
            new = prefetch.publish(read, read.needs[req_id]) or 0
            self._brought[req_id] = self._brought.get(req_id, 0) + new
            if new or read.progress.ended:
                prefetch.settle_known(read)
        return not self._goes_on(req_id)

    def take_tokens(self, req_id: str) -> int:
        """Tokens that L3 has contributed; later calls return 0."""
        return self._brought.pop(req_id, 0)

    def release(self, req_id: str) -> None:
        """The request is scheduled or aborted: it waits for no read."""
        self._prefetch.release(req_id)
        self._drop(req_id)
        self.is_full = False  # L2 need not spare its pages any more.

    def clear(self) -> None:
        """Forget all requests. No read may be under way."""
        self._brought.clear()
        self._streams.clear()
        self._asked.clear()
        self._turn = None

    # ---- reading in parts --------------------------------------------------------------------

    def _goes_on(self, req_id: str) -> bool:
        """True if the request has to wait for a further part of its prompt, which is read now or
        when it has the turn."""
        stream = self._streams.get(req_id)
        if stream is None or self.is_full:
            return False
        waits = self._may_go_on(req_id, stream)
        if not waits and not self.is_full:
            self._drop(req_id)
        return waits

    def _may_go_on(self, req_id: str, stream: _Stream) -> bool:
        """See `_goes_on`. False: it has all that it will get, or `is_full` is True now."""
        attached, tree = self._store.attached, self._tree
        if attached is None or self._store.prefetch_policy is PrefetchPolicy.BEST_EFFORT:
            return False
        if stream.deadline is None:
            stream.deadline = self._deadline(stream.end)
        if self._now > stream.deadline or self._prefetch.table.reads_of(req_id):
            return False  # The store is too slow, or has no more of it.
        if self._prefetch.is_hopeless(req_id, stream.end - stream.known):
            return False
        if stream.wants_turn and self._turn not in (None, req_id):
            return True
        needs_state = bool(tree.components_from_storage) or not tree.components
        match = self._match(MatchPrefixParams(stream.key, needs_state=needs_state))
        known = len(match.device_indices) + match.host_hit_length
        rest = stream.end - known
        if rest < attached.threshold_pages * tree.page_size:
            return False
        # A hit ends with a state, where there are states, and before the end of the part.
        is_whole = known > stream.known if tree.components_from_storage else known >= stream.asked
        if not is_whole and stream.asked > stream.known:
            return False
        if tree.host_is_buffer:
            if self._turn not in (None, req_id):
                stream.wants_turn = True
                return True
            self._turn = req_id
            if not self._loads_part(match, needs_state=needs_state):
                return False
        return self._reads_on(req_id, stream, match.best_match_node, known)

    def _loads_part(self, match: MatchResult, *, needs_state: bool) -> bool:
        """Queue the load of a part that has landed. False: L1 has too little room."""
        if not (match.host_hit_length or match.mamba_host_hit_length):
            return True
        free = self._tree.allocator.available_size() + self._tree.device.evictable
        params = InitLoadBackParams(
            match.best_match_node,
            match.host_hit_length,
            mem_quota=free // 2,  # Running requests need room for their output.
            needs_state=needs_state,
        )
        self._load(params)
        return params.refusal is None

    def _reads_on(self, req_id: str, stream: _Stream, node: TreeNode, known: int) -> bool:
        """Read the prompt on behind its first `known` tokens, which end with `node`. False: not
        now."""
        assert stream.deadline is not None
        table, report = self._prefetch.table, stream.report
        cuts = [] if report is None else report.cuts
        if report is not None:
            # The last part ended for want of room, which there may be now.
            report.cuts = [cut for cut in cuts if cut.tier is not Tier.STORAGE]
        refusal = self._prefetch.join_or_read(
            req_id,
            node,
            stream.key[known : stream.end],
            None,
            None,
            only_join=False,
            report=report,
            seconds=stream.deadline - self._now,
        )
        has_begun = bool(table.reads_of(req_id))
        if report is not None and has_begun:
            table.reports[req_id] = report
        elif report is not None:
            report.cuts = cuts
        if refusal not in _CONTINUES:
            return False
        stream.known, stream.asked = known, self._reach(req_id, known)
        self.is_full = not (has_begun or self._tree.host_is_buffer)
        return not self.is_full

    def _reach(self, req_id: str, known: int) -> int:
        """Tokens of the prompt that are there when all its reads have landed."""
        page = self._tree.page_size
        reads = self._prefetch.table.reads_of(req_id)
        return max([known, *(read.start + read.needs[req_id] * page for read in reads)])

    def _drop(self, req_id: str) -> None:
        self._streams.pop(req_id, None)
        if self._turn == req_id:
            self._turn = None
