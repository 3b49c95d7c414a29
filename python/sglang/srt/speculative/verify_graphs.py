"""Verifications as CUDA graphs, for each of a few batch sizes one before sampling and one after it.

The first drafts, and runs the model over all tokens; the second stores what the next step needs. A
batch is padded like one of `CudaGraphRunner`, with requests that write to padding slots and rows.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

import torch

from sglang.srt.layers.forward_batch_info import ForwardBatch, ForwardMode, StateBatch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.model_executor.graph_capture import Graph, GraphCapture

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner

MAX_TOKENS: Final = 256
"""Most tokens of a verification. Arithmetic limits a step of more tokens, so that drafts cost what
they bring."""

Snapshots: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""Slots for snapshots of recurrent states, 0: none, and after how many of the step's tokens each is
taken; int64 `[bs]` each."""
Verify: TypeAlias = Callable[[ForwardBatch], tuple[torch.Tensor, LogitsProcessorOutput]]
Follow: TypeAlias = Callable[[ForwardBatch, torch.Tensor, torch.Tensor, Snapshots | None], None]


def largest_verification(num_draft_tokens: int) -> int:
    """Most requests of a verification of `num_draft_tokens` tokens each."""
    return max(1, MAX_TOKENS // num_draft_tokens)


class _Inputs(NamedTuple):
    """Static tensors, int64 `[largest batch]` each."""

    input_ids: torch.Tensor
    req_pool_indices: torch.Tensor
    seq_lens: torch.Tensor
    slots: torch.Tensor
    """Slots of running states."""
    accepted: torch.Tensor
    snapshot_slots: torch.Tensor
    snapshot_counts: torch.Tensor

    def first(self, count: int) -> _Inputs:
        return _Inputs(*(tensor[:count] for tensor in self))


class _Captured(NamedTuple):
    """Graphs of one batch size, and what the first leaves."""

    verify: Graph
    follow: Graph
    drafts: torch.Tensor
    output: LogitsProcessorOutput


class VerifyGraphs:
    """Captures verifications when it is created, then replays them. Only for the model's thread."""

    def __init__(
        self,
        runner: ModelRunner,
        verify: Verify,
        follow: Follow,
        *,
        num_draft_tokens: int,
        batch_sizes: Sequence[int],
    ) -> None:
        """Args:
        verify: Drafts, and runs the model; both queue work and do nothing else.
        follow: Takes the batch, the model's hidden states, accepted drafts and snapshots.
        num_draft_tokens: Tokens of each request.
        batch_sizes: Ascending.
        """
        pools = runner.pools.values()
        for pool in pools:
            assert pool.layer_transfer_counter is None, "waits cannot be captured"
        self._runner = runner
        self._verify, self._follow = verify, follow
        self._width = num_draft_tokens
        self._batch_sizes = list(batch_sizes)
        self._loaded_last = max(pools, key=lambda pool: pool.end_layer)
        self._has_states = runner.state_bytes() > 0
        rows, largest = runner.req_to_token_pool, self._batch_sizes[-1]
        tokens = largest * num_draft_tokens
        with torch.inference_mode():
            padding = [0, rows.size, num_draft_tokens + 1, 0, 0, 0, 0]
            self._padding = torch.tensor(padding, device=rows.device)[:, None]
            self._all = self._padding.repeat(1, largest)
            self._inputs = _Inputs(*self._all.unbind())
            self._slots = torch.zeros(tokens, dtype=torch.int64, device=rows.device)
            self._logits_out = torch.empty(
                (tokens, runner.num_logits), dtype=torch.float32, device=rows.device
            )
            capture = GraphCapture(show_progress=runner.shows_progress)
            self._captured = capture.capture_sizes(
                f"verifications of {num_draft_tokens} tokens of %s requests",
                self._batch_sizes,
                lambda size: self._capture(size, capture),
            )

    def can_run(self, batch_size: int) -> bool:
        """True if there are graphs for a verification of `batch_size` requests."""
        return batch_size <= self._batch_sizes[-1]

    @torch.inference_mode()
    def verify(self, batch: ForwardBatch) -> tuple[torch.Tensor, LogitsProcessorOutput]:
        """Run the first graph.

        Returns:
            Drafts, logits and hidden states, which the next verification overwrites.
        """
        count = batch.batch_size
        size = self._size_of(batch)
        # Layers are loaded in order, so the last layer's load ends last.
        self._loaded_last.wait_for_layer(self._loaded_last.end_layer)
        if count < size:
            self._all[:, count:size] = self._padding
            self._slots[count * self._width : size * self._width] = 0
        values = [batch.input_ids, batch.req_pool_indices, batch.seq_lens]
        if batch.states is not None:
            values.append(batch.states.slots)
        places = [*self._inputs.first(count)[: len(values)], self._slots[: count * self._width]]
        torch._foreach_copy_(places, [*values, batch.out_cache_loc])
        found = self._captured[size]
        found.verify.replay()
        return found.drafts[:count], found.output.first(count * self._width)

    @torch.inference_mode()
    def follow(
        self, batch: ForwardBatch, accepted: torch.Tensor, snapshots: Snapshots | None
    ) -> None:
        """Run the second graph, after `verify` of the same batch."""
        inputs = self._inputs.first(batch.batch_size)
        inputs.accepted.copy_(accepted)
        if snapshots is not None:
            torch._foreach_copy_([inputs.snapshot_slots, inputs.snapshot_counts], [*snapshots])
        elif self._has_states:
            inputs.snapshot_slots.zero_()
        self._captured[self._size_of(batch)].follow.replay()

    def _size_of(self, batch: ForwardBatch) -> int:
        """The captured size for a batch, and for the largest of all DP groups."""
        largest = 0 if batch.groups is None else batch.groups.graph_rows or 0
        return self._batch_sizes[
            bisect.bisect_left(self._batch_sizes, max(batch.batch_size, largest))
        ]

    def _capture(self, size: int, capture: GraphCapture) -> _Captured:
        inputs = self._inputs.first(size)
        snapshots = None
        if self._has_states:
            snapshots = inputs.snapshot_slots, inputs.snapshot_counts

        def draft_and_verify() -> tuple[ForwardBatch, torch.Tensor, LogitsProcessorOutput]:
            batch = self._batch(size)
            return batch, *self._verify(batch)

        verify, (batch, drafts, output) = capture.capture(draft_and_verify)
        hidden = output.hidden_states
        assert hidden is not None, "the step captured them"
        follow, _ = capture.capture(lambda: self._follow(batch, hidden, inputs.accepted, snapshots))
        return _Captured(verify, follow, drafts, output)

    def _batch(self, size: int) -> ForwardBatch:
        inputs, width, runner = self._inputs.first(size), self._width, self._runner
        ahead = torch.arange(-width, 0, device=self._slots.device)
        return ForwardBatch(
            forward_mode=ForwardMode.TARGET_VERIFY,
            input_ids=inputs.input_ids,
            positions=(inputs.seq_lens[:, None] + ahead).flatten(),
            req_pool_indices=inputs.req_pool_indices,
            seq_lens=inputs.seq_lens,
            seq_lens_cpu=[width + 1] * size,
            out_cache_loc=self._slots[: size * width],
            req_to_token_pool=runner.req_to_token_pool,
            token_to_kv_pool=runner.token_to_kv_pool,
            extend_prefix_lens_cpu=[1] * size,
            extend_seq_lens_cpu=[width] * size,
            states=StateBatch(slots=inputs.slots) if self._has_states else None,
            logits_out=self._logits_out[: size * width],
            capture_hidden=True,
            is_captured=True,
        )
