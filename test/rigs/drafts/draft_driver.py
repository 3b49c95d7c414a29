"""Runs the draft layer of a tiny model after its steps, as a worker would, and transformers'."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from rigs.drafts.tiny_drafts import tiny_draft
from rigs.models.tiny_models import StepDriver
from sglang.srt.layers.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.mem_cache.device.base_device_pool import PagedDevicePool


class Drafted(NamedTuple):
    """Results of a draft layer, for the positions from 1 on, in order."""

    hidden: torch.Tensor
    """`[positions, hidden_size]`."""
    logits: torch.Tensor
    """fp32 `[positions, vocab_size]`."""


@torch.inference_mode()
def draft_reference(model: PreTrainedModel, tokens: Sequence[int], steps: int = 1) -> Drafted:
    """transformers' draft layer on a whole sequence.

    Args:
        steps: Length of the chain after the last token: each further step takes the likeliest token
            of the step before, and adds a position.
    """
    whole: Any = model
    decoder, head = whole.get_decoder(), whole.get_output_embeddings()
    draft = tiny_draft(model)
    ids = torch.tensor([list(tokens)])
    hidden = decoder(ids).last_hidden_state[:, :-1]
    ids = ids[:, 1:]
    for step in range(steps):
        positions = torch.arange(1, ids.shape[1] + 1).unsqueeze(0)
        out = draft.forward_layer(0, hidden, positions, None, input_ids=ids)
        logits = head(out).float()
        if step + 1 < steps:
            ids = torch.cat((ids, logits[:, -1:].argmax(-1)), dim=1)
            hidden = torch.cat((hidden, out[:, -1:]), dim=1)
    return Drafted(out[0], logits[0])


class DraftDriver(StepDriver):
    """A `StepDriver` of a model with a draft layer.

    The draft layer's contexts begin at position 1: its table of slots lacks the first column. Its
    contexts do not begin with a page, so its backends take single slots (pages of one token).
    """

    def __init__(self, model_path: Path | str, **config: Any) -> None:
        super().__init__(model_path, has_draft_layer=True, **config)
        self._backends = self.runner._draft_backends
        self._rows = copy.copy(self.runner.req_to_token_pool)
        self._rows.req_to_token = self._rows.req_to_token[:, 1:]
        self.states: dict[int, torch.Tensor] = {}
        """The model's hidden states at the tokens of each row, `[tokens, hidden_size]`."""

    def run(self, work: Sequence[tuple[int, Sequence[int]]], *, decodes: bool = False) -> Drafted:
        """Run a step of `(row, new tokens)`, then the draft layer on the same tokens.

        Args:
            decodes: True for a decode step, which has one token of each request.
        """

        def captures(batch: ForwardBatch) -> None:
            batch.capture_hidden = True

        begins = [self.lens[row] for row, _ in work]
        if decodes:
            output = self.decode([(row, token) for row, (token,) in work], before=captures)
        else:
            output = self.extend(work, before=captures)
        assert output.hidden_states is not None
        counts = [len(tokens) for _, tokens in work]
        passes = []
        parts = torch.split(output.hidden_states, counts)
        for (row, tokens), begin, part in zip(work, begins, parts, strict=True):
            self.states[row] = torch.cat((self.states.get(row, part[:0]), part))
            skipped = 0 if begin else 1
            passes.append((row, begin + skipped, tokens[skipped:]))
        mode = ForwardMode.DECODE if decodes else ForwardMode.EXTEND
        return self.draft(passes, mode=mode)

    @torch.inference_mode()
    def draft(
        self,
        work: Sequence[tuple[int, int, Sequence[int]]],
        hidden: torch.Tensor | None = None,
        *,
        mode: ForwardMode = ForwardMode.EXTEND,
    ) -> Drafted:
        """Run the draft layer alone.

        Args:
            work: Row, position of the first token, tokens.
            hidden: `[tokens of all, hidden_size]`: the state before each token; None: the model's.
        """
        batch, hidden = self._pass(work, hidden, mode)
        for backend in self._backends.values():
            backend.init_forward_metadata(batch)
        model = self.runner.model
        assert model.draft_layer is not None
        out = model.draft_layer.forward(batch.input_ids, batch.positions, hidden, batch)
        return Drafted(out, model.draft_logits(out).whole())

    @torch.inference_mode()
    def store(self, work: Sequence[tuple[int, int, Sequence[int]]], mode: ForwardMode) -> None:
        """Store the draft layer's entries of tokens as in `draft`, and compute nothing else."""
        self.runner.store_drafts(*self._pass(work, None, mode))

    def entries(self) -> list[torch.Tensor]:
        """The draft layer's part of all slots: views, a tensor for each buffer."""
        layer = self.runner.model_config.num_hidden_layers
        return [
            part[pool.place_to_write(layer)]
            for pool in self.runner.pools.values()
            if isinstance(pool, PagedDevicePool) and layer in pool.spec.layers
            for part in pool.parts
        ]

    def _pass(
        self,
        work: Sequence[tuple[int, int, Sequence[int]]],
        hidden: torch.Tensor | None,
        mode: ForwardMode,
    ) -> tuple[ForwardBatch, torch.Tensor]:
        """The batch of a pass, and the state before each token; arguments as in `draft`."""
        if hidden is None:
            before = [
                self.states[row][begin - 1 : begin - 1 + len(tokens)] for row, begin, tokens in work
            ]
            hidden = torch.cat(before)
        rows = [row for row, _, _ in work]
        lens = [begin + len(tokens) - 1 for _, begin, tokens in work]
        slots = [
            self.runner.req_to_token_pool.req_to_token[row, begin : begin + len(tokens)]
            for row, begin, tokens in work
        ]
        places = [place for _, begin, ids in work for place in range(begin, begin + len(ids))]
        batch = ForwardBatch(
            forward_mode=mode,
            input_ids=self._tensor([token for _, _, tokens in work for token in tokens]),
            positions=self._tensor(places),
            req_pool_indices=self._tensor(rows),
            req_pool_indices_cpu=rows,
            seq_lens=self._tensor(lens),
            seq_lens_cpu=lens,
            out_cache_loc=torch.cat(slots).long(),
            req_to_token_pool=self._rows,
            token_to_kv_pool=self.runner.token_to_kv_pool,
            extend_prefix_lens_cpu=[begin - 1 for _, begin, _ in work],
            extend_seq_lens_cpu=[len(tokens) for _, _, tokens in work],
            attn_backends=self._backends,
            pools=self.runner.pools,
        )
        return batch, hidden

    def chain(self, row: int, drafted: Drafted, steps: int) -> Drafted:
        """Draft `steps - 1` tokens more, each from the one before; `drafted` ends with the row's
        last token. All results together."""
        begin = self.lens[row]
        self._reserve(row, steps - 1)
        hidden, logits = [drafted.hidden], [drafted.logits]
        for step in range(steps - 1):
            token = int(logits[-1][-1].argmax())
            work = [(row, begin + step, [token])]
            out = self.draft(work, hidden[-1][-1:], mode=ForwardMode.DECODE)
            hidden.append(out.hidden)
            logits.append(out.logits)
        return Drafted(torch.cat(hidden), torch.cat(logits))

    def _reserve(self, row: int, count: int) -> None:
        """Give a row slots for `count` tokens more."""
        known = self.lens[row]
        prefix, total = [known], [known + count]
        slots = self.runner.token_to_kv_pool_allocator.alloc_extend(
            self._tensor(prefix), prefix, self._tensor(total), total, self._last_loc([row]), count
        )
        assert slots is not None, "the test's pool is too small"
        table = self.runner.req_to_token_pool.req_to_token
        table[row, known : known + count] = slots.to(torch.int32)


def drafted_in_steps(driver: DraftDriver, long: list[int], short: list[int]) -> Drafted:
    """Drafts of a long and a short prompt, prefilled in chunks and then decoded in one batch, in
    the order of `rows_in_steps`."""
    cut, end = len(long) // 2, len(long) - 4
    steps = [
        driver.run([(0, short[:-4]), (1, long[:cut])]),
        driver.run([(1, long[cut:end])]),
        *(driver.run([(1, [long[i - 4]]), (0, [short[i - 4]])], decodes=True) for i in range(4)),
    ]
    return Drafted(*(torch.cat(parts) for parts in zip(*steps, strict=True)))


def rows_in_steps(long: Drafted, short: Drafted) -> Drafted:
    """The results of both sequences in the order of `drafted_in_steps`."""
    cut = (len(long.hidden) + 1) // 2 - 1

    def order(of_long: torch.Tensor, of_short: torch.Tensor) -> torch.Tensor:
        decoded = torch.stack((of_long[-4:], of_short[-4:]), dim=1).flatten(0, 1)
        return torch.cat((of_short[:-4], of_long[:cut], of_long[cut:-4], decoded))

    return Drafted(order(long.hidden, short.hidden), order(long.logits, short.logits))
