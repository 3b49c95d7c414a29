"""Snapshots of decode steps whose drafts are verified while the step before is in flight."""

from __future__ import annotations

import pytest
import torch

from rigs.caches.state_rig import StateRig
from sglang.srt.managers.scheduler.requests.req import Req
from sglang.srt.managers.scheduler.snapshots import Snapshots
from sglang.srt.mem_cache.tree.radix_key import token_array
from sglang.srt.messages.io_struct import TokenizedGenerateReqInput
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=1, suite="base-a-test-cpu")

WIDTH = 4


class Decoding:
    """A request with 14 computed tokens, of which each step verifies four; snapshots stand behind
    8, 16, 24 tokens."""

    def __init__(self) -> None:
        self.rig = rig = StateRig(num_states=2)
        self.pool = rig.mamba
        self.snapshots = Snapshots(rig.tree, self.pool, interval=8)
        message = TokenizedGenerateReqInput(
            rid="r", input_ids=token_array(range(14)), sampling_params=SamplingParams(), seed=0
        )
        self.req = Req(message, max_new_tokens=20)
        self.req.progress.kv_committed_len = 14

    def launch(self) -> tuple[list[int], list[int]] | None:
        """Launch a step. Returns the slot of its snapshot, and after how many of its tokens it is
        taken if all tokens in flight are accepted."""
        progress = self.req.progress
        left = self.snapshots.in_decoding([self.req], [progress.next_seq_len + WIDTH], WIDTH)
        progress.num_in_flight += WIDTH
        return left

    def accept(self) -> None:
        """A step in flight ends, and all its tokens are accepted."""
        for _ in range(WIDTH):
            self.req.progress.num_in_flight -= 1
            self.req.progress.kv_committed_len += 1
            self.snapshots.on_counted(self.req)


def test_either_of_two_steps_leaves_the_snapshot_that_both_may_reach() -> None:
    decoding = Decoding()
    first, second = decoding.launch(), decoding.launch()
    assert first is not None and second is not None
    (slot,), _ = first
    assert first == ([slot], [2]) and second == ([slot], [-2])
    decoding.accept()
    slots = decoding.req.slots
    assert slots.mamba_track_slot is not None and slots.mamba_track_slot.tolist() == [slot]
    assert slots.mamba_last_track_seqlen == 16


@pytest.mark.parametrize("was_retracted", [False, True])
def test_no_step_leaves_a_snapshot_that_the_step_before_it_had_no_slot_for(
    was_retracted: bool,
) -> None:
    """A slot comes free between the two. If the first step accepts all its tokens, no step writes
    to the slot."""
    decoding = Decoding()
    if was_retracted:
        # The retracted request has not come to its snapshot, and is computed again.
        assert decoding.launch() == ([1], [2])
        decoding.req.progress.num_in_flight = 0
        decoding.snapshots.release(decoding.req)
    others = decoding.pool.take(2)
    assert others == [1, 2]
    assert decoding.launch() is None
    decoding.pool.free(others)
    assert decoding.launch() is None
    decoding.accept()
    assert decoding.req.slots.mamba_track_slot is None
    assert decoding.req.slots.mamba_last_track_seqlen is None
    assert decoding.pool.available_size() == 2


@pytest.mark.parametrize(("saved", "is_kept"), [(1, False), (2, True)])
def test_a_snapshot_that_saves_a_page_is_given_up_before_a_state_of_the_tree(
    saved: int, is_kept: bool
) -> None:
    decoding = Decoding()
    rig, slots = decoding.rig, decoding.req.slots
    rig.run(list(range(100, 101 + rig.page_size)))
    assert rig.tree.mamba_evictable_size() == 1
    taken = decoding.pool.take(decoding.pool.available_size())
    assert taken is not None
    slots.mamba_track_slot = torch.tensor(taken[:1])
    slots.cache_protected_len = 8
    slots.mamba_last_track_seqlen = 8 + saved * rig.alignment
    decoding.snapshots.make_room([decoding.req])
    assert decoding.pool.available_size() == 1
    assert (slots.mamba_track_slot is not None) == is_kept
    assert rig.tree.mamba_evictable_size() == (not is_kept)
