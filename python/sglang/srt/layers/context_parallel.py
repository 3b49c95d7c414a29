"""Context parallelism: ranks with the same heads split the new tokens of a prefill.

With c ranks, a request's new tokens are cut into 2c runs. Rank r takes runs r and 2c-1-r, which
makes the causal work even ("zig-zag", Llama 3 herd of models, 2024, section 3.3.2). Attention
treats each run as a request whose prefix ends where the run begins. Before a layer attends, the
ranks exchange what they have stored for it, and their pools become equal.
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
from sglang.srt.layers.forward_batch_info import ForwardBatch
from sglang.srt.mem_cache.device.base_device_pool import BaseDevicePool, PagedDevicePool
from sglang.srt.mem_cache.device.state_spec import PoolName

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
class ContextShare:
    """One rank's share of a split prefill, and its exchange with the other ranks."""

    whole: ForwardBatch
    """The step as the scheduler made it."""
    group: TensorGroup
    here: torch.Tensor
    """int64 `[padded]`: slots of this rank's tokens, padded with slot 0 to the same length on all
    ranks."""
    everywhere: torch.Tensor
    """int64 `[size * padded]`: `here` of all ranks, one after the other."""
    rows: torch.Tensor
    """int64 `[n]`: indices of the rows that the whole step needs, among this rank's rows of
    `ForwardBatch.rows_for_logits`."""
    places: torch.Tensor
    """int64 `[n]`: indices of these rows among those of the whole step."""
    num_places: int
    """Rows that the whole step needs."""

    def share_stored(self, layer_id: int, pools: Mapping[PoolName, BaseDevicePool]) -> None:
        """Exchange what the ranks have stored for a layer, so that every rank's pools have all of
        it."""
        buffers = [
            part[pool.wait_for_layer(layer_id)]
            for pool in pools.values()
            if isinstance(pool, PagedDevicePool) and layer_id in pool.spec.layers
            for part in pool.parts
        ]
        own = [buffer.index_select(0, self.here).flatten(1).view(torch.uint8) for buffer in buffers]
        gathered = self.group.all_gather(torch.cat(own, dim=1)).flatten(0, 1)
        parts = torch.split(gathered, [part.shape[1] for part in own], dim=1)
        for buffer, raw in zip(buffers, parts, strict=True):
            rows = raw.contiguous().view(buffer.dtype).view(-1, *buffer.shape[1:])
            buffer.index_copy_(0, self.everywhere, rows)

    def gather_hidden(self, hidden: torch.Tensor) -> torch.Tensor:
        """Gather the hidden states that the whole step needs: `[num_places, hidden_size]` on every
        rank.

        Args:
            hidden: `[rows, hidden_size]`: this rank's hidden states of `rows_for_logits`.
        """
        wanted = hidden.new_zeros(self.num_places, hidden.shape[1])
        wanted.index_copy_(0, self.places, hidden.index_select(0, self.rows))
        return self.group.all_reduce(wanted)  # Each row is zero on all ranks but one.


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
    if batch.rows_for_logits() is None:
        rows, places, num_places = torch.arange(len(index), device=device), index, firsts[-1]
    else:
        last = [place for place, run in enumerate(runs) if run.end == new_lens[run.request]]
        rows = on_device(last, device, torch.int64)
        places, num_places = on_rows.index_select(0, rows), len(new_lens)
    share = ContextShare(
        whole=batch,
        group=group,
        here=everywhere[group.rank * most : (group.rank + 1) * most],
        everywhere=everywhere,
        rows=rows,
        places=places,
        num_places=num_places,
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
        context_share=share,
    )
