"""Recurrent states in the tree of one tier, in any order of requests, splits and evictions."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from rigs.caches.cache_rig import RigRequest
from rigs.caches.random_runs import run_machine
from rigs.caches.state_rig import StateRequest, StateRig, depth
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=1, suite="base-a-test-cpu")

EVICTION = ("lru", "lfu", "fifo", "mru", "filo", "priority", "slru")


def prefixes_with_states(request: RigRequest) -> list[tuple[int, ...]]:
    """Prefixes with states that the tree has taken over from a request."""
    found, node = [], request.last_node
    while node.parent is not None:
        if node.states[0].value is not None:
            found.append(tuple(request.kv_committed_ids[: depth(node)]))
        node = node.parent
    return found


class States(RuleBasedStateMachine):
    """The tree of one tier against a dictionary of prefixes, with tiny pools."""

    shapes = st.lists(st.integers(0, 1), min_size=1, max_size=6)

    def __init__(self) -> None:
        super().__init__()
        self.rig: StateRig
        self.running: list[RigRequest] = []
        self.states: dict[tuple[int, ...], None] = {}
        """The model: prefixes whose state the tree was given."""
        self.has_evicted = False
        self._count = 0

    @initialize(
        page_size=st.sampled_from((1, 2, 4)),
        pages=st.integers(20, 40),
        num_states=st.integers(6, 16),
        factor=st.sampled_from((1, 2)),
        eviction=st.sampled_from(EVICTION),
    )
    def build(
        self, page_size: int, pages: int, num_states: int, factor: int, eviction: str
    ) -> None:
        self.rig = StateRig(
            l1_pages=pages, page_size=page_size, num_states=num_states, eviction_policy=eviction,
            alignment=factor * page_size,
        )  # fmt: skip

    def tokens(self, shape: list[int], tail: int) -> list[int]:
        page = self.rig.page_size
        starts = [(2 * at + which) * 10 for at, which in enumerate(shape)]
        ids = [start + n for start in starts for n in range(page)]
        return [*ids, *range(900, 900 + tail % page)]

    def longest(self, ids: list[int]) -> int:
        """Tokens that a match can reuse, by the model."""
        known = (len(one) for one in self.states if tuple(ids[: len(one)]) == one)
        return max((length for length in known if length < len(ids)), default=0)

    @precondition(lambda self: len(self.running) < 2)
    @rule(shape=shapes, tail=st.integers(0, 3), finish=st.sampled_from((None, True, False)))
    def start(self, shape: list[int], tail: int, finish: bool | None) -> None:
        rig, ids = self.rig, self.tokens(shape, tail)
        has_room = rig.allocator.available_size() >= 7 * rig.page_size
        if not has_room or rig.mamba.available_size() < 3:
            self.has_evicted = True
        longest = self.longest(ids)
        request, reused = rig.start(ids)
        if self.has_evicted:
            assert reused.total == 0 or tuple(ids[: reused.total]) in self.states
        else:
            assert reused.total == longest
        self.states.update(dict.fromkeys(prefixes_with_states(request)))
        self.running.append(request)
        if finish is not None:
            self.finish(inserted=finish)

    @precondition(lambda self: self.running)
    @rule(inserted=st.booleans())
    def finish(self, inserted: bool) -> None:
        request = self.running.pop()
        assert isinstance(request, StateRequest)
        behind = request.mamba_last_track_seqlen
        if inserted and behind:
            self.states[tuple(request.kv_committed_ids[:behind])] = None
        self.rig.finish(request, is_insert=inserted)

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 1))
    def go_on(self, which: int) -> None:
        request = self.running[which % len(self.running)]
        assert isinstance(request, StateRequest)
        if behind := request.mamba_last_track_seqlen:
            self.states[tuple(request.kv_committed_ids[:behind])] = None
        self.rig.tree.cache_unfinished_req(request)

    @rule(tokens=st.integers(0, 30), states=st.integers(0, 4))
    def evict(self, tokens: int, states: int) -> None:
        self.has_evicted |= bool(tokens or states)
        tree, mamba = self.rig.tree, self.rig.mamba
        can = min(states, tree.mamba_evictable_size())
        before = mamba.available_size(), self.rig.allocator.available_size()
        result = tree.evict(EvictParams(num_tokens=tokens, mamba_num=states))
        assert result.mamba_num_evicted >= can
        assert mamba.available_size() - before[0] == result.mamba_num_evicted
        assert self.rig.allocator.available_size() - before[1] == result.num_tokens_evicted

    @rule(shape=shapes, tail=st.integers(0, 3))
    def match(self, shape: list[int], tail: int) -> None:
        ids = self.tokens(shape, tail)
        match = self.rig.match(ids)
        found, branching = len(match.device_indices), match.mamba_branching_seqlen
        if not self.has_evicted:
            assert found == self.longest(ids)
        if branching is not None:
            assert found < branching < len(ids)
            assert branching % self.rig.alignment == 0

    @rule(shape=shapes)
    def wait(self, shape: list[int]) -> None:
        self.rig.arrive(f"w{self._count}", self.tokens(shape, 0))
        self._count += 1

    @precondition(lambda self: self._count)
    @rule(which=st.integers(0, 9))
    def leave(self, which: int) -> None:
        self.rig.tree.release_aborted_request(f"w{which % self._count}")

    @invariant()
    def books_balance(self) -> None:
        if hasattr(self, "rig"):
            self.rig.check(self.running)

    def teardown(self) -> None:
        if hasattr(self, "rig"):
            for request in self.running:
                self.rig.finish(request)
            self.rig.settle()
            everything = EvictParams(num_tokens=self.rig.allocator.size)
            self.rig.tree.evict(everything)
            assert self.rig.mamba.available_size() == self.rig.num_states


def test_any_order_of_requests_splits_and_evictions() -> None:
    run_machine(States, 60)
