"""One step of a checkable model: reads whole contexts layer by layer, checks and extends them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from rigs.schedulers.checkable_model import (
    NOISE,
    Words,
    WrongContext,
    describe,
    extend,
    facts,
    first_break,
    start,
    token_of,
)
from rigs.schedulers.checkable_pools import CheckablePools, FactBuffer


@dataclass(frozen=True, slots=True, kw_only=True)
class StateUse:
    """Slots of recurrent states that a step uses for one request."""

    read: int
    """Slot that the request continues from."""
    running: int
    """Slot that the step overwrites."""
    snapshot: int = 0
    """Slot for a snapshot; 0: the step leaves none on its way."""
    snapshot_len: int = 0
    """Number of new tokens before the snapshot."""
    is_restored: bool = False
    """True if the one new token is part of the state, which the request has again after the
    step."""


@dataclass(frozen=True, slots=True)
class Context:
    """One request of a batch. Arrays have one element for each position."""

    row: int
    seed: int
    slots: npt.NDArray[np.int64]
    num_old: int
    """Positions that the pool has before the step: those before `new_tokens`, and maybe the first
    of these, which the step then reads and does not store."""
    new_tokens: list[int]
    """The tokens that the step computes. The drafts of a verification are known when it runs."""
    state: StateUse | None
    """None: the model keeps no states."""

    @property
    def begin(self) -> int:
        """Position of the first new token."""
        return len(self.slots) - len(self.new_tokens)

    @property
    def is_whole(self) -> bool:
        """True if the pool has the request's one new token too."""
        return self.num_old == len(self.slots)


def expect(holds: bool, what: str) -> None:
    """Raise WrongContext unless `holds`."""
    if not holds:
        raise WrongContext(f"the batch: {what}")


@dataclass(slots=True)
class Step:
    """The work of one step on the pools.

    The first layer that is read tells where each request is, and the new facts follow from that.
    All later layers must agree.
    """

    pools: CheckablePools
    contexts: list[Context]
    verifies: bool = False
    """True if it leaves recurrent states as they are."""
    hashes: list[list[int]] = field(default_factory=list)
    """For each request the hashes of its new positions."""
    _ends: Words | None = None
    """`[bs, 2]`: the last fact before the new tokens; zeros where there is none."""
    _new: list[Words] = field(default_factory=list)
    """For each request the new facts to store."""
    _all: Words | None = None
    """The facts of all positions of all requests, once a layer of tokens has told them."""

    def run(self, begin_layer: Callable[[int], None]) -> None:
        """Read, check and extend all layers.

        Args:
            begin_layer: See `ForwardBatch.begin_layer`.

        Raises:
            WrongContext: A slot does not hold what it must.
        """
        state = self.pools.state
        for layer in range(state.draft_layer):
            if layer in state.state_layers:
                for buffer in self.pools.prefixes:
                    self._run_states(buffer, layer)
                for buffer in self.pools.open:
                    self._run_open_groups(buffer, layer)
            if layer in state.token_layers:
                begin_layer(layer)
                for buffer in self.pools.tokens:
                    self._run_tokens(buffer, layer)
                for buffer in self.pools.groups:
                    self._run_groups(buffer, layer)

    def _begin(self, ends: Words) -> None:
        """Compute the new facts, which follow the facts `ends`."""
        self._ends = ends
        for one, end in zip(self.contexts, ends, strict=True):
            num_again = one.num_old - one.begin
            again, tokens = one.new_tokens[:num_again], one.new_tokens[num_again:]
            stored = [token_of(end)] * num_again
            expect(again == stored, f"row {one.row}: {again}, not {stored}")
            at = int(end[0]) if one.num_old else start(one.seed)
            self.hashes.append([at] * num_again + extend(at, tokens))
            self._new.append(facts(self.hashes[-1][num_again:], one.num_old, tokens))

    def facts(self) -> list[Words]:
        """For each request the facts of the new positions, once the step has run."""
        pairs = zip(self.contexts, self.hashes, strict=True)
        return [facts(hashes, one.begin, one.new_tokens) for one, hashes in pairs]

    # ---- recurrent states ----------------------------------------------------------------------

    def _run_states(self, buffer: FactBuffer, layer: int) -> None:
        uses = [one.state for one in self.contexts if one.state is not None]
        words, marks = buffer.read(layer), buffer.marks[layer]
        found = words[[use.read for use in uses]]
        has_prefix = np.array([one.num_old > 0 for one in self.contexts])[:, None, None]
        if self._ends is None:
            self._begin(np.where(has_prefix, found ^ marks, np.uint64(0))[:, 0])
        assert self._ends is not None
        wanted = np.where(has_prefix, self._ends[:, None] ^ marks, np.uint64(0))
        if not np.array_equal(found, wanted):
            raise self._wrong_state(buffer, layer, found, wanted)
        if self.verifies:
            return
        for use, new in zip(uses, self._new, strict=True):
            words[use.running] = NOISE if use.is_restored else new[-1] ^ marks
            if use.snapshot:
                words[use.snapshot] = new[use.snapshot_len - 1] ^ marks

    def _wrong_state(
        self, buffer: FactBuffer, layer: int, found: Words, wanted: Words
    ) -> WrongContext:
        bad = (found != wanted).any(axis=2)
        row, copy = (int(at) for at in np.argwhere(bad)[0])
        one, mark = self.contexts[row], buffer.marks[layer, copy]
        assert one.state is not None
        holds, should = (
            describe(words[row, copy] ^ mark) if words[row, copy].any() else "zeros"
            for words in (found, wanted)
        )
        return WrongContext(
            f"row {one.row}, layer {layer}, {buffer.name} behind {one.num_old} tokens "
            f"(slot {one.state.read}, {int(bad.any(axis=1).sum())} such in the batch): "
            f"holds {holds} and not {should}"
        )

    # ---- groups of tokens ----------------------------------------------------------------------

    def _run_open_groups(self, buffer: FactBuffer, layer: int) -> None:
        """Check the open group of each request, and go on with it: the fact of the last token, or
        zeros if it ends a group."""
        words, marks, size = buffer.read(layer), buffer.marks[layer], self.pools.state.group
        assert self._ends is not None, "the layer's recurrent states come first"
        for one, end, new in zip(self.contexts, self._ends, self._new, strict=True):
            wanted = end ^ marks if one.num_old % size else np.zeros_like(marks)
            if not np.array_equal(words[one.row], wanted):
                holds = words[one.row, 0]
                raise WrongContext(
                    f"row {one.row}, layer {layer}, {buffer.name} behind {one.num_old} tokens: "
                    f"holds {describe(holds ^ marks[0]) if holds.any() else 'zeros'}"
                )
            words[one.row] = new[-1] ^ marks if len(one.slots) % size else 0

    def _run_groups(self, buffer: FactBuffer, layer: int) -> None:
        """Store the last fact of each group that the new tokens end, and check those of all
        groups."""
        words, marks, size = buffer.read(layer), buffer.marks[layer], self.pools.state.group
        assert self._all is not None, "the layer's tokens come first"
        begin = 0
        for one in self.contexts:
            ends = np.arange(size - 1, len(one.slots), size)
            items, wanted = one.slots[ends] // size, self._all[begin + ends][:, None] ^ marks
            begin += len(one.slots)
            is_new = ends >= one.num_old
            words[items[is_new]] = wanted[is_new]
            bad = (words[items] != wanted).any(axis=(1, 2))
            if bad.any():
                at = int(np.argmax(bad))
                raise WrongContext(
                    f"row {one.row}, layer {layer}, {buffer.name}, the one that ends at position "
                    f"{ends[at]} of {len(one.slots)} (item {items[at]}): holds "
                    f"{describe(words[items[at], 0] ^ marks[0])}"
                )

    # ---- tokens --------------------------------------------------------------------------------

    def _run_tokens(self, buffer: FactBuffer, layer: int) -> None:
        words, marks = buffer.read(layer), buffer.marks[layer]
        if self._all is None:
            old = [words[one.slots[: one.num_old], 0] ^ marks[0] for one in self.contexts]
            self._follow(buffer, layer, old)
            pairs = zip(old, self._new, strict=True)
            self._all = np.concatenate([part for pair in pairs for part in pair])
        new_slots = np.concatenate([one.slots[one.num_old :] for one in self.contexts])
        words[new_slots] = np.concatenate(self._new)[:, None] ^ marks
        found = words[np.concatenate([one.slots for one in self.contexts])] ^ marks
        if (found != self._all[:, None]).any():
            raise self._wrong_tokens(buffer, layer, found)

    def _follow(self, buffer: FactBuffer, layer: int, old: list[Words]) -> None:
        """Check that the facts of each context are a chain, and that its new ones follow them."""
        for one, found in zip(self.contexts, old, strict=True):
            at = first_break(found, one.seed)
            if at is not None:
                raise WrongContext(
                    f"row {one.row}, layer {layer}, {buffer.name}, position {at} of "
                    f"{len(one.slots)} (slot {one.slots[at]}): does not follow from what is before "
                    f"it; it holds {describe(found[at])}"
                )
        nothing = np.zeros((1, 2), dtype=np.uint64)
        ends = np.concatenate([found[-1:] if len(found) else nothing for found in old])
        if self._ends is None:
            self._begin(ends)
        elif not np.array_equal(ends, self._ends):
            at = int(np.argmax((ends != self._ends).any(axis=1)))
            one = self.contexts[at]
            assert one.state is not None
            raise WrongContext(
                f"row {one.row}: the state of {one.num_old} tokens (slot {one.state.read}) holds "
                f"{describe(self._ends[at])}, the last one's {buffer.name} {describe(ends[at])}"
            )

    def _wrong_tokens(self, buffer: FactBuffer, layer: int, found: Words) -> WrongContext:
        assert self._all is not None
        bad = (found != self._all[:, None]).any(axis=2)
        first, copy = (int(at) for at in np.argwhere(bad)[0])
        at = first
        for one in self.contexts:
            if at < len(one.slots):
                break
            at -= len(one.slots)
        return WrongContext(
            f"row {one.row}, layer {layer}, {buffer.name}, position {at} of {len(one.slots)} "
            f"(slot {one.slots[at]}, {int(bad.any(axis=1).sum())} such in the batch): "
            f"holds {describe(found[first, copy])} and not {describe(self._all[first])}"
        )
