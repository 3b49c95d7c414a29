"""Tokens of each group that a step finishes, and those that stay in an open group.

A group is `ratio` consecutive tokens of one request, from a position that `ratio` divides. When a
step brings its last token, the group becomes a row. Plain index arithmetic, once for all layers of
a ratio.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from sglang.srt.layers.forward_batch_info import ForwardBatch, StateBatch
from sglang.srt.layers.linear_attention.extend_plan import upload
from sglang.srt.layers.rotary_embedding import Rotation

_Ids = npt.NDArray[np.int64]


class Span(NamedTuple):
    """The new tokens of one request."""

    begin: int
    """Index in the step of the first."""
    prefix: int
    """Tokens of the request before them."""
    new: int
    """New tokens, at least 1."""
    track: int
    """New tokens before the request's snapshot; 0: none."""


@dataclass(slots=True, kw_only=True)
class GroupPlan:
    """Indices for the groups of a step; int64 on the device. A *source* is an index among the
    step's tokens, followed by the `open_` tokens and the `last_` tokens."""

    ratio: int
    current: torch.Tensor
    """`[groups, ratio]`: sources of its tokens. The last is one of the step's tokens."""
    previous: torch.Tensor
    """`[groups, ratio]`: sources of the tokens of the group before. For a request's first
    group they repeat `current`, and are not used."""
    is_first: torch.Tensor
    """bool `[groups, 1, 1]`: the group is its request's first."""
    open_requests: torch.Tensor
    open_places: torch.Tensor
    """`[n]` each: requests of earlier tokens in these groups, and their places in the group."""
    last_requests: torch.Tensor
    last_places: torch.Tensor
    """`[m]` each: likewise of tokens in groups that earlier steps finished."""
    kept_tokens: torch.Tensor
    kept_requests: torch.Tensor
    kept_places: torch.Tensor
    """`[k]` each: the step's tokens whose groups stay open, their requests and places."""
    ended: torch.Tensor
    """`[e]`: requests of which the step finishes groups."""
    ended_sources: torch.Tensor
    """`[e, ratio]`: sources of the tokens of the last of these groups."""
    tracked: torch.Tensor
    tracked_sources: torch.Tensor
    """Likewise of the last group before a snapshot."""
    rotation: Rotation | None = None
    """Angles of the first token of each finished group, which a backend sets."""

    @classmethod
    def of(cls, spans: list[Span], ratio: int, device: torch.device | str) -> GroupPlan:
        """The plan of a step."""
        # Groups `[first, last)` of each request end in the step.
        edges = [(s.prefix // ratio, (s.prefix + s.new) // ratio) for s in spans]
        opens = [
            s.prefix % ratio if first < last else 0
            for s, (first, last) in zip(spans, edges, strict=True)
        ]
        num_new = sum(s.new for s in spans)
        open_at = num_new
        last_at = num_new + sum(opens)
        within = np.arange(ratio)
        names = (
            "positions", "current", "previous", "open_requests", "open_places",
            "last_requests", "last_places", "kept_tokens", "kept_requests", "kept_places",
            "ended", "ended_sources", "tracked", "tracked_sources",
        )  # fmt: skip
        found: dict[str, list[_Ids]] = {name: [] for name in names}
        for request, (span, (first, last), count) in enumerate(
            zip(spans, edges, opens, strict=True)
        ):
            begin, prefix, end = span.begin, span.prefix, span.prefix + span.new
            kept = np.arange(max(prefix, last * ratio), end)
            found["kept_tokens"].append(begin + kept - prefix)
            found["kept_requests"].append(np.full(len(kept), request))
            found["kept_places"].append(kept % ratio)
            if first == last:
                continue
            # Sources by position, from the group before the first of these.
            base = (first - 1) * ratio
            sources = np.empty((last - first + 1) * ratio, dtype=np.int64)
            sources[prefix - base :] = begin + np.arange(last * ratio - prefix)
            sources[ratio : ratio + count] = open_at + np.arange(count)
            if first:
                sources[:ratio] = last_at + within
                found["last_requests"].append(np.full(ratio, request))
                found["last_places"].append(within)
                last_at += ratio
            else:
                sources[:ratio] = sources[ratio : 2 * ratio]
            open_at += count
            groups = sources.reshape(-1, ratio)
            found["open_requests"].append(np.full(count, request))
            found["open_places"].append(np.arange(count))
            found["positions"].append(np.arange(first, last) * ratio)
            found["previous"].append(groups[:-1].reshape(-1))
            found["current"].append(groups[1:].reshape(-1))
            found["ended"].append(np.asarray([request]))
            found["ended_sources"].append(groups[-1])
            if span.track:
                at = (prefix + span.track) // ratio
                assert at * ratio == prefix + span.track, "snapshots are at the end of a group"
                found["tracked"].append(np.asarray([request]))
                found["tracked_sources"].append(groups[at - first])
        empty = np.empty(0, dtype=np.int64)
        columns = {name: np.concatenate([empty, *parts]) for name, parts in found.items()}
        for name in ("current", "previous", "ended_sources", "tracked_sources"):
            columns[name] = columns[name].reshape(-1, ratio)
        ids = dict(zip(names, upload(list(columns.values()), device), strict=True))
        is_first = (ids.pop("positions") == 0)[:, None, None]
        return cls(ratio=ratio, is_first=is_first, rotation=None, **ids)


class StepGroups(dict[int, GroupPlan]):
    """The plans of a step, by ratio."""


def plan_groups(forward_batch: ForwardBatch, ratios: Iterable[int]) -> StepGroups:
    """Make the plans of a step, which replace those of the last step with these states."""
    states, device = states_of(forward_batch), forward_batch.input_ids.device
    spans = _spans(forward_batch, states)
    made = StepGroups({ratio: GroupPlan.of(spans, ratio, device) for ratio in ratios})
    states.groups = made
    return made


def groups_of(forward_batch: ForwardBatch, ratio: int) -> GroupPlan:
    """The plan of a step for layers of a ratio."""
    plans = states_of(forward_batch).groups
    assert isinstance(plans, StepGroups), "the model makes it"
    return plans[ratio]


def states_of(forward_batch: ForwardBatch) -> StateBatch:
    """The step's slots of states."""
    assert forward_batch.states is not None, "the maker of the batch gave it states"
    return forward_batch.states


def _spans(forward_batch: ForwardBatch, states: StateBatch) -> list[Span]:
    if forward_batch.forward_mode.is_decode():
        return [Span(i, length - 1, 1, 0) for i, length in enumerate(forward_batch.seq_lens_cpu)]
    segments = forward_batch.segments()
    lens = states.track_lens_cpu or [0] * len(segments)
    return [
        Span(one.begin, one.prefix, one.new, track)
        for one, track in zip(segments, lens, strict=True)
    ]
