"""The draft layer of a checkable model: it drafts tokens, and checks what it reads.

A hidden state is the fact of its token, and an entry of the layer too. The layer computes an entry
from the hidden state of the token before, so it is wrong if that state is. All earlier entries and
the hidden state are checked whenever the layer runs.

`EAGLEWorker` is the engine's own. A draft is a function of the hash before it, so all ranks draft
the same.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Final, cast

import numpy as np
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
from rigs.schedulers.checkable_step import Step, expect
from sglang.srt.layers.forward_batch_info import ForwardBatch
from sglang.srt.mem_cache.device.memory_pool import ReqToTokenPool
from sglang.srt.speculative.eagle_worker import EAGLEWorker

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner

_RIGHT: Final = 52
"""Of 64 drafts as many are right."""


def draft_of(at: int) -> int:
    """The token that the layer drafts after the hash `at`."""
    token = word(at)
    return token if at >> 58 < _RIGHT else token % (VOCAB_SIZE - 1) + 1


class CheckableSpeculation(EAGLEWorker):
    """Speculation over a checkable model. The thread that runs the steps uses it.

    Args:
        pools: The model's pools.
        rows: The rows of requests. Those of a step are given when it runs.
        num_draft_tokens: See `EAGLEWorker`.
        on_wrong: Called with what the layer has found wrong; raises it, or counts it.
    """

    def __init__(
        self,
        pools: CheckablePools,
        rows: ReqToTokenPool,
        num_draft_tokens: int,
        on_wrong: Callable[[WrongContext], None],
    ) -> None:
        self._layer = _DraftLayer(pools, rows, on_wrong)
        # It has what an `EAGLEWorker` uses of a runner.
        super().__init__(cast("ModelRunner", self._layer), num_draft_tokens)
        self._pools = pools
        self._facts: list[Words] = []

    def begin(self, step: Step, req_to_token: torch.Tensor) -> None:
        """Begin `step`, with the slots of rows that it was launched with."""
        self._layer.req_to_token_pool.req_to_token.copy_(req_to_token)
        self._layer.seeds = {one.row: one.seed for one in step.contexts}

    def end(
        self,
        step: Step,
        batch: ForwardBatch,
        accepted: torch.Tensor | None,
        snapshots: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> None:
        """Follow `step`, which has run; see `follow`."""
        self._facts = step.facts()
        self.follow(batch, self._layer.hidden_of(np.concatenate(self._facts)), accepted, snapshots)

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
    """What an `EAGLEWorker` uses of a `ModelRunner`. Arguments: see `CheckableSpeculation`."""

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
        self.seeds: dict[int, int] = {}
        """Seeds of the step's requests, by row."""

    def capture_decoding(self, forward: object) -> list[int]:
        """Nothing is captured."""
        return []

    def hidden_of(self, found: Words) -> torch.Tensor:
        """`[n, hidden_size]`: the hidden states of the facts `[n, 2]`."""
        return (
            torch.from_numpy(found[:, None] ^ self._pools.hidden_marks)
            .view(torch.float32)
            .flatten(1)
        )

    def draft_logits(self, hidden: torch.Tensor) -> _Drafts:
        """What is drafted behind tokens; `hidden`: the layer's own hidden states."""
        return _Drafts(self._facts_of(hidden)[:, 0, 0].tolist())

    def store_drafts(self, batch: ForwardBatch, hidden: torch.Tensor) -> None:
        """See `ModelRunner.store_drafts`."""
        self.forward_draft(batch, hidden)

    def forward_draft(self, batch: ForwardBatch, hidden: torch.Tensor) -> torch.Tensor:
        """See `ModelRunner.forward_draft`. The layer's own hidden states are facts."""
        lengths = batch.seq_lens_cpu
        expect(batch.seq_lens.tolist() == lengths, "entries: seq_lens differs from seq_lens_cpu")
        is_decode = batch.forward_mode.is_decode()
        num_new = [1] * len(lengths) if is_decode else batch.extend_seq_lens_cpu or []
        expect(sum(num_new) == len(hidden) == len(batch.input_ids), "entries: other tokens")
        positions, rows = batch.positions.tolist(), batch.req_pool_indices.tolist()
        tokens, stored = batch.input_ids.tolist(), batch.out_cache_loc.tolist()
        before, table = self._facts_of(hidden), batch.req_to_token_pool.req_to_token.numpy()
        made: list[Words] = []
        done = 0
        for row, length, new in zip(rows, lengths, num_new, strict=True):
            part = slice(done, done + new)
            done += new
            wanted = [*range(length - new + 1, length + 1)]
            expect(
                positions[part] == wanted, f"row {row}: entries at {positions[part]}, not {wanted}"
            )
            slots = table[row, :length].astype(np.int64)
            is_stored = stored[part][0] == 0
            expect(
                stored[part][is_stored:] == slots[length - new + is_stored :].tolist(),
                f"row {row}: entries in slots that are not its own",
            )
            try:
                made.append(self._entries(row, slots, tokens[part], before[part], is_stored))
            except WrongContext as error:
                self._on_wrong(error)
                made.append(facts([NOISE] * new, length - new + 1, tokens[part]))
        return self.hidden_of(np.concatenate(made))

    def _facts_of(self, hidden: torch.Tensor) -> Words:
        """`[n, copies, 2]`: the facts of hidden states."""
        raw = hidden.contiguous().view(torch.uint8).numpy()
        return raw.view(np.uint64).reshape(len(raw), -1, 2) ^ self._pools.hidden_marks

    def _entries(
        self,
        row: int,
        slots: np.ndarray,
        tokens: Sequence[int],
        before: Words,
        is_stored: bool,
    ) -> Words:
        """Check what the layer reads for a request, and store its new entries.

        Args:
            row: Its row.
            slots: int64: the slot of each entry, from position 1 on.
            tokens: The new tokens.
            before: `[n, copies, 2]`: the hidden state before each of them.
            is_stored: True if the entry of the first of them is there already.

        Returns:
            `[n, 2]`: the facts of the new tokens.
        """
        layer, main = self._pools.state.draft_layer, self._pools.state.token_layers[0]
        num_old = len(slots) - len(tokens) + is_stored
        first = self.req_to_token_pool.req_to_token[row, 0]
        one = self._pools.tokens[0]
        known = np.concatenate(
            [
                one.read(main)[first : first + 1, 0] ^ one.marks[main, 0],
                one.read(layer)[slots[:num_old], 0] ^ one.marks[layer, 0],
            ]
        )
        at = first_break(known, self.seeds[row])
        if at is not None:
            raise WrongContext(
                f"row {row}, draft layer, {one.name}, position {at} of {len(slots) + 1}: does not "
                f"follow from what is before it; it holds {describe(known[at])}"
            )
        new = known[len(known) - is_stored :].tolist()
        end = known[-1]
        for nth in range(int(is_stored), len(tokens)):
            if (before[nth] != end).any():
                raise WrongContext(
                    f"row {row}, position {num_old + nth - is_stored + 1}: the hidden state before "
                    f"it holds {describe(before[nth, 0])} and not {describe(end)}"
                )
            made = extend(int(end[0]), tokens[nth : nth + 1])
            end = facts(made, num_old + nth - is_stored + 1, tokens[nth : nth + 1])[0]
            new.append(end.tolist())
        every = np.array(new, dtype=np.uint64).reshape(-1, 2)
        whole = np.concatenate([known[1:], every[int(is_stored) :]])
        for buffer in self._pools.tokens:
            words, marks = buffer.read(layer), buffer.marks[layer]
            words[slots[num_old:]] = every[int(is_stored) :, None] ^ marks
            if (words[slots] ^ marks != whole[:, None]).any():
                raise WrongContext(f"row {row}, draft layer: {buffer.name} differ in their copies")
        return every


class _Drafts:
    def __init__(self, hashes: Sequence[int]) -> None:
        self._hashes = hashes

    def argmax(self) -> torch.Tensor:
        """int64 `[n]`: the drafted tokens."""
        return torch.tensor([draft_of(at) for at in self._hashes])
