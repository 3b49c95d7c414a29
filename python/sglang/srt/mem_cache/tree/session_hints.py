"""Hints of sessions: prefixes that agents come back to are evicted after others, within a budget.

A request with a `session_id` marks its prefix when it ends. Marks change the order of eviction
alone: they lock nothing, so memory pressure may take marked pages when no others are left. Marks
end after a time to live, or when newer sessions of the same tenant use up its share of the budget
(`is_within_share`): no tenant ends the marks of another.

Times are those of the ticks, and sessions end in the order of their last use, so that all ranks
have the same marks.

Threads: the scheduler's only.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from prometheus_client import CollectorRegistry

from sglang.srt.mem_cache.tree.tree_node import ROOT_ID, PoolSlots, TreeNode
from sglang.srt.messages.cache_key import tenant_of
from sglang.srt.utils.fair_share import is_within_share
from sglang.srt.utils.metrics import MetricFactory
from sglang.srt.utils.parts import NODE_ITEMS, Meter, Parts


class Session(NamedTuple):
    """A session of one client. Sessions with different keys are different."""

    tenant: str | None
    """Whose share of the budget it uses: the part of the key that `cache_salt` gave, or the key."""
    key: str | None
    """The key that separates prefixes."""
    name: str
    """The client's name for the session."""

    @classmethod
    def of(cls, key: str | None, name: str) -> Session:
        """The session `name` of requests with the key `key`, of `combine_extra_key`."""
        return cls(tenant_of(key), key, name)


MAX_SESSIONS: Final = 4096
"""Most sessions of a tier."""
_SHORT: Final = 4
"""Divides the budget of a tier that has a tier below: longer prefixes are not marked, because they
can be loaded again."""


_MOST_EXPIRED: Final = 16
"""Most sessions of a tier that end in one tick by their time: the others end in the next ticks."""


class SessionMetrics:
    """Metrics of the hints, by tier."""

    def __init__(self, registry: CollectorRegistry | None) -> None:
        make = MetricFactory(registry)
        self.sessions = make.gauge("session_hints", "Sessions whose prefix is kept", "tier")
        self.tokens = make.gauge(
            "session_kept_tokens", "Tokens of prefixes that sessions keep", "tier"
        )
        self.ended = make.counter(
            "session_hints_ended_total",
            "Hints of sessions that ended, by tier and cause: expired, budget, too_long, closed",
            "tier",
            "cause",
        )


class _Share:
    """One tenant's share of the budget."""

    __slots__ = ("sessions", "tokens")

    def __init__(self) -> None:
        self.tokens = 0
        """Tokens that its sessions mark."""
        self.sessions: OrderedDict[Session, None] = OrderedDict()
        """The one that was used longest ago first."""


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
        """Last node of each session's prefix, and the time at which the mark ends, ascending."""
        self._ending_at: dict[int, dict[Session, None]] = {}
        """The sessions whose prefix ends with a node, by its id."""
        self._shares: dict[str | None, _Share] = {}
        """Shares by tenant. A tenant without sessions has no entry."""

    def keep(self, session: Session, end: TreeNode, until: float) -> list[TreeNode]:
        """Mark the prefix of `session` up to `end`, in place of its last one, if its tenant's share
        has room for it. The tenant's other sessions make room, the one used longest ago first.
        Returns nodes whose marks ended."""
        changed = self._drop(session)
        if end.depth > self.longest:
            self._metrics.ended.labels(self._tier, "too_long").inc()
            return self._noted(changed)
        share = self._shares.get(session.tenant, _Share())
        path = end.path_up()
        if not path:
            return self._noted(changed)
        is_possible = end.depth <= self.budget - self.tokens + share.tokens
        while not (is_possible and self._has_room(share, path)):
            if not (is_possible and share.sessions):
                self._metrics.ended.labels(self._tier, "budget").inc()
                return self._noted(changed)
            changed += self._drop(next(iter(share.sessions)), "budget")
        self._shares[session.tenant] = share
        share.sessions[session] = None
        for node in path:
            if not getattr(node, self._mark):
                self.tokens += len(node.key)
                share.tokens += len(node.key)
            self._count(node, 1)
        self._ends[session] = end, until
        self._end_at(end, session)
        return self._noted(changed)

    def _has_room(self, share: _Share, path: list[TreeNode]) -> bool:
        """True if a session more, with the prefix `path`, is within the tenant's share."""
        need = sum(len(node.key) for node in path if not getattr(node, self._mark))
        free, free_sessions = self.budget - self.tokens, self._most - len(self._ends)
        if not share.sessions:
            # Otherwise a long prefix would never be kept.
            return need <= free and free_sessions > 0
        is_within = is_within_share(share.tokens, need, free)
        return is_within and is_within_share(len(share.sessions), 1, free_sessions)

    def renew(self, session: Session, until: float) -> None:
        """Let the marks of `session`, if it has any, end later, as if it had been used."""
        if session in self._ends:
            end, _ = self._ends.pop(session)
            self._ends[session] = end, until
            self._shares[session.tenant].sessions.move_to_end(session)

    def close(self, session: Session) -> list[TreeNode]:
        """End the marks of `session`. Returns their nodes."""
        return self._noted(self._drop(session, "closed"))

    def expire(self, now: float) -> list[TreeNode]:
        """End marks whose time is over. Returns their nodes."""
        changed: list[TreeNode] = []
        count = 0
        while self._ends and count < _MOST_EXPIRED:
            count += 1
            session, (_, until) = next(iter(self._ends.items()))
            if until > now:
                break
            changed += self._drop(session, "expired")
        return self._noted(changed) if changed else changed

    def on_delete(self, node: TreeNode) -> None:
        """`node`, a leaf, is about to leave the tree: prefixes that end there end at its parent."""
        if not getattr(node, self._mark):
            return
        share = self._shares[next(iter(self._ending_at[node.id])).tenant]
        self.tokens -= len(node.key)
        share.tokens -= len(node.key)
        # A condemned node stays for those who have it locked.
        for slots in (node, *node.states):
            setattr(slots, self._mark, 0)
        parent = node.parent
        assert parent is not None
        for session in self._ending_at.pop(node.id):
            if parent.id == ROOT_ID:
                del self._ends[session]
                self._leave_share(session)
            else:
                self._ends[session] = parent, self._ends[session][1]
                self._end_at(parent, session)
        self._noted([])

    def clear(self) -> None:
        """Forget all marks: the tree is new."""
        self._ends.clear()
        self._ending_at.clear()
        self._shares.clear()
        self.tokens = 0
        self._noted([])

    def check(self, nodes: Iterable[TreeNode]) -> Parts:
        """Assert that each mark belongs to a session, and that none is missing, in parts."""
        meter = Meter()
        through: Counter[int] = Counter()
        ending: Counter[int] = Counter()
        for session, (end, _) in self._ends.items():
            path = end.path_up()
            assert end.is_in_tree and end.key.extra_key == session.key, f"{session} ends at {end}"
            assert session in self._shares[session.tenant].sessions, f"{session} has no share"
            ending[end.id] += 1
            through.update(node.id for node in path)
            if meter.spend(NODE_ITEMS // 8 * len(path)):
                yield
        tokens = 0
        for node in nodes:
            kept = getattr(node, self._mark)
            assert kept == through[node.id], f"{node} is kept by {kept} sessions"
            for state in node.states:
                assert getattr(state, self._mark) == ending[node.id], f"state of {node}"
            tokens += len(node.key) if kept else 0
            if meter.spend(NODE_ITEMS // 4):
                yield
        assert self.tokens == tokens <= self.budget, f"{self.tokens} tokens are kept, not {tokens}"
        shares = self._shares.values()
        assert sum(share.tokens for share in shares) == tokens, "shares have other tokens"
        assert sum(len(share.sessions) for share in shares) == len(self._ends), "other sessions"

    def _drop(self, session: Session, cause: str | None = None) -> list[TreeNode]:
        """End the marks of `session`, if it has any; return their nodes."""
        end, _ = self._ends.pop(session, (None, 0.0))
        if end is None:
            return []
        if cause is not None:
            self._metrics.ended.labels(self._tier, cause).inc()
        path, share = end.path_up(), self._shares[session.tenant]
        for node in path:
            self._count(node, -1)
            if not getattr(node, self._mark):
                self.tokens -= len(node.key)
                share.tokens -= len(node.key)
        self._leave_share(session)
        for state in end.states:
            self._count(state, -1)
        ending = self._ending_at[end.id]
        del ending[session]
        if not ending:
            del self._ending_at[end.id]
        return path

    def _leave_share(self, session: Session) -> None:
        """`session` has ended."""
        share = self._shares[session.tenant]
        del share.sessions[session]
        if not share.sessions:
            del self._shares[session.tenant]

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

    Attributes:
        now: Seconds of the tick, equal on all ranks. Read only.
    """

    def __init__(
        self, share: float = 0.0, ttl: float = 0.0, registry: CollectorRegistry | None = None
    ) -> None:
        self._share = share
        self._ttl = ttl
        self.now = 0.0
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
        until = self.now + self._ttl
        return [node for tier in self.tiers for node in tier.keep(session, end, until)]

    def renew(self, session: Session) -> None:
        """Begin the time to live of the marks of `session` anew."""
        for tier in self.tiers:
            tier.renew(session, self.now + self._ttl)

    def close(self, session: Session) -> list[TreeNode]:
        """End the marks of `session`. Returns their nodes."""
        return [node for tier in self.tiers for node in tier.close(session)]

    def expire(self, now: float) -> list[TreeNode]:
        """End the marks whose time is over at `now`, seconds of the tick. Returns their nodes."""
        self.now = now
        return [node for tier in self.tiers for node in tier.expire(now)]

    def on_delete(self, node: TreeNode) -> None:
        """See `NodeKeeper`."""
        for tier in self.tiers:
            tier.on_delete(node)

    def on_reset(self, nodes: Sequence[TreeNode]) -> None:
        """See `NodeKeeper`: all marks end."""
        for tier in self.tiers:
            tier.clear()

    def check(self, nodes: Sequence[TreeNode]) -> Parts:
        """Assert that the marks fit the sessions, in parts."""
        for tier in self.tiers:
            yield from tier.check(nodes)
