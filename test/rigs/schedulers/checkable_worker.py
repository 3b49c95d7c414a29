"""Runs a checkable model (`checkable_model.py`) over real pools.

Each forward reads the whole context of each request from the pools, layer by layer as a model does,
and checks all facts that it finds. A page or a state that is wrong, stale, torn, of another request
or read before its load has landed is an error, which names layer, position and slot. CPU only; a
step takes about 100 microseconds.
"""

from __future__ import annotations

import copy
import dataclasses
import random
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rigs.drafts.checkable_drafts import CheckableSpeculation
from rigs.schedulers.checkable_model import (
    LIKELIEST,
    NOISE,
    SECOND,
    VOCAB_SIZE,
    WrongContext,
    logprob,
    second,
    tops,
    word,
)
from rigs.schedulers.checkable_pools import CheckablePools, CheckableState
from rigs.schedulers.checkable_step import Context, StateUse, Step, expect
from rigs.schedulers.lagging_device import LaggingDevice, LaggingRequests, LaggingStates
from rigs.schedulers.scheduler_rig import SchedulerRig
from sglang.srt.arg_groups.speculative import num_draft_tokens
from sglang.srt.layers.forward_batch_info import ForwardBatch
from sglang.srt.layers.logits_processor import InputLogprobs, LogitsProcessorOutput
from sglang.srt.layers.vocab_parallel_embedding import VocabLogits
from sglang.srt.managers.scheduler.batch import ModelWorkerBatch
from sglang.srt.managers.scheduler.launched_step import TpModelWorker
from sglang.srt.mem_cache.allocator import make_allocator
from sglang.srt.mem_cache.device.base_device_pool import LayerTransferCounter
from sglang.srt.mem_cache.device.state_pool import MambaPool
from sglang.srt.mem_cache.device.state_spec import RankShare, RankSplit
from sglang.srt.messages.io_struct import ToScheduler
from sglang.srt.speculative.verify_graphs import largest_verification

_DENSE = CheckableState()


class CheckableWorker(TpModelWorker):
    """A worker with real pools and a model that checks them. Single-threaded.

    The tokens of a step are not known before the device has run it. Negative numbers stand for them
    until then, so that the next step can be launched. Requests on a `device` may have no penalties:
    the counts would take these numbers for tokens.

    Args:
        page_size: Tokens of a page.
        pool_tokens: Slots of L1, in whole pages.
        max_requests: Rows of the request table.
        context_len: Most tokens of a request.
        state: State that the model keeps of a prefix.
        device: Runs the steps; None: a step runs when it is launched.
        tolerates_damage: True if wrong contexts give wrong words, as with a real model, instead of
            an error. For runs that damage L2: the engine must drop these words.
        num_draft_tokens: Tokens of a decode step for each request; above 1 the model drafts.
    """

    def __init__(
        self,
        page_size: int,
        pool_tokens: int,
        max_requests: int,
        context_len: int = 4096,
        *,
        state: CheckableState = _DENSE,
        device: LaggingDevice | None = None,
        tolerates_damage: bool = False,
        num_draft_tokens: int = 1,
    ) -> None:
        self._tolerates_damage = tolerates_damage
        state = dataclasses.replace(state, drafts=num_draft_tokens > 1)
        if device is None:
            make_states = partial(MambaPool, device="cpu")
            self._pools = CheckablePools(state, page_size, pool_tokens, make_states)
        else:
            self._pools = CheckablePools(
                state,
                page_size,
                pool_tokens,
                partial(LaggingStates, lagging=device),
                partial(LaggingRequests, lagging=device),
            )
        self._submit: Callable[[Callable[[], None]], None] = (
            (lambda work: work()) if device is None else device.submit
        )
        self.model_pools = self._pools.model_pools()
        # Drafts may lie beyond the end of the longest context.
        rows = self._pools.rows(max_requests, context_len + num_draft_tokens - 1)
        self.req_to_token_pool = rows
        self.num_draft_tokens = num_draft_tokens
        self._drafts: CheckableSpeculation | None = None
        if state.drafts:
            self._drafts = CheckableSpeculation(self._pools, rows, num_draft_tokens, self._on_wrong)
        self.token_to_kv_pool = self._pools.kv
        self.token_to_kv_pool_allocator = make_allocator(self.token_to_kv_pool)
        self.vocab_size = VOCAB_SIZE
        self.context_len = context_len
        self.eos_token_ids: tuple[int, ...] = ()
        self._loads: LayerTransferCounter | None = None
        self._num_said = 0
        self._said: dict[int, int] = {}
        """Tokens by the numbers that stand for them."""
        self.num_checked = 0
        """Positions checked in all forwards."""
        self.num_whole = 0
        """Contexts that were cached whole, in all forwards."""
        self.num_wrong = 0
        """Wrong contexts that were tolerated."""
        self.num_continued = 0
        """Contexts that went on from a state of the tree, in all forwards."""
        self.num_accepted = 0
        """Accepted drafts of all verifications."""
        self.num_rejected = 0
        """Rejected drafts of all verifications."""
        self.num_ahead = 0
        """Verifications that were launched before the end of the one before them."""

    def forward_batch_generation(
        self, batch: ModelWorkerBatch
    ) -> tuple[LogitsProcessorOutput, torch.Tensor]:
        """See `TpModelWorker`. Raises WrongContext, or the device does when results are awaited."""
        forward, verified = batch.forward, batch.verified
        if verified is not None:
            most = largest_verification(self.num_draft_tokens)
            expect(forward.batch_size <= most, f"{forward.batch_size} of at most {most} requests")
        step = Step(self._pools, [], verified is not None)
        is_ahead = verified is not None and verified.behind is not None
        if not is_ahead:
            step.contexts = self._contexts(batch)
        num_rows = len(batch.seeds)
        tokens = -1 - torch.arange(self._num_said, self._num_said + num_rows)
        self._num_said += num_rows
        output = LogitsProcessorOutput(logits=VocabLogits.of(torch.empty(0)))
        if verified is not None:
            output.accepted = torch.full_like(verified.most, -1)
        if forward.return_logprob:
            output.next_token_logprobs = torch.empty(num_rows)
            if forward.top_logprobs_nums is not None:
                nums = forward.top_logprobs_nums
                expect(len(nums) == num_rows, f"{len(nums)} numbers of top logprobs")
                shape = num_rows, max(nums)
                output.next_token_top_logprobs_val = torch.zeros(shape)
                output.next_token_top_logprobs_idx = torch.zeros(shape, dtype=torch.int64)
            if forward.extend_logprob_start_lens_cpu is not None:
                output.input_logprobs = InputLogprobs([], [])
        counter = self._awaiting(batch.hicache_consumer_index)
        numbers = tokens.tolist()
        # The next step changes the rows, maybe before this one has run.
        table = None if self._drafts is None else self.req_to_token_pool.req_to_token.clone()
        self._submit(partial(self._run, batch, step, counter, output, tokens, numbers, table))
        return output, tokens

    def verifies_ahead(self, batch_size: int) -> bool:
        """See `TpModelWorker`: what a step reads is known when it runs."""
        return self._drafts is not None

    def _take_up(self, batch: ModelWorkerBatch, table: torch.Tensor) -> list[Context]:
        """The requests of a verification that was launched before the end of the one before it."""
        forward, width = batch.forward, self.num_draft_tokens
        forward.req_to_token_pool = copy.copy(forward.req_to_token_pool)
        forward.req_to_token_pool.req_to_token = table
        batch.take_up()
        most, forward.seq_lens_cpu = forward.seq_lens_cpu, forward.seq_lens.tolist()
        pairs = list(zip(forward.seq_lens_cpu, most, strict=True))
        expect(all(end - width < length <= end for length, end in pairs), f"lengths {pairs}")
        forward.extend_prefix_lens_cpu = [length - width for length in forward.seq_lens_cpu]
        self.num_ahead += 1
        return self._contexts(batch)

    def _awaiting(self, load: int) -> LayerTransferCounter | None:
        """The counter of loads as it is for a step that waits for `load`. Steps that are launched
        before this one has run change it for themselves."""
        self._loads = self._loads or self.token_to_kv_pool.layer_transfer_counter
        if self._loads is None:
            return None
        self._loads.set_consumer(load)
        return copy.copy(self._loads)

    def _run(
        self,
        batch: ModelWorkerBatch,
        step: Step,
        counter: LayerTransferCounter | None,
        output: LogitsProcessorOutput,
        tokens: torch.Tensor,
        numbers: list[int],
        table: torch.Tensor | None,
    ) -> None:
        """Run a step, and fill in `output` and `tokens`, which `numbers` stood for. `table`: the
        slots of rows at its launch, for a model that drafts."""
        forward = batch.forward
        if counter is not None:
            for pool in self.model_pools.pools:
                pool.register_layer_transfer_counter(counter)
        if not step.contexts:
            assert table is not None
            step.contexts = self._take_up(batch, table)
        for one in step.contexts:
            one.new_tokens[:] = [self._said.get(token, token) for token in one.new_tokens]
        drafts = None
        if self._drafts is not None:
            assert table is not None
            self._drafts.begin(step, table)
            known = [self._said.get(token, token) for token in forward.input_ids.tolist()]
            forward.input_ids = torch.tensor(known)
            if batch.verified is not None:
                drafts = self._drafts.draft(forward)
                for one, ids in zip(step.contexts, drafts.tolist(), strict=True):
                    one.new_tokens[1:] = ids
        try:
            self._run_contexts(step, forward.begin_layer)
        finally:
            if forward.mostly_done is not None:
                forward.mostly_done.record()
        if forward.states is not None and forward.states.copied is not None:
            assert self._pools.states is not None
            MambaPool.copy_from(self._pools.states, *forward.states.copied)
        sampled = [at for one in step.hashes for at in (one if drafts is not None else one[-1:])]
        said = _adjusted_words(batch, sampled)
        self._said.update(zip(numbers, said, strict=True))
        tokens.copy_(torch.tensor(said))
        if self._drafts is not None:
            self._follow(self._drafts, batch, step, output, drafts, tokens)
        if output.next_token_logprobs is not None:
            pairs = zip(sampled, said, strict=True)
            logprobs = torch.tensor([logprob(at, token) for at, token in pairs])
            output.next_token_logprobs.copy_(logprobs)
        values, ids = output.next_token_top_logprobs_val, output.next_token_top_logprobs_idx
        if values is not None and ids is not None:
            for row, count in enumerate(forward.top_logprobs_nums or ()):
                for nth, token in enumerate(tops(sampled[row], count)):
                    values[row, nth], ids[row, nth] = logprob(sampled[row], token), token
        if output.input_logprobs is not None:
            output.input_logprobs.values[:] = _input_logprobs_of(forward, step.hashes)
            output.input_logprobs.tops[:] = [[] for _ in step.contexts]
        self.num_checked += sum(len(one.slots) for one in step.contexts)
        self.num_whole += sum(one.is_whole for one in step.contexts)
        self.num_continued += sum(
            one.state is not None and one.state.read != one.state.running for one in step.contexts
        )

    def _follow(
        self,
        speculation: CheckableSpeculation,
        batch: ModelWorkerBatch,
        step: Step,
        output: LogitsProcessorOutput,
        drafts: torch.Tensor | None,
        tokens: torch.Tensor,
    ) -> None:
        """Accept `drafts` of a verification, and let the draft layer follow the step, which has
        run."""
        snapshots = None
        if drafts is not None:
            assert output.accepted is not None and batch.verified is not None
            most, snapshots = batch.verified.most, batch.verified.snapshots
            output.accepted.copy_(speculation.accept(drafts, tokens, most))
            expect(bool((output.accepted <= most).all()), f"accepted {output.accepted} of {most}")
            num_accepted = int(output.accepted.sum())
            self.num_accepted += num_accepted
            self.num_rejected += drafts.numel() - num_accepted
        speculation.end(step, batch.forward, output.accepted, snapshots)

    def _on_wrong(self, error: WrongContext) -> None:
        if not self._tolerates_damage:
            raise error
        self.num_wrong += 1

    def _run_contexts(self, step: Step, begin_layer: Callable[[int], None]) -> None:
        """Run a step; a wrong context spoils no other if it is tolerated."""
        if not self._tolerates_damage:
            step.run(begin_layer)
            return
        for one in step.contexts:
            alone = Step(self._pools, [one], step.verifies)
            try:
                alone.run(begin_layer)
                step.hashes += alone.hashes
            except WrongContext as error:
                self._on_wrong(error)
                step.hashes.append([NOISE] * len(one.new_tokens))

    # ---- the batch -----------------------------------------------------------------------------

    def _contexts(self, batch: ModelWorkerBatch) -> list[Context]:
        """Split the batch into requests, and check its tensors for consistency."""
        forward = batch.forward
        table = forward.req_to_token_pool.req_to_token.numpy()
        rows, lengths = forward.req_pool_indices.tolist(), forward.seq_lens_cpu
        width = self.num_draft_tokens if batch.verified is not None else 1
        seeds = batch.seeds[::width].tolist()
        expect(batch.seeds.tolist() == [seed for seed in seeds for _ in range(width)], "seeds")
        expect(forward.seq_lens.tolist() == lengths, "seq_lens differs from seq_lens_cpu")
        expect(len(set(rows)) == len(rows) == len(seeds), f"rows {rows}, seeds {seeds}")
        num_new = forward.extend_seq_lens_cpu or [1] * len(rows)
        uses = self._state_uses(batch, num_new)
        tokens = forward.input_ids.repeat_interleave(width).tolist()
        page_size = self.token_to_kv_pool.page_size
        stored = forward.out_cache_loc.tolist()
        contexts: list[Context] = []
        positions: list[int] = []
        done = 0
        for row, length, new, seed, use in zip(rows, lengths, num_new, seeds, uses, strict=True):
            slots = table[row, :length].astype(np.int64)
            num_old = length - new
            if stored[done] == 0:
                num_old += 1
                expect(num_old % page_size == 0, f"row {row}, {num_old} tokens: cached in part")
                expect(
                    use is None or use.is_restored,
                    f"row {row}: its state includes the token to be computed",
                )
            contexts.append(Context(row, seed, slots, num_old, tokens[done : done + new], use))
            positions += range(length - new, length)
            done += new
        expect(done == len(tokens), f"{len(tokens)} tokens, {done} of them of a request")
        expect(forward.positions.tolist() == positions, "positions are not the requests'")
        written = np.concatenate([one.slots[one.num_old :] for one in contexts])
        expect(
            [slot for slot in stored if slot] == written.tolist(),
            "out_cache_loc are not the slots of the new positions",
        )
        read = np.concatenate([one.slots[: one.num_old] for one in contexts])
        both = np.concatenate([written, np.unique(read)])
        expect(
            len(np.unique(both)) == len(both), "a slot is written that a context of the batch has"
        )
        smallest = int(both.min())
        expect(smallest >= page_size, f"slot {smallest} is padding")
        return contexts

    def _state_uses(
        self, batch: ModelWorkerBatch, num_new: Sequence[int]
    ) -> Sequence[StateUse | None]:
        """The states that the batch uses, one for each request, checked for consistency."""
        forward, pool = batch.forward, self._pools.states
        states = forward.states
        if states is None or pool is None:
            expect(states is None and pool is None, "states do not fit the model")
            return [None] * len(num_new)
        running, read = states.slots.tolist(), states.read_slots.tolist()
        snapshots = [0] * len(num_new) if states.track_slots is None else states.track_slots
        lens = states.track_lens_cpu or [0] * len(num_new)
        if batch.verified is not None:
            expect(states.track_slots is None, "snapshots of a prefill and of a verification")
            if batch.verified.snapshots is not None:
                snapshots, lens = (part.tolist() for part in batch.verified.snapshots)
        taken = [slot for slot in map(int, snapshots) if slot]
        ended, restored = dict[int, int](), dict[int, int]()
        if states.copied is not None:
            for source, target in zip(*(slots.tolist() for slots in states.copied), strict=True):
                if source in running:
                    ended[source] = target
                else:
                    expect(not forward.forward_mode.is_decode(), "a decode step restores a state")
                    expect(pool.spec.is_repeatable, "states take a token twice")
                    restored[target] = source
            if forward.forward_mode.is_decode():
                expect(states.track_slots is None, "snapshots of a prefill and of a decode step")
            taken += ended.values()
        expect(
            restored.keys() <= set(running),
            f"copies {ended}, {restored}; running are {running}",
        )
        written = [*running, *taken]
        expect(len(set(written)) == len(written), f"states are written twice: {written}")
        used = {*written, *read}
        expect(min(used) > 0 and max(used) <= pool.size, f"there are no such states: {used}")
        others = {slot for slot, own in zip(read, running, strict=True) if slot != own}
        expect(not others & set(written), f"states are read and written: {written}, {read}")
        alignment, uses = self._pools.state.alignment, []
        for source, own, snapshot, behind, new, length in zip(
            read, running, map(int, snapshots), lens, num_new, forward.seq_lens_cpu, strict=True
        ):
            at = length - new + behind
            expect(bool(snapshot) == bool(behind), f"snapshot {snapshot} behind {behind} tokens")
            expect(not snapshot or behind <= new, f"a snapshot behind {behind} of {new} tokens")
            expect(not snapshot or at % alignment == 0, f"a snapshot behind {at} tokens")
            is_restored = own in restored
            expect(not is_restored or (source == restored[own] and new == 1), "a state is restored")
            use = StateUse(
                read=source, running=own, snapshot=snapshot, snapshot_len=behind,
                is_restored=is_restored,
            )  # fmt: skip
            uses.append(use)
        for slot in ended:
            at = forward.seq_lens_cpu[running.index(slot)]
            expect(at % alignment == 0, f"a snapshot behind {at} tokens")
        return uses


def _adjusted_words(batch: ModelWorkerBatch, hashes: Sequence[int]) -> list[int]:
    """The tokens of the rows, which follow `hashes`, with the batch's adjustments of logits."""
    if not batch.sampling_info.adjusts_logits:
        return [word(at) for at in hashes]
    logits = torch.zeros(len(hashes), VOCAB_SIZE)
    for row, at in enumerate(hashes):
        logits[row, second(at)] = SECOND
        logits[row, word(at)] = LIKELIEST
    tokens: list[int] = batch.sampling_info.adjusted(logits, batch.steps).argmax(dim=1).tolist()
    return tokens


def _input_logprobs_of(forward: ForwardBatch, hashes: list[list[int]]) -> list[list[float]]:
    starts, wanted = (
        forward.extend_logprob_start_lens_cpu,
        forward.extend_input_logprob_token_ids_cpu,
    )
    assert starts is not None and wanted is not None
    return [
        [logprob(one[start + i], token) for i, token in enumerate(ids)]
        for one, start, ids in zip(hashes, starts, wanted, strict=True)
    ]


class CheckableRig(SchedulerRig):
    """A scheduler whose model is a `CheckableWorker`.

    Args:
        state: State that the model keeps, of all heads.
        heads: Heads of a rank; 0: all ranks have the same head.
        most_lag_s: See `LaggingDevice`; 0: steps run when they are launched.
        tolerates_damage: See `CheckableWorker`.
        args: Arguments of `SchedulerRig`.
    """

    device = "cpu"

    def __init__(
        self,
        model_path: Path,
        *,
        state: CheckableState | None = None,
        heads: int = 0,
        most_lag_s: float = 0.0,
        tolerates_damage: bool = False,
        **args: Any,
    ) -> None:
        self._tolerates_damage = tolerates_damage
        self._state, self._heads = state or CheckableState(), heads
        self._most_lag_s = most_lag_s
        self._device: LaggingDevice | None = None
        alignment = self._state.alignment if self._state.num_states else None
        super().__init__(model_path, snapshot_alignment=alignment, **args)
        policy = self.scheduler._draft_policy
        # Both kinds of steps, often in turn. Not by the environment, which threads of ranks share.
        policy.always = False
        policy.first_steps, policy.trial_steps, policy.period_steps = 3, 2, 4

    def make_worker(
        self, model_path: Path, page_size: int, pool_tokens: int | None, max_requests: int
    ) -> CheckableWorker:
        assert pool_tokens is not None, "the driver draws the size of L1"
        state, count = self._state, self._heads
        if count:
            begin, total = self.group.attn_tp_rank * count, self.group.attn_tp_size * count
            share = RankShare(RankSplit.HEADS, begin, begin + count, total)
            state = dataclasses.replace(state, heads=share)
        if self._most_lag_s:
            self._device = LaggingDevice.new(random.Random(self.group.rank), self._most_lag_s)
        worker = CheckableWorker(
            page_size,
            pool_tokens,
            max_requests,
            state=state,
            device=self._device,
            tolerates_damage=self._tolerates_damage,
            num_draft_tokens=num_draft_tokens(self.server_args),
        )
        self.model_pools = worker.model_pools
        return worker

    def step(self, *messages: ToScheduler) -> None:
        if self._device is not None:
            self._device.make_current()
        super().step(*messages)

    def close(self) -> None:
        if self._device is not None:
            self._device.make_current()
        super().close()
        if self._device is not None:
            self._device.close()
