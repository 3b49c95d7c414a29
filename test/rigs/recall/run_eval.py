"""Evaluates a running server: python -m rigs.recall.run_eval --eval-name recall

Sends held-out conversations to `/v1/chat/completions` at temperature 0 and counts the right codes.
A conversation of several `--num-questions` continues with the server's own answers, so the prefix
of every further question is cached. `--order round` asks the first question of all conversations
before any second one. Tiers smaller than the working set then evict every prefix between its uses.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from rigs.recall.chat_client import ChatClient, ChatReply
from rigs.recall.recall_task import RecallConversation, estimate_tokens, heldout_conversation

EVAL_NAMES = ("recall",)
ORDERS = ("conversation", "round")
_MAX_WRONG_SHOWN = 5


@dataclass(frozen=True)
class EvalArgs:
    """The arguments of an evaluation, named as on the command line.

    Attributes:
        base_url: URL of the server; None: `host` and `port`.
        model: Model name; None: the first of `/v1/models`.
        num_examples: Conversations, numbered from `seed`.
        num_threads: Requests in flight.
        context_tokens: Prompt tokens of a conversation's first question.
        num_questions: Questions in each conversation.
        order: `conversation` finishes a conversation before its thread starts the next. `round`
            asks question r of all conversations before any question r + 1.
        max_tokens: Most tokens of an answer.
        tokenizer_path: Tokenizer that counts `context_tokens`; None: an estimate for the built-in
            model.
        cached_tokens_details: Request cached tokens by tier (SGLang servers only).
        timeout: Seconds for one request.
        min_score: Score below which the exit code is 1.
    """

    eval_name: str = "recall"
    base_url: str | None = None
    host: str = "127.0.0.1"
    port: int = 30000
    api_key: str | None = None
    model: str | None = None
    num_examples: int = 64
    num_threads: int = 8
    context_tokens: int = 2000
    num_questions: int = 1
    order: str = "conversation"
    max_tokens: int = 16
    seed: int = 0
    tokenizer_path: str | None = None
    cached_tokens_details: bool = False
    timeout: float = 600.0
    min_score: float = 0.0

    def __post_init__(self) -> None:
        if self.eval_name not in EVAL_NAMES:
            raise ValueError(f"eval_name must be one of {EVAL_NAMES}, not {self.eval_name!r}")
        if self.order not in ORDERS:
            raise ValueError(f"order must be one of {ORDERS}, not {self.order!r}")
        for name in ("num_examples", "num_threads", "context_tokens", "num_questions"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")

    @classmethod
    def of(cls, args: Any) -> EvalArgs:
        """Use the known attributes of `args`, any object, that are not None."""
        if isinstance(args, cls):
            return args
        given = {f.name: getattr(args, f.name, None) for f in fields(cls)}
        return cls(**{name: value for name, value in given.items() if value is not None})


@dataclass
class _Dialogue:
    """One conversation with the server. At most one thread uses it at a time."""

    seed: int
    conversation: RecallConversation
    messages: list[dict[str, str]] = field(init=False)
    replies: list[ChatReply] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.messages = self.conversation.messages_before(self.conversation.first_tail_turn)

    def ask_next(self, client: ChatClient) -> None:
        """Send the next question and keep the answer in the conversation."""
        if self.replies:
            turn = self.conversation.first_tail_turn + len(self.replies)
            self.messages.append({"role": "assistant", "content": self.replies[-1].text})
            self.messages.append({"role": "user", "content": self.conversation.turns[turn].user})
        self.replies.append(client.chat(self.messages))

    def wrong(self) -> list[str]:
        """Return a line for each answer that differs from the expected one."""
        turns = self.conversation.turns[self.conversation.first_tail_turn :]
        pairs = zip(self.replies, turns, strict=True)
        return [
            f"seed {self.seed}, question {number}: {reply.text!r} instead of {turn.answer!r}"
            for number, (reply, turn) in enumerate(pairs)
            if reply.text.strip() != turn.answer
        ]


def run_eval(args: Any) -> dict[str, Any]:
    """Run the evaluation of `args`, an `EvalArgs` or any object with some of its fields.

    Returns:
        `score` (share of right answers), `num_questions` and `latency` (seconds); the token totals
        `prompt_tokens`, `completion_tokens`, `cached_tokens` (None if the server reports none)
        and `cached_tokens_details`; `wrong` (the first wrong answers) and `args`.

    Raises:
        ValueError: An argument is out of range.
        OSError: The server cannot be reached.
        RuntimeError: The server refused a request.
    """
    config = EvalArgs.of(args)
    client = ChatClient(
        config.base_url or f"http://{config.host}:{config.port}",
        model=config.model,
        api_key=config.api_key,
        timeout=config.timeout,
        max_tokens=config.max_tokens,
        cached_tokens_details=config.cached_tokens_details,
    )
    count = _token_counter(config.tokenizer_path)
    began = time.monotonic()
    dialogues = [
        _Dialogue(seed, _conversation(seed, config, count))
        for seed in range(config.seed, config.seed + config.num_examples)
    ]
    with ThreadPoolExecutor(config.num_threads) as pool:
        if config.order == "round":
            for _ in range(config.num_questions):
                list(pool.map(lambda dialogue: dialogue.ask_next(client), dialogues))
        else:
            list(pool.map(lambda dialogue: _ask_all(dialogue, client, config), dialogues))
    return _summary(config, dialogues, time.monotonic() - began)


def _conversation(seed: int, config: EvalArgs, count: Callable[[str], int]) -> RecallConversation:
    return heldout_conversation(seed, config.context_tokens, config.num_questions, count)


def _ask_all(dialogue: _Dialogue, client: ChatClient, config: EvalArgs) -> None:
    for _ in range(config.num_questions):
        dialogue.ask_next(client)


def _token_counter(tokenizer_path: str | None) -> Callable[[str], int]:
    if tokenizer_path is None:
        return estimate_tokens
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_path)
    return lambda text: len(tokenizer(text, add_special_tokens=False).input_ids)


def _summary(config: EvalArgs, dialogues: list[_Dialogue], seconds: float) -> dict[str, Any]:
    replies = [reply for dialogue in dialogues for reply in dialogue.replies]
    wrong = [line for dialogue in dialogues for line in dialogue.wrong()]
    reported = [reply.cached_tokens for reply in replies if reply.cached_tokens is not None]
    details: dict[str, int] = {}
    for reply in replies:
        for tier, tokens in reply.cached_tokens_details.items():
            details[tier] = details.get(tier, 0) + tokens
    return {
        "score": 1 - len(wrong) / len(replies),
        "num_questions": len(replies),
        "latency": seconds,
        "prompt_tokens": sum(reply.prompt_tokens for reply in replies),
        "completion_tokens": sum(reply.completion_tokens for reply in replies),
        "cached_tokens": sum(reported) if reported else None,
        "cached_tokens_details": details,
        "wrong": wrong[:_MAX_WRONG_SHOWN],
        "args": asdict(config) | {"api_key": None},
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m rigs.recall.run_eval", description=__doc__)
    default = EvalArgs()
    parser.add_argument("--eval-name", choices=EVAL_NAMES, default=default.eval_name)
    parser.add_argument("--order", choices=ORDERS, default=default.order)
    for name in ("base-url", "host", "api-key", "model", "tokenizer-path"):
        parser.add_argument(f"--{name}", default=getattr(default, name.replace("-", "_")))
    for name in ("port", "num-examples", "num-threads", "context-tokens", "num-questions"):
        value = getattr(default, name.replace("-", "_"))
        parser.add_argument(f"--{name}", type=int, default=value)
    for name in ("max-tokens", "seed"):
        value = getattr(default, name.replace("-", "_"))
        parser.add_argument(f"--{name}", type=int, default=value)
    for name in ("timeout", "min-score"):
        value = getattr(default, name.replace("-", "_"))
        parser.add_argument(f"--{name}", type=float, default=value)
    parser.add_argument("--cached-tokens-details", action="store_true")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run from the command line; prints the result as JSON and returns the exit code."""
    try:
        config = EvalArgs.of(_parser().parse_args(argv))
        result = run_eval(config)
    except (ValueError, OSError, RuntimeError) as error:
        print(f"run_eval: {error}", file=sys.stderr)
        return 2
    print(json.dumps(result, indent=1))
    right = round(result["score"] * result["num_questions"])
    print(f"score {result['score']:.4f} ({right} of {result['num_questions']} right)")
    if result["cached_tokens"] is not None:
        print(f"cached tokens {result['cached_tokens']} of {result['prompt_tokens']}")
    return 0 if result["score"] >= config.min_score else 1


if __name__ == "__main__":
    raise SystemExit(main())
