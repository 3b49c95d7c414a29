"""The inputs of a verification of drafts, and its start before the last one has ended.

The scheduler may launch a verification before it knows the results of the last one. It then assumes
that all drafts are accepted, so that every request has enough slots. The device knows how many are,
and moves each request back by the others (`moved_back`).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.nn.functional import pad

from sglang.srt.layers.forward_batch_info import ForwardBatch


class Behind(NamedTuple):
    """The verification that is in flight when the next one is launched. Tensors on the device."""

    token_ids: torch.Tensor
    """int64 `[rows * width]`: the model's token after each of its tokens."""
    accepted: torch.Tensor
    """int64 `[rows]`: accepted drafts."""
    places: torch.Tensor
    """int64 `[bs]`: row of each request of the next step in the step in flight; `rows` if that step
    does not have the request."""


@dataclass(frozen=True, slots=True)
class Verification:
    """Inputs of a verification. Tensors are int64 `[bs]` on the device."""

    most: torch.Tensor
    """Most drafts of each request that may be accepted."""
    snapshots: tuple[torch.Tensor, torch.Tensor] | None = None
    """Slots for snapshots of recurrent states, 0: none, and after how many of the step's tokens
    they are taken. None: no request leaves one."""
    behind: Behind | None = None
    """The verification in flight, or None if the CPU knows the position of each request."""


def newest_tokens(sampled: torch.Tensor, places: torch.Tensor, known: torch.Tensor) -> torch.Tensor:
    """Newest tokens of requests, of which a step in flight samples some.

    Args:
        sampled: int64 `[rows]` on the device: the tokens of that step.
        places: int64 `[bs]`: as `Behind.places`.
        known: int64 `[bs]`: the tokens of requests that were not in it.

    Returns:
        int64 `[bs]`.
    """
    return pad(sampled, (0, 1))[places].where(places < len(sampled), known)


def moved_back(
    forward: ForwardBatch, steps: torch.Tensor, verified: Verification
) -> tuple[torch.Tensor, Verification]:
    """Move the requests of a verification back by the rejected drafts of the step in flight. Queues
    work on the device and does not wait for it.

    Args:
        forward: The verification, with lengths and positions as if these drafts were accepted. The
            real lengths and positions replace them. `seq_lens_cpu` stays an upper bound.
        steps: int64 `[bs * width]`: `ModelWorkerBatch.steps` under the same assumption.
        verified: Must have `behind`.

    Returns:
        `steps`, and `verified` with the snapshots that this step takes.
    """
    behind = verified.behind
    assert behind is not None, "a verification is in flight"
    bs, rows = forward.batch_size, len(behind.accepted)
    width = len(steps) // bs
    sampled = behind.token_ids.view(rows, width)
    newest = sampled.gather(1, behind.accepted[:, None]).flatten()
    forward.input_ids = newest_tokens(newest, behind.places, forward.input_ids)
    # Requests that were not in that step do not move.
    moved = pad(behind.accepted + (1 - width), (0, 1))[behind.places]
    forward.seq_lens = forward.seq_lens + moved
    by_token = moved.repeat_interleave(width, output_size=bs * width)
    forward.positions = forward.positions + by_token
    table = forward.req_to_token_pool.req_to_token
    of_requests = forward.req_pool_indices[:, None], forward.positions.view(bs, width)
    forward.out_cache_loc = table[of_requests].flatten().to(torch.int64)
    snapshots = verified.snapshots
    if snapshots is not None:
        slots, counts = snapshots[0], snapshots[1] - moved
        is_inside = (slots > 0) & (counts > 0) & (counts <= width)
        snapshots = slots * is_inside, counts * is_inside
    return steps + by_token, dataclasses.replace(verified, snapshots=snapshots, behind=None)
