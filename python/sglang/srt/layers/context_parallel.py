"""Context parallelism: ranks with the same heads split the new tokens of a prefill.

c ranks cut a request's new tokens into 2c runs. Rank r takes runs r and 2c-1-r, which
makes the causal work even ("zig-zag", Llama 3 herd of models, 2024, section 3.3.2). Attention
treats each run as a request whose prefix ends where the run begins. The ranks exchange the rows
that they stored for a layer before the layer attends, which makes their pools equal.

A draft layer reads, for each token, the hidden state at the previous token. For the first token of
a run that state is on another rank, so the ranks also exchange the states at the ends of runs.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch

from sglang.srt.distributed.tensor_group import TensorGroup
from sglang.srt.hardware_backend.device_runtime import on_device
from sglang.srt.layers.forward_batch_info import ContextShare, ForwardBatch, RunEdges

SHORTEST_RUN: Final = 16
"""Fewest tokens of a run. One rank computes a request that is too short to split; every rank
computes a step without any request to split."""


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive new tokens of one request."""

    request: int
    """The request's place in the batch."""
    begin: int
    """Index of the first token among the request's new ones; `end` is exclusive."""
    end: int

    @property
    def length(self) -> int:
        return self.end - self.begin


def plan_runs(
    new_lens: Sequence[int], size: int, shortest: int = SHORTEST_RUN
) -> list[list[Run]] | None:
    """The runs of each of `size` ranks, in the batch's order; None: no request is split.

    Args:
        new_lens: New tokens of each request.
        shortest: Fewest tokens of a run.
    """
    runs: list[list[Run]] = [[] for _ in range(size)]
    is_long = [length >= 2 * size * shortest for length in new_lens]
    if not any(is_long):
        return None
    for request, length in enumerate(new_lens):
        if not is_long[request]:
            continue
        cuts = [length * cut // (2 * size) for cut in range(2 * size + 1)]
        for rank in range(size):
            first, last = rank, 2 * size - 1 - rank
            if last == first + 1:
                runs[rank].append(Run(request, cuts[first], cuts[last + 1]))
                continue
            runs[rank] += (Run(request, cuts[part], cuts[part + 1]) for part in (first, last))
    for request, length in enumerate(new_lens):
        if not is_long[request]:
            least = min(runs, key=lambda own: sum(run.length for run in own))
            least.append(Run(request, 0, length))
    return [sorted(own, key=lambda run: (run.request, run.begin)) for own in runs]


@dataclass(frozen=True, slots=True)
class SplitHidden:
    """Hidden states after a split prefill, after the final norm, for a draft layer."""

    batch: ForwardBatch
    """This rank's share of the step."""
    own: torch.Tensor
    """`[num_tokens, hidden_size]`: at the tokens of `batch`."""
    gathered: torch.Tensor
    """`[num_places, hidden_size]`, the same on all ranks; see `ContextShare`."""
    edges: RunEdges

    def before_tokens(self, before_step: torch.Tensor) -> torch.Tensor:
        """The state before each token of `batch`, `[num_tokens, hidden_size]`.

        Args:
            before_step: `[bs, hidden_size]`: the state before each request of the whole step.
        """
        shifted = self.own.roll(1, dims=0)
        known = torch.cat((before_step, self.gathered))
        return shifted.index_copy_(0, self.edges.starts, known.index_select(0, self.edges.before))

    def at_last_tokens(self) -> torch.Tensor:
        """The state at the last token of each request of the whole step, `[bs, hidden_size]`."""
        return self.gathered.index_select(0, self.edges.last)


def split_context(batch: ForwardBatch, group: TensorGroup) -> ForwardBatch | None:
    """Make this rank's share of an extend step; None: the step is not split.

    Args:
        batch: An extend step without recurrent states, the same on all ranks.
        group: The ranks that have the same heads.
    """
    new_lens, prefix_lens = batch.extend_seq_lens_cpu, batch.extend_prefix_lens_cpu
    assert new_lens is not None and prefix_lens is not None and batch.states is None
    plan = plan_runs(new_lens, group.size)
    if plan is None:
        return None
    device = batch.input_ids.device
    firsts = [0, *itertools.accumulate(new_lens)]
    tokens_of = [
        np.concatenate([np.arange(run.begin, run.end) + firsts[run.request] for run in own])
        for own in plan
    ]
    most = max(len(tokens) for tokens in tokens_of)
    # The index after the last token's stands for the padding slot.
    padded = np.full((group.size, most), firsts[-1])
    for row, tokens in zip(padded, tokens_of, strict=True):
        row[: len(tokens)] = tokens
    slots = torch.cat([batch.out_cache_loc, batch.out_cache_loc.new_zeros(1)])
    everywhere = slots.index_select(0, on_device(padded.ravel(), device, torch.int64))
    runs, index = plan[group.rank], on_device(tokens_of[group.rank], device, torch.int64)
    requests = [run.request for run in runs]
    on_rows = on_device(requests, device, torch.int64)
    lens = [prefix_lens[run.request] + run.end for run in runs]
    place_of = _places_of_ends(batch, plan)
    if batch.rows_for_logits() is None:
        rows, places = torch.arange(len(index), device=device), index
        num_places = num_wanted = firsts[-1]
    else:
        ends = [(run.request, run.end) for run in runs]
        counts = itertools.accumulate(run.length for run in runs)
        lasts = [count - 1 for count in counts] if batch.capture_hidden else range(len(runs))
        given = [(row, end) for row, end in zip(lasts, ends, strict=True) if end in place_of]
        rows = on_device([row for row, _ in given], device, torch.int64)
        places = on_device([place_of[end] for _, end in given], device, torch.int64)
        num_places, num_wanted = len(place_of), len(new_lens)
    share = ContextShare(
        whole=replace(batch, capture_hidden=False),
        group=group,
        here=everywhere[group.rank * most : (group.rank + 1) * most],
        everywhere=everywhere,
        rows=rows,
        places=places,
        num_places=num_places,
        num_wanted=num_wanted,
        edges=_edges_of(runs, new_lens, place_of, device) if batch.capture_hidden else None,
    )
    rows_cpu = batch.req_pool_indices_cpu
    return replace(
        batch,
        input_ids=batch.input_ids.index_select(0, index),
        positions=batch.positions.index_select(0, index),
        req_pool_indices=batch.req_pool_indices.index_select(0, on_rows),
        req_pool_indices_cpu=rows_cpu and [rows_cpu[request] for request in requests],
        seq_lens=on_device(lens, device, torch.int64),
        seq_lens_cpu=lens,
        out_cache_loc=batch.out_cache_loc.index_select(0, index),
        extend_prefix_lens_cpu=[prefix_lens[run.request] + run.begin for run in runs],
        extend_seq_lens_cpu=[run.length for run in runs],
        last_rows_in=None,
        context_share=share,
    )


def _places_of_ends(
    batch: ForwardBatch, plan: Sequence[Sequence[Run]]
) -> dict[tuple[int, int], int]:
    """Indices among the gathered hidden states of those at the ends of runs, by request and end.
    Unless the step captures hidden states, only the last run of each request has one."""
    new_lens = batch.extend_seq_lens_cpu
    assert new_lens is not None
    ends = {(run.request, run.end) for own in plan for run in own}
    if batch.rows_for_logits() is None:
        firsts = list(itertools.accumulate(new_lens, initial=0))
        return {(request, end): firsts[request] + end - 1 for request, end in ends}
    lasts = list(enumerate(new_lens))
    others = sorted(ends.difference(lasts)) if batch.capture_hidden else []
    return {end: place for place, end in enumerate([*lasts, *others])}


def _edges_of(
    runs: Sequence[Run],
    new_lens: Sequence[int],
    place_of: Mapping[tuple[int, int], int],
    device: torch.device,
) -> RunEdges:
    """The edges of a rank's `runs`. `place_of`: see `_places_of_ends`."""
    counts = itertools.accumulate((run.length for run in runs[:-1]), initial=0)
    before = [
        len(new_lens) + place_of[run.request, run.begin] if run.begin else run.request
        for run in runs
    ]
    return RunEdges(
        starts=on_device(list(counts), device, torch.int64),
        before=on_device(before, device, torch.int64),
        last=on_device([place_of[end] for end in enumerate(new_lens)], device, torch.int64),
    )
