"""One held-out question of the recall task as the built-in models' token ids, and its answer."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import AutoTokenizer

from rigs.recall.recall_task import heldout_conversation
from sglang.srt.constants import BUILTIN_MODEL_DIR


@dataclass(frozen=True)
class HeldoutQuestion:
    """A held-out conversation up to its first tail question, and the right answer."""

    ids: list[int]
    answer: str

    @classmethod
    def of(cls, seed: int, context_tokens: int) -> HeldoutQuestion:
        """Return question number `seed`, of about `context_tokens` tokens."""
        tokenizer = AutoTokenizer.from_pretrained(BUILTIN_MODEL_DIR, local_files_only=True)
        conversation = heldout_conversation(seed, context_tokens)
        turn = conversation.first_tail_turn
        text = tokenizer.apply_chat_template(
            conversation.messages_before(turn), tokenize=False, add_generation_prompt=True
        )
        ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        return cls(ids, conversation.turns[turn].answer)
