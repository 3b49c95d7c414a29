"""The draft layer of a checkable model: it drafts tokens, and checks what it reads.

A hidden state is the fact of its token, and an entry of the layer too. The layer computes an entry
from the hidden state of the token before, so it is wrong if that state is. All earlier entries and
the hidden state are checked whenever the layer runs. The entries that the engine stores after a
step are checked too: one for each new token from position 1 on, in order, each in its own slot.

`EAGLEWorker` is the engine's own. A draft is a function of the hash before it, so all ranks draft
the same.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Final, cast

import numpy as np
import numpy.typing as npt
import torch

from rigs.schedulers.checkable_model import (
    NOISE,
    VOCAB_SIZE,
    Words,
    WrongContext,
    describe,
    extend,
    facts,
    first_break,
    word,
)
from rigs.schedulers.checkable_pools import CheckablePools
from rigs.schedulers.checkable_step import Context, Step, expect
from sglang.srt.layers.forward_batch_info import ForwardBatch
from sglang.srt.mem_cache.device.memory_pool import ReqToTokenPool
from sglang.srt.speculative.eagle_worker import EAGLEWorker

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner

_RIGHT: Final = 52
"""Right drafts out of 64."""


def draft_of(at: int) -> int:
    """The token that the layer drafts after the hash `at`."""
    token = word(at)
    return token if at >> 58 < _RIGHT else token % (VOCAB_SIZE - 1) + 1


class CheckableSpeculation(EAGLEWorker):
    """Speculation over a checkable model. The thread that runs the steps uses it.

    Args:
        pools: The model's pools.
        rows: The request table. A step is told its rows when it runs.
        num_draft_tokens: See `EAGLEWorker`.
        on_wrong: Called with each error that the layer finds; raises the error or counts it.
    """

    def __init__(
        self,
        pools: CheckablePools,
        rows: ReqToTokenPool,
        num_draft_tokens: int,
        on_wrong: Callable[[WrongContext], None],
    ) -> None:
        self._layer = _DraftLayer(pools, rows, on_wrong)
        # The layer has the parts of a runner that an `EAGLEWorker` uses.
        super().__init__(cast("ModelRunner", self._layer), num_draft_tokens)
        self._pools = pools
        self._facts: list[Words] = []

    def begin(self, step: Step, req_to_token: torch.Tensor) -> None:
        """Begin `step`, with the slots of rows that it was launched with."""
        self._layer.req_to_token_pool.req_to_token.copy_(req_to_token)
        self._layer.contexts = {one.row: one for one in step.contexts}

    def end(
        self,
        step: Step,
        batch: ForwardBatch,
        accepted: torch.Tensor | None,
        snapshots: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> None:
        """Follow `step`, which has run; see `follow`."""
        self._facts, layer = step.facts(), self._layer
        layer.wanted = [entry for one in step.contexts for entry in _entries_of(one)]
        self.follow(batch, layer.hidden_of(np.concatenate(self._facts)), accepted, snapshots)
        expect(not layer.wanted, f"entries were not stored: {layer.wanted}")

    def _commit(self, batch: ForwardBatch, counts: torch.Tensor, targets: torch.Tensor) -> None:
        assert batch.states is not None
        running = batch.states.slots.tolist()
        uses = list(zip(self._facts, running, counts.tolist(), targets.tolist(), strict=True))
        for buffer in self._pools.prefixes:
            for layer in self._pools.state.state_layers:
                words, marks = buffer.read(layer), buffer.marks[layer]
                for new, slot, count, target in uses:
                    expect(0 <= count <= len(new), f"states after {count} of {len(new)} tokens")
                    if target:
                        words[target] = new[count - 1] ^ marks if count else words[slot]


class _DraftLayer:
    """The `ModelRunner` interface that `EAGLEWorker` uses. See `CheckableSpeculation`."""

    def __init__(
        self,
        pools: CheckablePools,
        rows: ReqToTokenPool,
        on_wrong: Callable[[WrongContext], None],
    ) -> None:
        self._pools = pools
        self._on_wrong = on_wrong
        self.pools = {pool.spec.name: pool for pool in pools.model_pools().pools}
        self.model_config = SimpleNamespace(num_hidden_layers=pools.state.draft_layer)
        self.req_to_token_pool = copy.copy(rows)
        self.req_to_token_pool.req_to_token = rows.req_to_token.clone()
        self.model = self
        self.contexts: dict[int, Context] = {}
        """The step's requests in order, by row."""
        self.wanted: list[tuple[int, int, int]] = []
        """Position, token and slot of each entry that the engine has to store next."""

    def capture_decoding(self, forward: object) -> list[int]:
        """Captures no graph."""
        return []

    def hidden_of(self, found: Words) -> torch.Tensor:
        """`[n, hidden_size]`: the hidden states of the facts `[n, 2]`."""
        return (
            torch.from_numpy(found[:, None] ^ self._pools.hidden_marks)
            .view(torch.float32)
            .flatten(1)
        )

    def draft_logits(self, hidden: torch.Tensor) -> _Drafts:
        """The drafts after tokens; `hidden`: the layer's own hidden states."""
        return _Drafts(self._facts_of(hidden)[:, 0, 0].tolist())

    def store_drafts(self, batch: ForwardBatch, hidden: torch.Tensor) -> None:
        """See `ModelRunner.store_drafts`."""
        tokens, before = batch.input_ids.tolist(), self._facts_of(hidden)
        found = list(
            zip(batch.positions.tolist(), tokens, batch.out_cache_loc.tolist(), strict=True)
        )
        expect(
            found == self.wanted and len(before) == len(tokens),
            f"entries (position, token, slot) {found}, not {self.wanted}",
        )
        self.wanted = []
        done = 0
        for row, context in self.contexts.items():
            first = max(context.begin, 1)
            new = len(context.slots) - first
            if new:
                part = slice(done, done + new)
                is_stored = context.num_old > first
                self._entries(row, context.slots, tokens[part], before[part], is_stored)
                done += new

    def forward_draft(self, batch: ForwardBatch, hidden: torch.Tensor) -> torch.Tensor:
        """See `ModelRunner.forward_draft`. The layer's own hidden states are facts."""
        lengths = batch.seq_lens_cpu
        expect(batch.seq_lens.tolist() == lengths, "entries: seq_lens differs from seq_lens_cpu")
        expect(len(lengths) == len(hidden) == len(batch.input_ids), "entries: other tokens")
        expect(batch.positions.tolist() == lengths, f"entries at {batch.positions}, not {lengths}")
        tokens, stored = batch.input_ids.tolist(), batch.out_cache_loc.tolist()
        before, table = self._facts_of(hidden), batch.req_to_token_pool.req_to_token.numpy()
        made: list[Words] = []
        for nth, row in enumerate(batch.req_pool_indices.tolist()):
            slots = table[row, : lengths[nth]].astype(np.int64)
            expect(stored[nth] == slots[-1], f"row {row}: an entry in a slot that is not its own")
            whole = np.concatenate([self.req_to_token_pool.req_to_token[row, :1].numpy(), slots])
            one = slice(nth, nth + 1)
            made.append(self._entries(row, whole, tokens[one], before[one], False))
        return self.hidden_of(np.concatenate(made))

    def _facts_of(self, hidden: torch.Tensor) -> Words:
        """`[n, copies, 2]`: the facts of hidden states."""
        raw = hidden.contiguous().view(torch.uint8).numpy()
        return raw.view(np.uint64).reshape(len(raw), -1, 2) ^ self._pools.hidden_marks

    def _entries(
        self,
        row: int,
        slots: npt.NDArray[np.int64],
        tokens: Sequence[int],
        before: Words,
        is_stored: bool,
    ) -> Words:
        """Check what the layer has of a request, and store its new entries. If anything is wrong,
        report it and store nothing.

        Args:
            row: Its row.
            slots: The slot of each position.
            tokens: Its last tokens, which are new.
            before: `[n, copies, 2]`: the hidden state before each of them.
            is_stored: True if the entry of the first of them is there already.

        Returns:
            `[n, 2]`: the facts of the new tokens.
        """
        try:
            return self._checked_entries(row, slots, tokens, before, is_stored)
        except WrongContext as error:
            self._on_wrong(error)
            return facts([NOISE] * len(tokens), len(slots) - len(tokens), tokens)

    def _checked_entries(
        self,
        row: int,
        slots: npt.NDArray[np.int64],
        tokens: Sequence[int],
        before: Words,
        is_stored: bool,
    ) -> Words:
        layer, main = self._pools.state.draft_layer, self._pools.state.token_layers[0]
        num_old = len(slots) - len(tokens) + is_stored
        one = self._pools.tokens[0]
        for buffer in self._pools.tokens:
            if buffer.read(layer)[slots[0]].any():
                raise WrongContext(f"row {row}, draft layer: position 0 has {buffer.name}")
        known = np.concatenate(
            [
                one.read(main)[slots[:1], 0] ^ one.marks[main, 0],
                one.read(layer)[slots[1:num_old], 0] ^ one.marks[layer, 0],
            ]
        )
        at = first_break(known, self.contexts[row].seed)
        if at is not None:
            raise WrongContext(
                f"row {row}, draft layer, {one.name}, position {at} of {len(slots)}: does not "
                f"follow from what is before it; it holds {describe(known[at])}"
            )
        new = known[len(known) - is_stored :].tolist()
        end = known[-1]
        for position, token, state in zip(
            range(num_old, len(slots)), tokens[is_stored:], before[is_stored:], strict=True
        ):
            if (state != end).any():
                raise WrongContext(
                    f"row {row}, position {position}: the hidden state before it holds "
                    f"{describe(state[0])} and not {describe(end)}"
                )
            end = facts(extend(int(end[0]), [token]), position, [token])[0]
            new.append(end.tolist())
        every = np.array(new, dtype=np.uint64).reshape(-1, 2)
        whole = np.concatenate([known[1:], every[int(is_stored) :]])
        for buffer in self._pools.tokens:
            words, marks = buffer.read(layer), buffer.marks[layer]
            words[slots[num_old:]] = every[int(is_stored) :, None] ^ marks
            if (words[slots[1:]] ^ marks != whole[:, None]).any():
                raise WrongContext(f"row {row}, draft layer: {buffer.name} differ in their copies")
        return every


def _entries_of(context: Context) -> Iterator[tuple[int, int, int]]:
    """Position, token and slot of each entry that a step stores for a request. Slot 0 stands for an
    entry that is there already."""
    for position, token in enumerate(context.new_tokens, context.begin):
        if position:
            slot = int(context.slots[position]) if position >= context.num_old else 0
            yield position, token, slot


class _Drafts:
    def __init__(self, hashes: Sequence[int]) -> None:
        self._hashes = hashes

    def argmax(self) -> torch.Tensor:
        """int64 `[n]`: the drafted tokens."""
        return torch.tensor([draft_of(at) for at in self._hashes])
