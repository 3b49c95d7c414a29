"""Replays requests on the real prefix cache of a model with recurrent states, without a model.

Pages are simulated as in `cache_simulation.py`. States are slots of the engine's pool, a few bytes
each. The scheduler's `Snapshots` decides where a request starts and where it leaves snapshots.
Requests have the scheduler's class. Each is served whole, or admitted and finished later.

One thread, and the copy threads of the hierarchical cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from rigs.bench.cache_simulation import Arrangement, CacheSizes, SimulatedCache
from sglang.srt.managers.scheduler.policy import ceil_to_page
from sglang.srt.managers.scheduler.requests.req import Req
from sglang.srt.managers.scheduler.snapshots import Snapshots
from sglang.srt.mem_cache.base_prefix_cache import InitLoadBackParams, MatchPrefixParams
from sglang.srt.mem_cache.device.memory_pool import HybridReqToTokenPool, ReqToTokenPool
from sglang.srt.mem_cache.device.state_pool import MambaPool, MambaSpec
from sglang.srt.mem_cache.hiradix_cache import HiRadixCache
from sglang.srt.mem_cache.tree.radix_key import TokenArray
from sglang.srt.messages.io_struct import TokenizedGenerateReqInput
from sglang.srt.sampling.sampling_params import SamplingParams

MIN_STATES: Final = 3
"""States of one request: one to run on, one to start from, and one for its snapshot."""
_SPEC: Final = MambaSpec.of_shapes(
    (1,), (1, 1, 1), (1, 1), ssm_dtype=torch.float32, conv_dtype=torch.bfloat16
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSettings:
    """The recurrent states of a simulated engine. Distances are tokens.

    Raises:
        ValueError: There are too few states for one request.
    """

    num_states: int
    """States that fit into L1."""
    alignment: int
    """Tokens between possible snapshots."""
    track_interval: int = 0
    """Tokens between the snapshots of a request that decodes; 0: it leaves none."""
    max_per_path: int = -1
    """See `StateComponent`."""

    def __post_init__(self) -> None:
        if self.num_states < MIN_STATES:
            raise ValueError(f"{self.num_states} states: a request needs {MIN_STATES}")


def divide_memory(
    total_pages: int, *, ratio: float, state_pages: int, longest_pages: int
) -> tuple[int, int] | None:
    """Divide the memory of `total_pages` between pages and states.

    Args:
        ratio: Bytes of states for each byte of pages (`--mamba-full-memory-ratio`).
        state_pages: Pages that take the memory of one state.
        longest_pages: Pages of the longest request.

    Returns:
        Pages and states; None: they cannot hold the longest request.
    """
    pages = int(total_pages / (1 + ratio))
    states = (total_pages - pages) // state_pages
    return (pages, states) if pages >= longest_pages and states >= MIN_STATES else None


@dataclass(slots=True, kw_only=True)
class Running:
    """A request that was admitted and has not ended; numbers are tokens."""

    req: Req
    answer: TokenArray
    device: int = 0
    """Tokens of the prompt that were used from L1."""
    host: int = 0
    """Those from L2."""
    slots_end: int = 0
    """Tokens that have slots."""


class SimulatedStateCache(SimulatedCache):
    """A `SimulatedCache` that serves requests in the steps of the scheduler: prompts in chunks, and
    answers.

    Args:
        sizes: Pages of the tiers. The ratio of L2 to L1 is the same for states.
        states: None: the model has only keys and values.
        page_size: Tokens.
        arrangement: Arrangement of the tiers.
        max_tokens: Tokens of the longest prompt with its answer.
        chunk_tokens: Most prompt tokens of one step; whole pages.
        policy: Order of eviction.
        max_requests: Most requests that run at once.

    Raises:
        ValueError: Snapshots do not end with pages.

    Attributes:
        snapshots_kept: Snapshots that the tree took over.
    """

    def __init__(
        self,
        sizes: CacheSizes,
        states: StateSettings | None,
        *,
        page_size: int,
        arrangement: Arrangement,
        max_tokens: int,
        chunk_tokens: int,
        policy: str = "lru",
        max_requests: int = 1,
    ) -> None:
        columns = ceil_to_page(max_tokens, page_size)
        pool = None if states is None else MambaPool(_SPEC, states.num_states, "cpu")
        self._rows = (
            ReqToTokenPool(max_requests, columns, "cpu")
            if pool is None
            else HybridReqToTokenPool(max_requests, columns, "cpu", pool)
        )
        super().__init__(
            sizes,
            page_size=page_size,
            policy=policy,
            arrangement=arrangement,
            rows=self._rows,
            states=pool,
            alignment=None if states is None else states.alignment,
            max_per_path=-1 if states is None else states.max_per_path,
        )
        self._interval = 0 if states is None else states.track_interval
        self._snapshots = None
        if pool is not None and self._tree.mamba_snapshot_alignment is not None:
            self._snapshots = Snapshots(self._tree, pool, self._interval)
        self._chunk_tokens = chunk_tokens
        self.snapshots_kept = 0

    @property
    def states_in_l1(self) -> int:
        """States of the tree in L1, between two requests."""
        return self._tree.mamba_evictable_size()

    def serve_with_answer(
        self, prompt: TokenArray, answer: TokenArray, priority: int = 0, rid: str = ""
    ) -> tuple[int, int]:
        """Serve one prompt, and decode `answer`, whose last token is not computed. Returns the
        prompt's tokens that were used from L1, and from L2."""
        running = self.admit(prompt, answer, priority, rid)
        self.finish(running)
        return running.device, running.host

    def admit(
        self,
        prompt: TokenArray,
        answer: TokenArray,
        priority: int = 0,
        rid: str = "",
        *,
        reserve: bool = False,
    ) -> Running:
        """Compute a prompt. Its request holds its pages and state until `finish`.

        Args:
            reserve: True to take the pages of its answer too. Requests that decode together
                have theirs before the first of them ends.
        """
        message = TokenizedGenerateReqInput(
            rid=rid, input_ids=prompt, sampling_params=SamplingParams(), seed=0, priority=priority
        )
        running = Running(req=Req(message, max_new_tokens=max(1, len(answer))), answer=answer)
        running.device, running.host, branching = self._reuse(running.req)
        self._prefill(running, branching)
        if reserve:
            self._grow(running, len(prompt) + len(answer) - 1)
        self._settle()
        return running

    def finish(self, running: Running) -> None:
        """Decode the answer, and end the request."""
        req = running.req
        if len(running.answer):
            self._decode(running)
        before = self.states_in_l1
        self._tree.cache_finished_req(req.slots)
        self.snapshots_kept += self.states_in_l1 - before
        if self._snapshots is not None:
            self._snapshots.release(req)
        self._rows.free(req.slots)
        self._settle()

    def _reuse(self, req: Req) -> tuple[int, int, int | None]:
        """Lock the longest usable prefix, and load the part that is only in L2. Returns its tokens
        in L1 and in L2, and where others turned off further down."""
        tree, slots = self._tree, req.slots
        match = tree.match_prefix(MatchPrefixParams(req.match_key(), req=slots))
        tree.note_scheduled(req.rid)
        prefix, node = match.device_indices, match.last_device_node
        tree.inc_lock_ref(node)
        if match.host_hit_length or match.mamba_host_hit_length:
            loaded, lower = tree.init_load_back(
                InitLoadBackParams(match.best_match_node, match.host_hit_length, req=slots)
            )
            tree.inc_lock_ref(lower)
            tree.dec_lock_ref(node)
            node = lower
            prefix = torch.cat([prefix, loaded])[: node.depth]
            if isinstance(tree, HiRadixCache):
                counter = tree.cache_controller.layer_done_counter
                counter.set_consumer(tree.ready_to_load_host_cache())
        slots.last_node, slots.prefix_indices = node, prefix
        slots.cache_protected_len = len(prefix)
        req.progress.kv_committed_len = min(len(prefix), req.progress.num_tokens - 1)
        device = min(len(match.device_indices), len(prefix))
        return device, len(prefix) - device, match.mamba_branching_seqlen

    def _prefill(self, running: Running, branching: int | None) -> None:
        """Compute the rest of the prompt in chunks."""
        req = running.req
        tree, slots, progress = self._tree, req.slots, req.progress
        first_state = tree.pin_state(slots.last_node)
        self._take_row(running)
        while rest := progress.uncommitted_tokens:
            extend = min(rest, self._chunk_tokens)
            slot = length = end_slot = 0
            if self._snapshots is not None:
                extend = self._snapshots.shorten(extend, progress.kv_committed_len, branching)
            self._grow(running, progress.kv_committed_len + extend)
            if self._snapshots is not None:
                slot, length, end_slot = self._snapshots.in_prefill(req, extend)
            if first_state:
                tree.unpin_state(slots.last_node)
                first_state = 0
            if slot:
                slots.mamba_last_track_seqlen = progress.kv_committed_len + length
            progress.kv_committed_len += extend
            tree.cache_unfinished_req(slots, chunked=extend < rest)
            self.snapshots_kept += bool(slot) and slots.mamba_track_slot is None
            if self._snapshots is not None and end_slot:
                self._snapshots.on_counted(req)

    def _decode(self, running: Running) -> None:
        """Decode up to the last token of the answer; only snapshots have an effect."""
        req, answer = running.req, running.answer
        begin, end = len(req.spec.input_ids), len(req.spec.input_ids) + len(answer)
        req.progress.output_ids.extend(answer.tolist())
        if self._snapshots is not None and self._interval:
            first = (begin // self._interval + 1) * self._interval
            for length in range(first, end, self._interval):
                self._grow(running, length)
                self._snapshots.in_decoding([req], [length])
                req.progress.kv_committed_len = length
                self._snapshots.on_counted(req)
        self._grow(running, end - 1)
        req.progress.kv_committed_len = end - 1

    def _take_row(self, running: Running) -> None:
        """A row, and with recurrent states one to run on."""
        if self._snapshots is not None:
            self._snapshots.make_room(())
        rows = self._rows.alloc([running.req.slots])
        assert rows is not None, "no more requests run at once than there are rows"
        prefix = running.req.slots.prefix_indices
        self._rows.write((rows[0], slice(0, len(prefix))), prefix)
        running.slots_end = len(prefix)

    def _grow(self, running: Running, end: int) -> None:
        """Give a request slots up to token `end`, in whole pages."""
        missing = ceil_to_page(end, self._page_size) - running.slots_end
        if missing > 0:
            begin = running.slots_end
            running.slots_end += missing
            columns = (running.req.slots.row, slice(begin, running.slots_end))
            self._rows.write(columns, self._compute(missing))
