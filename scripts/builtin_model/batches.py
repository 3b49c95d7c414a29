"""Training batches of the recall task: whole conversations as token ids with targets."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from transformers import PreTrainedTokenizerFast

from rigs.recall.recall_task import (
    LAYOUTS,
    RecallConversation,
    Split,
    draw_style,
    make_conversation,
    recall_rng,
)

LAYOUT_WEIGHTS = (3, 2, 4)  # block, spread, interleaved
TAIL_SHARES = {"block": (0.3, 0.7), "spread": (0.15, 0.5), "interleaved": (0.1, 0.4)}
SHORTEST_QUESTION_TURN = 14  # tokens, with its answer
SPELLED_BELOW = 300  # tokens; longer conversations use names of the vocabulary only
NO_TARGET = -100


@dataclass(frozen=True)
class BatchShape:
    """The batch of one optimizer step: `rows` conversations cut to `length` tokens."""

    length: int
    rows: int


@dataclass(frozen=True)
class Batch:
    """Conversations as tensors, all of shape [rows, length] on the CPU.

    Attributes:
        ids: int64 token ids.
        targets: int64, the next token if it belongs to an answer, else `NO_TARGET`.
        answers: int64, for targets of a code the number of its question (from 0 over the whole
            batch), else -1.
    """

    ids: torch.Tensor
    targets: torch.Tensor
    answers: torch.Tensor


class BatchBuilder:
    """Builds batches. One per process. A batch is a function of split, seed and shape."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer = tokenizer
        turn_end = tokenizer.convert_tokens_to_ids("<|im_end|>")
        assert isinstance(turn_end, int)
        self._turn_end = turn_end
        self._head = {
            role: tokenizer(f"<|im_start|>{role}\n").input_ids
            for role in ("system", "user", "assistant")
        }
        self._tail = tokenizer("<|im_end|>\n").input_ids
        self._pad = tokenizer.pad_token_id

    def build(self, split: Split, seed: int, shape: BatchShape) -> Batch:
        """Write and tokenize `shape.rows` conversations from the streams seed * 4096 + row."""
        ids = torch.full((shape.rows, shape.length + 1), self._pad)
        is_target = torch.zeros((shape.rows, shape.length + 1), dtype=torch.bool)
        answers = torch.full((shape.rows, shape.length + 1), -1)
        count = 0
        for row in range(shape.rows):
            conversation = self._write(recall_rng(split, seed * 4096 + row), shape.length)
            tokens, spans = self._tokenize(conversation)
            tokens = tokens[: shape.length + 1]
            ids[row, : len(tokens)] = torch.tensor(tokens)
            for start, end, asks in spans:
                if end > shape.length + 1:
                    break
                is_target[row, start:end] = True
                if asks:
                    answers[row, start:end] = count
                    count += 1
        targets = ids.masked_fill(~is_target, NO_TARGET)[:, 1:].contiguous()
        return Batch(ids[:, :-1].contiguous(), targets, answers[:, 1:].contiguous())

    def _write(self, rng: random.Random, length: int) -> RecallConversation:
        layout = rng.choices(LAYOUTS, LAYOUT_WEIGHTS)[0]
        style = draw_style(rng, layout, spelled=length < SPELLED_BELOW)
        tail = length * rng.uniform(*TAIL_SHARES[layout])
        questions = math.ceil(tail / SHORTEST_QUESTION_TURN)
        return make_conversation(rng, style, max(1, round(length - tail)), questions)

    def _tokenize(
        self, conversation: RecallConversation
    ) -> tuple[list[int], list[tuple[int, int, bool]]]:
        """Return the token ids of the rendered chat and the spans (start, end, asks) of answers."""
        texts = [text for turn in conversation.turns for text in (turn.user, turn.answer)]
        encoded = [entry.ids for entry in self._tokenizer.backend_tokenizer.encode_batch(texts)]
        tokens: list[int] = []
        if conversation.system:
            system = self._tokenizer(conversation.system).input_ids
            tokens += self._head["system"] + system + self._tail
        spans = []
        for index, turn in enumerate(conversation.turns):
            tokens += self._head["user"] + encoded[2 * index] + self._tail
            tokens += self._head["assistant"]
            start = len(tokens)
            tokens += [*encoded[2 * index + 1], self._turn_end]
            spans.append((start, len(tokens), turn.asks))
            tokens += self._tail[1:]
        return tokens, spans


class TrainingStream(IterableDataset[Batch]):
    """The batches of `shapes` in order, distributed over the loader's workers in turn.

    Args:
        first_seed: Seed of the first batch; those of the next ones follow.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        shapes: Sequence[BatchShape],
        first_seed: int = 0,
    ) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._shapes = shapes
        self._first_seed = first_seed

    def __iter__(self) -> Iterator[Batch]:
        worker = get_worker_info()
        first, stride = (worker.id, worker.num_workers) if worker else (0, 1)
        builder = BatchBuilder(self._tokenizer)
        for step in range(first, len(self._shapes), stride):
            yield builder.build("train", self._first_seed + step, self._shapes[step])

    def start(self, workers: int) -> Iterator[Batch]:
        """Start processes that build the batches ahead; 0: `next` builds them in this one."""
        ahead = 4 if workers else None
        loader: DataLoader[Batch] = DataLoader(
            self, batch_size=None, num_workers=workers, prefetch_factor=ahead
        )
        return iter(loader)
