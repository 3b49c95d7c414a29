"""Hints of sessions: prefixes that agents come back to are evicted after others, within a budget.

A request with a `session_id` marks its prefix when it ends. Marks change the order of eviction
alone: they lock nothing, so memory pressure may take marked pages when no others are left. Marks
end after a time to live, or when marks of newer sessions fill the budget.

Times are those of the ticks, and sessions end in the order of their last use, so that all ranks
have the same marks.

Threads: the scheduler's only.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from typing import Final, TypeAlias

from prometheus_client import CollectorRegistry

from sglang.srt.mem_cache.tree.tree_node import ROOT_ID, PoolSlots, TreeNode
from sglang.srt.utils.metrics import Counter, Gauge

Session: TypeAlias = tuple[str | None, str]
"""The key that separates prefixes, and the client's name for the session: tenants with different
keys never share a session."""

MAX_SESSIONS: Final = 4096
"""Most sessions of a tier."""
_SHORT: Final = 4
"""Divides the budget of a tier that has a tier below: longer prefixes are not marked, because they
can be loaded again."""


class SessionMetrics:
    """Metrics of the hints, by tier."""

    def __init__(self, registry: CollectorRegistry | None) -> None:
        registry = registry or CollectorRegistry()
        self.sessions = Gauge(
            "sglang:session_hints", "Sessions whose prefix is kept", ["tier"], registry=registry
        )
        self.tokens = Gauge(
            "sglang:session_kept_tokens",
            "Tokens of prefixes that sessions keep",
            ["tier"],
            registry=registry,
        )
        self.ended = Counter(
            "sglang:session_hints_ended_total",
            "Hints of sessions that ended, by tier and cause: expired, budget, too_long",
            ["tier", "cause"],
            registry=registry,
        )


class TierHints:
    """Marks on one tier.

    `PoolSlots.kept_on_device` (or `kept_on_host`) counts the sessions whose prefix includes a
    node's pages; for a state, those whose prefix ends with it.

    Args:
        tier: `device` or `host`.
        budget: Most tokens that are marked.
        most: Most sessions.
    """

    def __init__(self, tier: str, budget: int, most: int, metrics: SessionMetrics) -> None:
        self.budget = budget
        self.longest = budget
        """Tokens of the longest prefix that is marked."""
        self.tokens = 0
        """Tokens that are marked."""
        self._tier = tier
        self._most = most
        self._mark = f"kept_on_{tier}"
        self._metrics = metrics
        self._ends: OrderedDict[Session, tuple[TreeNode, float]] = OrderedDict()
        """The last node of each session's prefix, and when it ends; the next to end first."""
        self._ending_at: dict[int, dict[Session, None]] = {}
        """The sessions whose prefix ends with a node, by its id."""

    def keep(self, session: Session, end: TreeNode, until: float) -> list[TreeNode]:
        """Mark the prefix of `session` up to `end`, in place of its last one. Returns nodes whose
        marks ended."""
        changed = self._drop(session)
        if end.depth > self.longest:
            self._metrics.ended.labels(self._tier, "too_long").inc()
        elif end.id != ROOT_ID:
            for node in end.path_up():
                self.tokens += 0 if getattr(node, self._mark) else len(node.key)
                self._count(node, 1)
            self._ends[session] = end, until
            self._end_at(end, session)
        while self.tokens > self.budget or len(self._ends) > self._most:
            changed += self._drop(next(iter(self._ends)), "budget")
        return self._noted(changed)

    def expire(self, now: float) -> list[TreeNode]:
        """End the marks whose time is over. Returns their nodes."""
        changed: list[TreeNode] = []
        while self._ends:
            session, (_, until) = next(iter(self._ends.items()))
            if until > now:
                break
            changed += self._drop(session, "expired")
        return self._noted(changed) if changed else changed

    def on_delete(self, node: TreeNode) -> None:
        """`node`, a leaf, is about to leave the tree: prefixes that end there end at its parent."""
        if not getattr(node, self._mark):
            return
        self.tokens -= len(node.key)
        # A condemned node stays for those who have it locked.
        for slots in (node, *node.states):
            setattr(slots, self._mark, 0)
        parent = node.parent
        assert parent is not None
        for session in self._ending_at.pop(node.id):
            if parent.id == ROOT_ID:
                del self._ends[session]
            else:
                self._ends[session] = parent, self._ends[session][1]
                self._end_at(parent, session)
        self._noted([])

    def clear(self) -> None:
        """Forget all marks: the tree is new."""
        self._ends.clear()
        self._ending_at.clear()
        self.tokens = 0
        self._noted([])

    def check(self, nodes: Collection[TreeNode]) -> None:
        """Assert that each mark belongs to a session, and that none is missing."""
        through: dict[int, int] = {}
        ending: dict[int, int] = {}
        for end, _ in self._ends.values():
            ending[end.id] = ending.get(end.id, 0) + 1
            for node in end.path_up():
                through[node.id] = through.get(node.id, 0) + 1
        for node in nodes:
            kept = getattr(node, self._mark)
            assert kept == through.get(node.id, 0), f"{node} is kept by {kept} sessions"
            for state in node.states:
                assert getattr(state, self._mark) == ending.get(node.id, 0), f"state of {node}"
        tokens = sum(len(node.key) for node in nodes if node.id in through)
        assert self.tokens == tokens <= self.budget, f"{self.tokens} tokens are kept, not {tokens}"

    def _drop(self, session: Session, cause: str | None = None) -> list[TreeNode]:
        """End the marks of `session`, if it has any; return their nodes."""
        end, _ = self._ends.pop(session, (None, 0.0))
        if end is None:
            return []
        if cause is not None:
            self._metrics.ended.labels(self._tier, cause).inc()
        path = end.path_up()
        for node in path:
            self._count(node, -1)
            self.tokens -= 0 if getattr(node, self._mark) else len(node.key)
        for state in end.states:
            self._count(state, -1)
        ending = self._ending_at[end.id]
        del ending[session]
        if not ending:
            del self._ending_at[end.id]
        return path

    def _end_at(self, node: TreeNode, session: Session) -> None:
        self._ending_at.setdefault(node.id, {})[session] = None
        for state in node.states:
            self._count(state, 1)

    def _count(self, slots: PoolSlots, change: int) -> None:
        setattr(slots, self._mark, getattr(slots, self._mark) + change)

    def _noted(self, changed: list[TreeNode]) -> list[TreeNode]:
        self._metrics.sessions.labels(self._tier).set(len(self._ends))
        self._metrics.tokens.labels(self._tier).set(self.tokens)
        return changed


class SessionHints:
    """The marks of all sessions, on all tiers of one tree.

    Args:
        share: Part of each tier that sessions may keep, from 0 to 1; 0: there are no hints.
        ttl: Seconds for which a session's prefix is kept after its last request.
    """

    def __init__(
        self, share: float = 0.0, ttl: float = 0.0, registry: CollectorRegistry | None = None
    ) -> None:
        self._share = share
        self._ttl = ttl
        self._now = 0.0
        self._metrics = SessionMetrics(registry)
        self.tiers: list[TierHints] = []
        """The device's first."""

    def add_tier(self, tier: str, tokens: int, states: Sequence[int]) -> None:
        """Keep prefixes on a tier too, which is below the others.

        Args:
            tokens: Size of the tier.
            states: Number of states of each kind that it holds.
        """
        for above in self.tiers:
            above.longest = above.budget // _SHORT
        most = min([MAX_SESSIONS, *(int(count * self._share) for count in states)])
        self.tiers.append(TierHints(tier, int(tokens * self._share), most, self._metrics))

    def keep(self, session: Session, end: TreeNode) -> list[TreeNode]:
        """Mark the prefix of `session` up to `end`. Returns nodes whose marks ended."""
        until = self._now + self._ttl
        return [node for tier in self.tiers for node in tier.keep(session, end, until)]

    def expire(self, now: float) -> list[TreeNode]:
        """End the marks whose time is over at `now`, seconds of the tick. Returns their nodes."""
        self._now = now
        return [node for tier in self.tiers for node in tier.expire(now)]

    def on_delete(self, node: TreeNode) -> None:
        """See `NodeKeeper`."""
        for tier in self.tiers:
            tier.on_delete(node)

    def on_reset(self, nodes: Sequence[TreeNode]) -> None:
        """See `NodeKeeper`: all marks end."""
        for tier in self.tiers:
            tier.clear()

    def check(self, nodes: Collection[TreeNode]) -> None:
        """Assert that the marks fit the sessions."""
        for tier in self.tiers:
            tier.check(nodes)
