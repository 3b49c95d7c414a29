"""Scores the built-in model: python scripts/builtin_model/evaluate.py [--json FILE]

Greedy decoding with transformers over held-out conversations, rendered by the chat template. The
model's own answers stay in the conversation, as with a real client.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from make_tokenizer import PACKAGE_DIR
from transformers import AutoModelForCausalLM, AutoTokenizer

from rigs.recall.recall_task import RecallConversation, heldout_conversation

MAX_ANSWER_TOKENS = 12


class Answerer:
    """A checkpoint that answers chat messages greedily, one at a time."""

    def __init__(self, directory: Path, device: str, dtype: torch.dtype) -> None:
        self.tokenizer: Any = AutoTokenizer.from_pretrained(directory)
        model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
        self._model = model.to(device)

    def answer(self, messages: list[dict[str, str]]) -> tuple[str, int]:
        """Return the answer's text and the tokens of its prompt."""
        prompt = self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        ).to(self._model.device)
        length = prompt["input_ids"].shape[1]
        output = self._model.generate(**prompt, max_new_tokens=MAX_ANSWER_TOKENS, do_sample=False)
        return self.tokenizer.decode(output[0, length:], skip_special_tokens=True), length


def score_length(answerer: Answerer, tokens: int, examples: int, questions: int) -> dict[str, Any]:
    """Ask `questions` in each of `examples` conversations of `tokens` tokens; count right codes."""

    def count(text: str) -> int:
        return len(answerer.tokenizer(text).input_ids)

    right, lengths, wrong = 0, [], []
    for seed in range(examples):
        conversation = heldout_conversation(seed, tokens, questions, count)
        for said, want, got, length in _ask(answerer, conversation):
            right += said
            lengths.append(length)
            if not said:
                wrong.append(f"seed {seed}: {got!r} instead of {want!r}")
    return {
        "context_tokens": tokens,
        "questions": len(lengths),
        "score": right / len(lengths),
        "mean_prompt_tokens": round(sum(lengths) / len(lengths)),
        "wrong": wrong[:5],
    }


def _ask(answerer: Answerer, conversation: RecallConversation) -> list[tuple[bool, str, str, int]]:
    """Return (right, expected, answered, prompt tokens) for each question of the tail."""
    first = conversation.first_tail_turn
    messages = conversation.messages_before(first)
    results = []
    for turn in range(first, len(conversation.turns)):
        want = conversation.turns[turn].answer
        got, length = answerer.answer(messages)
        results.append((got == want, want, got, length))
        messages.append({"role": "assistant", "content": got})
        if turn + 1 < len(conversation.turns):
            messages.append({"role": "user", "content": conversation.turns[turn + 1].user})
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=PACKAGE_DIR)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")  # noqa: TID251
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--context-tokens", type=int, nargs="+", default=[100, 300, 2000, 6000])
    parser.add_argument("--num-examples", type=int, default=60)
    parser.add_argument("--num-questions", type=int, default=4)
    parser.add_argument("--json", type=Path, help="write the results here as well")
    args = parser.parse_args()
    answerer = Answerer(args.model, args.device, getattr(torch, args.dtype))
    results = []
    for tokens in args.context_tokens:
        began = time.monotonic()
        result = score_length(answerer, tokens, args.num_examples, args.num_questions)
        results.append(result)
        print(json.dumps(result), f"{time.monotonic() - began:.0f} s", flush=True)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
