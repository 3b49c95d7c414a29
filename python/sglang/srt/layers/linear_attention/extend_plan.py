"""Row indices of a prefill for linear attention, shared by all layers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from sglang.srt.hardware_backend.device_runtime import device_runtime
from sglang.srt.layers.forward_batch_info import ForwardBatch, StateBatch
from sglang.srt.layers.triton_ops.arguments import DeltaChunks

CHUNK: Final = 64
"""Tokens that the delta rule computes at once. Other rules have chunks of other sizes."""

SHORT: Final = 256
"""Longest prefill, in tokens, that devices with fused kernels compute token by token."""

_Ids = npt.NDArray[np.int64]


class ShortPlan(NamedTuple):
    """Plan of a prefill that is computed token by token: int64 tensors on the device."""

    bounds: torch.Tensor
    """`[bs + 1]`: begin and end of each request's tokens."""
    track_lens: torch.Tensor
    """`[bs]`: new tokens before each request's snapshot; 0: no snapshot."""

    @classmethod
    def of(
        cls,
        num_new: Sequence[int],
        track_lens: Sequence[int] | None,
        device: torch.device | str,
        num_requests: int | None = None,
    ) -> ShortPlan:
        """The plan of a batch.

        Args:
            num_requests: Requests of the plan; those after the batch's have no tokens. None: the
                batch's requests alone.
        """
        count = len(num_new) if num_requests is None else num_requests
        padding = [0] * (count - len(num_new))
        bounds = np.asarray([0, *itertools.accumulate([*num_new, *padding])], dtype=np.int64)
        track = np.asarray([*(track_lens or [0] * len(num_new)), *padding], dtype=np.int64)
        return cls(*upload([bounds, track], device))


class ChunkPlan(NamedTuple):
    """Plan of a prefill that devices with fused kernels compute in chunks."""

    bounds: torch.Tensor
    """See `ShortPlan`, for `track_lens` too."""
    track_lens: torch.Tensor
    chunks: DeltaChunks

    @classmethod
    def of(
        cls,
        num_new: Sequence[int],
        track_lens: Sequence[int] | None,
        device: torch.device | str,
        chunk: int = CHUNK,
        padded: tuple[int, int] | None = None,
    ) -> ChunkPlan:
        """The plan of a batch.

        Args:
            padded: Requests and chunks of the plan; those after the batch's have no tokens. None:
                the batch's alone.
        """
        count, most_chunks = padded or (len(num_new), 0)
        padding = [0] * (count - len(num_new))
        new, track = [*num_new, *padding], [*(track_lens or [0] * len(num_new)), *padding]
        # Lists, because a call of numpy costs more than these few numbers.
        counts = [-(-t // chunk) - (t - n) // chunk for n, t in zip(new, track, strict=True)]
        requests = [request for request, own in enumerate(counts) for _ in range(own)]
        # After the last request's chunks it has no tokens left.
        requests += [count - 1] * (most_chunks - len(requests))
        bounds, firsts = (list(itertools.accumulate(sizes, initial=0)) for sizes in (new, counts))
        columns = (bounds, track, requests, firsts)
        ids = upload([np.asarray(column, dtype=np.int64) for column in columns], device)
        return cls(ids[0], ids[1], DeltaChunks(chunk, ids[2], ids[3]))

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All tensors of the plan."""
        return [self.bounds, self.track_lens, self.chunks.requests, self.chunks.first_chunks]


@dataclass(frozen=True, kw_only=True)
class ExtendPlan:
    """Indices for one prefill of `bs` requests. Tensors are int64 on the device.

    A *window* is the consecutive inputs of one request: first the `kernel - 1` inputs in its state,
    then its new tokens. A *chunk* is up to `chunk` tokens of one request. A request's chunks begin
    at its first new token, and again after its snapshot. Chunks are computed in rounds; a round has
    one chunk of each request that has chunks left.
    """

    window_rows: torch.Tensor
    """`[num_tokens + bs * (kernel - 1)]`: all windows, as indices of rows: first the inputs of new
    tokens, then those in the states."""
    first_inputs: torch.Tensor
    """`[num_tokens]`: for each token, the index in the windows of the first input that it sees."""
    last_inputs: torch.Tensor
    """`[bs, kernel - 1]`: indices in the windows of each request's state after the prefill."""
    tracked_inputs: torch.Tensor
    """`[num_tracked, kernel - 1]`: likewise for the snapshots."""
    chunk_tokens: torch.Tensor
    """`[num_chunks, chunk]`: tokens of each chunk, round by round, padded with `num_tokens`."""
    token_places: torch.Tensor
    """`[num_tokens]`: index of each token in the flattened chunks."""
    order: torch.Tensor
    """`[bs]`: requests by number of chunks, descending, so each round has the first ones."""
    round_sizes: tuple[int, ...]
    """Number of requests that have a chunk in each round."""
    tracked_rounds: tuple[int, ...]
    """Ascending: the round after which each snapshot is taken."""
    tracked_places: torch.Tensor
    """`[num_tracked]`: indices in `order` of the requests with snapshots."""
    tracked: torch.Tensor
    """`[num_tracked]`: indices in the batch of these requests."""

    @classmethod
    def of(
        cls,
        num_new: Sequence[int],
        track_lens: Sequence[int] | None,
        kernel: int,
        device: torch.device | str,
        chunk: int = CHUNK,
    ) -> ExtendPlan:
        """The plan of a batch.

        Args:
            num_new: New tokens of each request, at least 1 each.
            track_lens: New tokens before each request's snapshot; 0: no snapshot. None: all are 0.
            kernel: Width of the convolution in tokens.
            chunk: Tokens that the rule computes at once.

        Raises:
            ValueError: A snapshot lies beyond its request's new tokens.
        """
        track = list(track_lens or [0] * len(num_new))
        if any(not 0 <= t <= n for t, n in zip(track, num_new, strict=True)):
            raise ValueError(
                f"snapshots after {track} tokens lie beyond prefills of {list(num_new)}"
            )
        starts = [0, *itertools.accumulate(num_new)]
        chunks = [
            [*_chunks(start, t, chunk), *_chunks(start + t, n - t, chunk)]
            for start, t, n in zip(starts, track, num_new, strict=False)
        ]
        order = sorted(range(len(chunks)), key=lambda i: -len(chunks[i]))
        sizes = [
            sum(len(own) > nth for own in chunks) for nth in range(max(map(len, chunks), default=0))
        ]
        rounds = [chunks[i][nth] for nth, size in enumerate(sizes) for i in order[:size]]
        chunk_tokens, token_places = _chunk_rows(rounds, starts[-1], chunk)
        # A snapshot is the state after the chunks of the tokens before it.
        snapshots = sorted(
            (-(-track[i] // chunk) - 1, place, i) for place, i in enumerate(order) if track[i]
        )
        tracked = [i for _, _, i in snapshots]
        windows = _window_rows(num_new, track, tracked, starts, kernel)
        columns: list[_Ids] = [
            *windows,
            chunk_tokens,
            token_places,
            np.asarray(order, dtype=np.int64),
            np.asarray([place for _, place, _ in snapshots], dtype=np.int64),
            np.asarray(tracked, dtype=np.int64),
        ]
        ids = upload(columns, device)
        return cls(
            window_rows=ids[0],
            first_inputs=ids[1],
            last_inputs=ids[2],
            tracked_inputs=ids[3],
            chunk_tokens=ids[4],
            token_places=ids[5],
            order=ids[6],
            round_sizes=tuple(sizes),
            tracked_rounds=tuple(nth for nth, _, _ in snapshots),
            tracked_places=ids[7],
            tracked=ids[8],
        )

    def advance(
        self,
        state: torch.Tensor,
        state_dtype: torch.dtype,
        step: Callable[[slice, torch.Tensor], None],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Move all states over the chunks, round by round.

        Tokens after a snapshot continue from it as stored, rounded to `state_dtype`.

        Args:
            state: fp32 `[bs, ...]`: states before the prefill.
            state_dtype: Dtype in which states are stored.
            step: Gets the chunks of a round, and the states before them, which it overwrites with
                those after them.

        Returns:
            The states after the prefill, as `state`; and the snapshots, fp32 `[num_tracked, ...]`,
            in the plan's order.
        """
        state = state.index_select(0, self.order)
        tracked_at = iter(enumerate(self.tracked_rounds))
        upcoming = next(tracked_at, None)
        snapshots: list[torch.Tensor] = []
        begin = 0
        for nth, size in enumerate(self.round_sizes):
            step(slice(begin, begin + size), state[:size])
            begin += size
            while upcoming is not None and upcoming[1] == nth:
                place = self.tracked_places[upcoming[0] : upcoming[0] + 1]
                snapshot = state.index_select(0, place).to(state_dtype).float()
                state.index_copy_(0, place, snapshot)
                snapshots.append(snapshot)
                upcoming = next(tracked_at, None)
        after = torch.empty_like(state).index_copy_(0, self.order, state)
        return after, torch.cat([state[:0], *snapshots])

    def by_token(self, x: torch.Tensor) -> torch.Tensor:
        """The opposite of `in_chunks`."""
        return x.transpose(1, 2).flatten(0, 1).index_select(0, self.token_places)

    def in_chunks(self, x: torch.Tensor) -> torch.Tensor:
        """Cut `[num_tokens, num_heads, ...]` into `[num_chunks, num_heads, chunk, ...]`. Zeros pad
        the chunks, because they change no state."""
        padded = torch.cat([x, x.new_zeros(1, *x.shape[1:])])
        rows = padded.index_select(0, self.chunk_tokens.reshape(-1))
        return rows.view(*self.chunk_tokens.shape, *x.shape[1:]).transpose(1, 2).contiguous()


def _states_of(forward_batch: ForwardBatch) -> tuple[StateBatch, Sequence[int]]:
    """The states of a prefill, and the new tokens of each request."""
    states, num_new = forward_batch.states, forward_batch.extend_seq_lens_cpu
    assert states is not None and num_new is not None, "the maker of the batch gave it states"
    return states, num_new


def kernel_plan_of(forward_batch: ForwardBatch, chunk: int = CHUNK) -> ShortPlan | ChunkPlan:
    """The plan of a prefill for fused kernels, by its length; the first layer that asks makes it.

    In a captured prefill the step has a plan of its own already.

    Args:
        chunk: Tokens that the rule computes at once, the same in all layers.
    """
    states, num_new = _states_of(forward_batch)
    if states.plan is None:
        ids = forward_batch.input_ids
        if len(ids) <= SHORT:
            states.plan = ShortPlan.of(num_new, states.track_lens_cpu, ids.device)
        else:
            states.plan = ChunkPlan.of(num_new, states.track_lens_cpu, ids.device, chunk)
    assert isinstance(states.plan, ShortPlan | ChunkPlan)
    return states.plan


def token_bounds_of(forward_batch: ForwardBatch) -> torch.Tensor:
    """`ShortPlan.bounds` of a prefill, for layers without a rule. They are made anew where no plan
    of kernels is at hand: recurrent layers whose shapes these do not take have another plan."""
    states, num_new = _states_of(forward_batch)
    if isinstance(states.plan, ShortPlan | ChunkPlan):
        return states.plan.bounds
    return ShortPlan.of(num_new, None, forward_batch.input_ids.device).bounds


def extend_plan_of(
    forward_batch: ForwardBatch, kernel: int, chunk: int = CHUNK
) -> ExtendPlan | None:
    """The plan of a prefill, which the first layer that asks makes; None: a decode step.

    Args:
        kernel: Width of the convolution in tokens, the same in all layers.
        chunk: Tokens that the rule computes at once, likewise.
    """
    if not forward_batch.forward_mode.is_extend():
        return None
    states, num_new = _states_of(forward_batch)
    if states.plan is None:
        device = forward_batch.input_ids.device
        states.plan = ExtendPlan.of(num_new, states.track_lens_cpu, kernel, device, chunk)
    assert isinstance(states.plan, ExtendPlan)
    return states.plan


def _chunks(start: int, count: int, chunk: int) -> list[tuple[int, int]]:
    """First token and number of tokens of each chunk of `count` tokens from `start` on."""
    return [(start + done, min(chunk, count - done)) for done in range(0, count, chunk)]


def _chunk_rows(rounds: list[tuple[int, int]], num_tokens: int, chunk: int) -> tuple[_Ids, _Ids]:
    """`ExtendPlan.chunk_tokens` and `token_places`."""
    tokens = np.full((len(rounds), chunk), num_tokens, dtype=np.int64)
    places = np.empty(num_tokens, dtype=np.int64)
    for nth, (begin, count) in enumerate(rounds):
        tokens[nth, :count] = np.arange(begin, begin + count)
        places[begin : begin + count] = np.arange(nth * chunk, nth * chunk + count)
    return tokens, places


def _window_rows(
    num_new: Sequence[int],
    track: list[int],
    tracked: list[int],
    starts: list[int],
    kernel: int,
) -> tuple[_Ids, _Ids, _Ids, _Ids]:
    """`ExtendPlan.window_rows`, `first_inputs`, `last_inputs` and `tracked_inputs`."""
    past = kernel - 1
    bs, num_tokens = len(num_new), starts[-1]
    begins = np.asarray(starts[:-1], dtype=np.int64) + np.arange(bs) * past
    before = num_tokens + np.arange(bs * past, dtype=np.int64).reshape(bs, past)
    rows = [
        part
        for i, count in enumerate(num_new)
        for part in (before[i], np.arange(starts[i], starts[i] + count))
    ]
    first = np.arange(num_tokens) + np.repeat(np.arange(bs) * past, num_new)
    offsets = np.arange(past)
    last = (begins + np.asarray(num_new))[:, None] + offsets
    at_snapshot = (begins + np.asarray(track))[tracked][:, None] + offsets
    return np.concatenate(rows), first, last, at_snapshot.reshape(len(tracked), past)


def upload(columns: list[_Ids], device: torch.device | str) -> list[torch.Tensor]:
    """Upload all columns in one copy, keeping their shapes."""
    flat = np.concatenate([column.ravel() for column in columns], dtype=np.int64)
    staged = device_runtime(device).stage_to_device(torch.from_numpy(flat))
    parts = torch.split(staged, [column.size for column in columns])
    return [part.view(column.shape) for part, column in zip(parts, columns, strict=True)]
