"""Drafts by the checkpoint's own layer (MTP), and the state that this layer keeps.

The layer reads the model's hidden state at position j - 1 and the token at position j, and predicts
the token at j + 1. Its entry for this pair lies in the slot of token j, in one more layer of the
primary pool. An entry does not depend on later tokens, so a cached page suits every prompt that
begins with its tokens. All tiers store the entries like the other layers. Position 0 has no entry:
the layer's rows of slots begin at position 1.

An entry needs the hidden state before it. `HiddenRows` keeps, for each request, the hidden state of
its last computed token. A model with recurrent states keeps it in a pool that shares their slots,
so a snapshot has it too.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from sglang.srt.environ import envs
from sglang.srt.hardware_backend.device_runtime import on_device
from sglang.srt.layers.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.layers.linear_attention.verify import VerifyBuffers, commit_verified
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.mem_cache.device.base_device_pool import PagedDevicePool
from sglang.srt.mem_cache.device.state_pool import MambaPool, MambaSpec, StatePool
from sglang.srt.mem_cache.device.state_spec import PoolName, StateSpec
from sglang.srt.speculative.verify_graphs import (
    MAX_TOKENS,
    Snapshots,
    VerifyGraphs,
    largest_verification,
)

if TYPE_CHECKING:
    from sglang.srt.layers.context_parallel import SplitHidden
    from sglang.srt.model_executor.model_runner import ModelRunner


def verification_bytes(specs: Iterable[StateSpec], num_draft_tokens: int, num_logits: int) -> int:
    """Bytes of device memory that verifications take beside the pools: logits of captured ones,
    as computed and as sampled, and what recurrences keep of their tokens.

    Args:
        specs: Specs of the model's state.
        num_draft_tokens: Tokens of a verification for each request; 1: there are none.
        num_logits: Logits of a token on this rank.
    """
    if num_draft_tokens == 1:
        return 0
    kept = (
        VerifyBuffers.of(
            spec,
            max_batch_size=largest_verification(num_draft_tokens),
            num_draft_tokens=num_draft_tokens,
            device="meta",
        ).num_bytes
        for spec in specs
        if isinstance(spec, MambaSpec)
    )
    return sum(kept) + 2 * 4 * MAX_TOKENS * num_logits


class LastHidden:
    """The hidden state of the last computed token of each request, `[hidden_size]`."""

    def __init__(self, runner: ModelRunner) -> None:
        pool = runner.pools.get(PoolName.HIDDEN)
        assert pool is None or isinstance(pool, StatePool)
        self._pool = pool
        self._rows = runner.req_to_token_pool.last_hidden

    def read(self, batch: ForwardBatch) -> torch.Tensor:
        """`[bs, hidden_size]`: of the last token that each request computed before this step. It
        means nothing for a request that begins at its first token, or computes a cached one."""
        if self._rows is not None:
            return self._rows.table.index_select(0, batch.req_pool_indices)
        assert batch.states is not None, "the model has recurrent states"
        return self._table().index_select(0, batch.states.read_slots)

    def write(self, batch: ForwardBatch, hidden: torch.Tensor) -> None:
        """Keep `hidden`, `[bs, hidden_size]`, the hidden states of this step's last tokens."""
        if self._rows is not None:
            self._rows.table.index_copy_(0, batch.req_pool_indices, hidden)
            return
        assert batch.states is not None, "the model has recurrent states"
        self.write_snapshots(batch.states.slots, hidden)

    def write_decoded(self, batch: ForwardBatch) -> None:
        """Copy what `write` kept to the snapshots of a decode step (`StateBatch.copied`)."""
        if batch.states is not None and batch.states.copied is not None:
            running, targets = batch.states.copied
            self.write_snapshots(targets, self._table().index_select(0, running))

    def write_snapshots(self, slots: torch.Tensor, hidden: torch.Tensor) -> None:
        """Keep `hidden`, `[n, hidden_size]`, beside the states in `slots`, int64 `[n]`."""
        self._table().index_copy_(0, slots, hidden)

    def _table(self) -> torch.Tensor:
        """`[slots, hidden_size]`. Waits for a load that fills it."""
        assert self._pool is not None
        return self._pool.buffers[0][self._pool.wait_for_layer(self._pool.end_layer)]


class EAGLEWorker:
    """Drafts before a verification, and keeps the draft layer's entries in step with the model's.

    Only the thread that runs the model uses it. A call queues work on the device and does not wait
    for it.

    Args:
        runner: A runner with a draft layer and pools.
        num_draft_tokens: Tokens of a verification for each request: its newest, and the drafts.
    """

    def __init__(self, runner: ModelRunner, num_draft_tokens: int) -> None:
        self._runner = runner
        self.num_draft_tokens = num_draft_tokens
        self._last = LastHidden(runner)
        self._simulated = envs.SGLANG_SIMULATE_ACC_LEN.get()
        self._num_verified = 0
        rows = copy.copy(runner.req_to_token_pool)
        rows.req_to_token = rows.req_to_token[:, 1:]
        self._rows = rows
        """Rows of slots from position 1 on."""
        pool = runner.pools.get(PoolName.MAMBA)
        assert pool is None or isinstance(pool, MambaPool)
        self._states = pool
        self._verified: VerifyBuffers | None = None
        if pool is not None:
            assert isinstance(pool.spec, MambaSpec)
            self._verified = VerifyBuffers.of(
                pool.spec,
                max_batch_size=min(rows.size, largest_verification(num_draft_tokens)),
                num_draft_tokens=num_draft_tokens,
                device=pool.device,
            )
        self._graphs: VerifyGraphs | None = None
        sizes = runner.capture_decoding(self._decode)
        sizes = [size for size in sizes if size <= largest_verification(num_draft_tokens)]
        if sizes:
            self._graphs = VerifyGraphs(
                runner,
                self._draft_and_verify,
                self._follow,
                num_draft_tokens=num_draft_tokens,
                batch_sizes=sizes,
            )
            runner.verifications = self._graphs

    def forward(self, batch: ForwardBatch) -> tuple[torch.Tensor | None, LogitsProcessorOutput]:
        """Run the model on one step. If the step is a verification, draft its tokens first.

        Args:
            batch: See `ModelRunner.forward`, and `draft` for a verification.

        Returns:
            The drafts, int64 `[bs, num_draft_tokens - 1]` (None: no verification), and the model's
            output. The next step may overwrite both.
        """
        batch.capture_hidden = True
        if batch.forward_mode is not ForwardMode.TARGET_VERIFY:
            return None, self._runner.forward(batch)
        graphs = self._graphs_for(batch)
        if graphs is not None:
            return graphs.verify(batch)
        if batch.groups is not None:
            _read_lengths(batch)
        return self._draft_and_verify(batch)

    def graphs_of(self, batch_size: int) -> VerifyGraphs | None:
        """The graphs of verifications of `batch_size` requests; None: there are none."""
        graphs = self._graphs
        return graphs if graphs is not None and graphs.can_run(batch_size) else None

    def _graphs_for(self, batch: ForwardBatch) -> VerifyGraphs | None:
        """The graphs that run a verification; None: it runs without."""
        if batch.groups is not None and batch.groups.graph_rows is None:
            return None
        return self.graphs_of(batch.batch_size)

    def _draft_and_verify(self, batch: ForwardBatch) -> tuple[torch.Tensor, LogitsProcessorOutput]:
        drafts = self.draft(batch)
        return drafts, self._runner.forward(batch)

    def _decode(
        self, input_ids: torch.Tensor, positions: torch.Tensor, batch: ForwardBatch
    ) -> LogitsProcessorOutput:
        """A decode step of the model with `_follow`, for a graph. Returns no hidden states."""
        batch.capture_hidden = True
        output = self._runner.model.forward(input_ids, positions, batch)
        assert output.hidden_states is not None, "the step captured them"
        self._follow(batch, output.hidden_states)
        return LogitsProcessorOutput(logits=output.logits)

    def draft(self, batch: ForwardBatch) -> torch.Tensor:
        """Draft the tokens of a verification.

        Args:
            batch: The verification, with each request's newest token as `input_ids`, int64 `[bs]`.
                It gets all tokens.

        Returns:
            int64 `[bs, num_draft_tokens - 1]`.
        """
        width, bs = self.num_draft_tokens, batch.batch_size
        slots = batch.out_cache_loc.view(bs, width)
        before = batch.seq_lens - width
        tokens = [batch.input_ids]
        hidden = self._last.read(batch)
        for nth in range(width - 1):
            # The layer has an entry for each token before this one, except the first.
            one = ForwardBatch(
                forward_mode=ForwardMode.DECODE,
                input_ids=tokens[-1],
                positions=before + nth,
                req_pool_indices=batch.req_pool_indices,
                seq_lens=before + nth,
                seq_lens_cpu=[length - width + nth for length in batch.seq_lens_cpu],
                out_cache_loc=slots[:, nth].contiguous(),
                req_to_token_pool=self._rows,
                token_to_kv_pool=batch.token_to_kv_pool,
                is_captured=batch.is_captured,
                groups=batch.groups,
            )
            hidden = self._runner.forward_draft(one, hidden)
            tokens.append(self._runner.model.draft_logits(hidden).argmax())
        all_tokens = torch.stack(tokens, dim=1)
        batch.input_ids = all_tokens.flatten()
        if batch.states is not None:
            batch.states.verify = self._verified
        return all_tokens[:, 1:]

    def accept(
        self, drafts: torch.Tensor, token_ids: torch.Tensor, most: torch.Tensor
    ) -> torch.Tensor:
        """Count the drafts that the model itself has sampled.

        The output is always what the model samples, with each request's own seeds; drafts only
        decide how many of its tokens a step may use. The tokens, and so their distribution, are
        those without speculation. The model accepts a draft with the probability that it gives it,
        like rejection sampling of drafts that have no distribution (Leviathan et al., Fast
        inference from transformers via speculative decoding, 2023).

        Args:
            drafts: int64 `[bs, num_draft_tokens - 1]`.
            token_ids: int64 `[bs * num_draft_tokens]`: the model's token after each token.
            most: int64 `[bs]`: most drafts of each request that may be accepted.

        Returns:
            int64 `[bs]`.
        """
        if self._simulated:
            before, after = (
                int((self._num_verified + more) * (self._simulated - 1)) for more in (0, 1)
            )
            self._num_verified += 1
            return most.clamp(max=after - before)
        sampled = token_ids.view(len(drafts), -1)[:, :-1]
        agreed = (sampled == drafts).to(torch.int64).cumprod(dim=1).sum(dim=1)
        return torch.minimum(agreed, most)

    def follow(
        self,
        batch: ForwardBatch,
        hidden: torch.Tensor | None,
        accepted: torch.Tensor | None = None,
        snapshots: Snapshots | None = None,
    ) -> None:
        """Store the draft layer's entries of a step's tokens, and keep what the next step needs.

        Args:
            batch: The step, which `forward` has launched.
            hidden: `[num_tokens, hidden_size]`: the model's hidden states; None: a graph has done
                it.
            accepted: int64 `[bs]`: accepted drafts of each request; None: no verification.
            snapshots: Snapshots that a verification takes; None: no request leaves one.
        """
        graphs = None if accepted is None else self._graphs_for(batch)
        if graphs is not None:
            assert accepted is not None, "the step is a verification"
            graphs.follow(batch, accepted, snapshots)
            return
        if hidden is not None:
            self._follow(batch, hidden, accepted, snapshots)
        self._last.write_decoded(batch)

    @torch.inference_mode()
    def _follow(
        self,
        batch: ForwardBatch,
        hidden: torch.Tensor,
        accepted: torch.Tensor | None = None,
        snapshots: Snapshots | None = None,
    ) -> None:
        states, device = batch.states, hidden.device
        if batch.forward_mode is ForwardMode.EXTEND:
            assert batch.extend_seq_lens_cpu is not None
            ends = itertools.accumulate(batch.extend_seq_lens_cpu, initial=0)
            starts, last = on_device(list(ends)[:-1], device), batch.last_rows()
        else:
            starts = torch.arange(0, len(hidden), batch.most_new_tokens, device=device)
            last = starts if accepted is None else starts + accepted
        shifted = hidden.roll(1, dims=0)
        shifted.index_copy_(0, starts, self._last.read(batch))
        self._store(batch, shifted)
        if snapshots is None and states is not None and states.track_slots is not None:
            assert states.track_lens_cpu is not None
            snapshots = states.track_slots, on_device(states.track_lens_cpu, device)
        if snapshots is not None:
            slots, counts = snapshots
            if accepted is not None:
                self._commit(batch, counts, slots)
            at_snapshot = starts + (counts - 1).clamp_(min=0)
            self._last.write_snapshots(slots, hidden.index_select(0, at_snapshot))
        if accepted is not None and states is not None:
            self._commit(batch, accepted + 1, states.slots)
        self._last.write(batch, hidden.index_select(0, last))

    def follow_split(self, batch: ForwardBatch, split: SplitHidden) -> None:
        """`follow` of a prefill that ranks have split: this one stores the entries of its own
        tokens, and the layer's attention exchanges what the ranks have stored.

        Args:
            batch: The whole step, which has been launched.
        """
        self._store(split.batch, split.before_tokens(self._last.read(batch)))
        self._last.write(batch, split.at_last_tokens())

    def _commit(self, batch: ForwardBatch, counts: torch.Tensor, targets: torch.Tensor) -> None:
        assert batch.states is not None and self._states is not None
        assert self._verified is not None
        commit_verified(self._verified, self._states, batch.states.slots, counts, targets)

    def _clear(self, slots: torch.Tensor) -> None:
        """Zero the layer's part of `slots`, int64 `[n]`, which have no entry, so that equal
        prompts have equal pages."""
        layer = self._runner.model_config.num_hidden_layers
        for pool in self._runner.pools.values():
            if isinstance(pool, PagedDevicePool) and layer in pool.spec.layers:
                for part in pool.parts:
                    part[pool.place_to_write(layer)].index_fill_(0, slots, 0)

    def _store(self, batch: ForwardBatch, hidden: torch.Tensor) -> None:
        """Store the layer's entries of a step's tokens.

        Args:
            hidden: `[num_tokens, hidden_size]`: the hidden state before each token.
        """
        ids, positions, slots = batch.input_ids, batch.positions, batch.out_cache_loc
        prefix, new = batch.extend_prefix_lens_cpu, batch.extend_seq_lens_cpu
        if prefix is not None and 0 in prefix:
            assert new is not None
            first, kept = _parts_at_position_0(prefix, new)
            self._clear(slots.index_select(0, on_device(first, ids.device)))
            if not kept:
                return
            places = on_device(kept, ids.device)
            ids, positions, slots, hidden = (
                part.index_select(0, places) for part in (ids, positions, slots, hidden)
            )
        stored = replace(batch, input_ids=ids, positions=positions, out_cache_loc=slots)
        self._runner.store_drafts(stored, hidden)


def _read_lengths(batch: ForwardBatch) -> None:
    """Read the lengths of a verification back from the device. It may have been launched ahead, for
    a graph, and another DP group has a step that no graph runs."""
    lengths: list[int] = batch.seq_lens.tolist()
    width = len(batch.out_cache_loc) // len(lengths)
    batch.seq_lens_cpu = lengths
    batch.extend_prefix_lens_cpu = [length - width for length in lengths]


def _parts_at_position_0(prefix: Sequence[int], new: Sequence[int]) -> tuple[list[int], list[int]]:
    """Indices of a step's tokens at position 0, which have no entry, and of the others."""
    starts = itertools.accumulate(new, initial=0)
    first = [start for start, before in zip(starts, prefix, strict=False) if before == 0]
    kept: list[int] = np.delete(np.arange(sum(new)), first).tolist()
    return first, kept
