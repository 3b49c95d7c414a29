"""What the MTP layer learns: the trunk's own words, hidden states and attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from batches import NO_TARGET, Batch
from mtp_model import NUM_STEPS, TEACHER_LAYER, attention_scores, gathered, keys_values
from torch.nn import functional

CODE_TOKENS = 5  # of the answer to a question: four digits and the end token
AFTER_END = 3  # positions after the last answer that learn; there the trunk repeats the end token


@dataclass(frozen=True)
class Lesson:
    """Conversations with the trunk's answers at the positions that draft.

    Tensors are on torch's default device.

    Attributes:
        ids: int64 [rows, length]. After the last answer of a row, all are the end token.
        hidden: The trunk's hidden states after its final norm, [rows, length, hidden size].
        anchors: int64 [rows, n], positions of tokens that the trunk said, each the last token
            before a chain of drafts. Rows with fewer have position 1 in their place.
        places: int64 [rows, n], the number of an anchor's token in the code that it belongs to
            (from 0); elsewhere -1.
        targets: int64 [NUM_STEPS, rows, n], what the trunk says at each step of a chain;
            `NO_TARGET` after a step at which the conversation goes on in other words.
        attention: The trunk's own at each step's position, to positions 1 up to the anchor;
            [NUM_STEPS, rows, heads, n, length - 1].
    """

    ids: torch.Tensor
    hidden: torch.Tensor
    anchors: torch.Tensor
    places: torch.Tensor
    targets: torch.Tensor
    attention: torch.Tensor


class Teacher:
    """Writes lessons: the trunk's words about the conversations of `BatchBuilder`."""

    def __init__(self, trunk: Any, seed: int = 0) -> None:
        self._trunk = trunk
        self._random = torch.Generator(torch.get_default_device()).manual_seed(seed)

    @torch.no_grad()
    def teach(self, batch: Batch, other_share: float = 1.0) -> Lesson:
        """Run the trunk on the conversations of a batch.

        Args:
            other_share: Share of the anchors that are not the first digit of a code, which the
                pass over a prompt gives, and where its first chain begins. Those all are.
        """
        end: int = self._trunk.config.eos_token_id
        rows, length = batch.ids.shape
        position = torch.arange(length).expand(rows, -1)
        is_answer = functional.pad(batch.targets != NO_TARGET, (1, 0))[:, :-1]
        answered = (is_answer * position).amax(1, keepdim=True)
        is_after = (position > answered) & (answered > 0)
        ids = batch.ids.masked_fill(is_after, end)
        normed: list[torch.Tensor] = []
        attention = self._trunk.model.layers[TEACHER_LAYER].self_attn
        hook = attention.register_forward_pre_hook(
            lambda _, __, inputs: normed.append(inputs["hidden_states"]), with_kwargs=True
        )
        hidden = self._trunk.model(input_ids=ids, use_cache=False).last_hidden_state
        hook.remove()
        places = _places(batch.answers)
        is_anchor = is_answer | (is_after & (position <= answered + AFTER_END))
        drawn = torch.rand(places.shape, generator=self._random) < other_share
        is_anchor &= ((places == 0) | drawn) & (position < length - NUM_STEPS)
        anchors = _padded(is_anchor)
        said = self._said(hidden, is_anchor)
        agrees = is_anchor.gather(1, anchors)
        keys, _ = keys_values(self._trunk, attention, normed[0][:, 1:], position[:, 1:])
        seen = position[:, None, 1:] <= anchors[:, :, None]
        targets, looks = [], []
        for step in range(NUM_STEPS):
            at = anchors + step
            target = said.gather(1, at)
            targets.append(target.masked_fill(~agrees, NO_TARGET))
            agrees = agrees & (ids.gather(1, at + 1) == target)
            queries = gathered(normed[0], at)
            scores = attention_scores(self._trunk, attention, queries, at, keys, seen)
            looks.append(scores.softmax(-1))
        places = places.gather(1, anchors).masked_fill(targets[0] == NO_TARGET, -1)
        return Lesson(ids, hidden, anchors, places, torch.stack(targets), torch.stack(looks))

    def _said(self, hidden: torch.Tensor, is_anchor: torch.Tensor) -> torch.Tensor:
        """Return the trunk's next tokens, [rows, length], at anchors and the steps after them."""
        wanted = is_anchor.clone()
        for step in range(1, NUM_STEPS):
            wanted[:, step:] |= is_anchor[:, :-step]
        said = torch.full(is_anchor.shape, NO_TARGET)
        said[wanted] = self._trunk.lm_head(hidden[wanted]).argmax(-1)
        return said


def _padded(is_anchor: torch.Tensor) -> torch.Tensor:
    """Return the true positions of each row, [rows, most of a row], padded with 1."""
    most = max(1, int(is_anchor.sum(1).max()))
    order = is_anchor.int().sort(dim=1, descending=True, stable=True)
    return order.indices[:, :most].masked_fill(order.values[:, :most] == 0, 1)


def _places(answers: torch.Tensor) -> torch.Tensor:
    """Return for each token of a code its number in it, from 0, else -1: [rows, length].

    Args:
        answers: Of a `Batch`: the number of the question whose answer has the *next* token.
    """
    places = torch.full_like(answers, -1)
    for row, numbers in enumerate(answers):
        for number in torch.unique(numbers[numbers >= 0]):
            before = (numbers == number).nonzero()[:, 0]
            if len(before) == CODE_TOKENS and before[-1] + 1 < answers.shape[1]:
                places[row, before + 1] = torch.arange(CODE_TOKENS)
    return places
