"""The recall task: conversations that state codes of names and ask for them later.

One generator for training, evaluation and `run_eval`. A conversation is a function of split, seed,
style and sizes, on every platform and Python version. The splits use separate random streams, so
that a held-out conversation never equals a training one.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, get_args

from rigs.recall.recall_names import CAPITALISED, NAMES
from rigs.recall.recall_text import (
    ACKNOWLEDGEMENT,
    FACTS,
    FILLERS,
    QUESTIONS,
    SYSTEMS,
    UNKNOWN,
    piece_pattern,
)

Split = Literal["train", "heldout"]
Layout = Literal["block", "spread", "interleaved"]
LAYOUTS: tuple[Layout, ...] = get_args(Layout)
CountTokens = Callable[[str], int]

# Role lines and turn ends of one user turn and its answer in the chat template.
TURN_OVERHEAD_TOKENS = 10
# A conversation states at most this many names, so that unknown ones remain to ask for.
MAX_FACTS = len(NAMES) - 100
_PIECE = re.compile(piece_pattern())
_FACT_LIMIT_PER_TURN = 1_000_000
_FILLER_TURN_SHARE = 0.3  # of the filler rate


@dataclass(frozen=True)
class RecallStyle:
    """Wording and layout of a conversation. Rates are probabilities in [0, 1].

    Attributes:
        facts_per_turn: Most facts in a user turn.
        question_rate: A user turn with facts ends with a question; otherwise the answer is "ok".
        filler_rate: A sentence is filler instead of a fact. Some user turns are only filler.
        noise_rate: A filler sentence has words outside the vocabulary.
        unknown_rate: A question asks for a name without a code.
        capital_rate: A name with a capitalised form is capitalised, decided at each use.
        opening_rate: A sentence begins with a capital letter.
        variety: A sentence is not the plain form of its kind.
        spelled_rate: The name of a fact is a word outside the vocabulary.
        shouts: All user text is in capitals.
        separator: Text between sentences.
        ending: Text after a fact or filler sentence.
        bare_question_rate: A question lacks its question mark.
        system: System message, if any.
    """

    facts_per_turn: int = 1
    question_rate: float = 1.0
    filler_rate: float = 0.0
    noise_rate: float = 0.0
    unknown_rate: float = 0.0
    capital_rate: float = 0.0
    opening_rate: float = 0.0
    variety: float = 0.0
    spelled_rate: float = 0.0
    shouts: bool = False
    separator: str = " "
    ending: str = "."
    bare_question_rate: float = 0.0
    system: str | None = None


@dataclass(frozen=True)
class RecallTurn:
    """One user message, its expected answer, and whether it asks for a code."""

    user: str
    answer: str
    asks: bool


@dataclass(frozen=True)
class RecallConversation:
    """Turns in order; `first_tail_turn` indexes the first turn after the body."""

    turns: tuple[RecallTurn, ...]
    first_tail_turn: int
    system: str | None = None

    def messages_before(self, turn: int) -> list[dict[str, str]]:
        """Return the chat messages up to and including the user message of `turn`.

        Earlier turns have their expected answers.
        """
        messages = [{"role": "system", "content": self.system}] if self.system else []
        for earlier in self.turns[:turn]:
            messages.append({"role": "user", "content": earlier.user})
            messages.append({"role": "assistant", "content": earlier.answer})
        messages.append({"role": "user", "content": self.turns[turn].user})
        return messages


def estimate_tokens(text: str) -> int:
    """Return the number of pieces of `text`: its built-in tokens, except for spelled words."""
    return sum(1 for _ in _PIECE.finditer(text))


def recall_rng(split: Split, seed: int) -> random.Random:
    """Return the random stream of one conversation of a split."""
    return random.Random(f"recall/{split}/{seed}")


def draw_style(rng: random.Random, layout: Layout, *, spelled: bool = False) -> RecallStyle:
    """Draw the style of a conversation of `layout`.

    Args:
        layout: `block` states all facts in the first user message, `spread` some in each of
            several, `interleaved` a few at a time with questions between them.
        spelled: Names outside the vocabulary may occur; for short conversations only.
    """
    style = RecallStyle(
        filler_rate=rng.choice((0.0, 0.0, 0.1, 0.3)),
        noise_rate=rng.choice((0.0, 0.0, 0.5)),
        unknown_rate=0.04,
        capital_rate=rng.choice((0.0, 0.0, 0.5, 1.0)),
        opening_rate=rng.choice((0.0, 0.5, 1.0)),
        variety=rng.choice((0.0, 0.3, 1.0)),
        spelled_rate=rng.choice((0.0, 0.0, 0.2, 0.5)) if spelled else 0.0,
        shouts=spelled and rng.random() < 0.05,
        separator=rng.choice((" ", " ", "\n")),
        ending=rng.choice((".", ".", ".", ",", ";", "!", " and")),
        bare_question_rate=rng.choice((0.0, 0.5)),
        system=rng.choice(SYSTEMS) if rng.random() < 0.2 else None,
    )
    if style.separator == "\n" and rng.random() < 0.5:
        style = replace(style, ending="", separator=rng.choice(("\n", "\n\n", "\n- ")))
    if layout == "block":
        return replace(style, facts_per_turn=_FACT_LIMIT_PER_TURN, question_rate=0.0)
    if layout == "spread":
        return replace(style, facts_per_turn=rng.randint(3, 40), question_rate=rng.random())
    if layout == "interleaved":
        return replace(style, facts_per_turn=rng.randint(1, 3), question_rate=rng.uniform(0.5, 1))
    raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}, not {layout!r}")


def make_conversation(
    rng: random.Random,
    style: RecallStyle,
    body_tokens: int,
    tail_questions: int,
    count_tokens: CountTokens = estimate_tokens,
) -> RecallConversation:
    """Write one conversation: a body of facts up to a size, then turns that only ask.

    Args:
        body_tokens: Tokens of the rendered conversation up to the end of the first tail question.
            The size is at most that, by about one sentence less; there is at least one fact.
        tail_questions: Questions after the body. In layout `block`, the first one is part of the
            message with the facts.
        count_tokens: Tokens of a text without special tokens.
    """
    if body_tokens < 1 or tail_questions < 0:
        raise ValueError("body_tokens must be at least 1 and tail_questions at least 0")
    writer = _Writer(rng, style)
    turns: list[RecallTurn] = []
    used = count_tokens(style.system) + 5 if style.system else 0
    closing = count_tokens(QUESTIONS[0]) + 1
    merge_first = tail_questions > 0 and style.facts_per_turn == _FACT_LIMIT_PER_TURN
    while not writer.told or used + closing + TURN_OVERHEAD_TOKENS < body_tokens:
        turn = writer.body_turn(body_tokens - used - closing, count_tokens, merge_first)
        turns.append(turn)
        used += count_tokens(turn.user) + count_tokens(turn.answer) + TURN_OVERHEAD_TOKENS
        if merge_first:
            break
    first_tail_turn = len(turns) - 1 if merge_first else len(turns)
    while len(turns) < first_tail_turn + tail_questions:
        question, answer = writer.question()
        turns.append(RecallTurn(question, answer, asks=True))
    return RecallConversation(tuple(turns), first_tail_turn, style.system)


def heldout_conversation(
    seed: int,
    context_tokens: int,
    num_questions: int = 1,
    count_tokens: CountTokens = estimate_tokens,
) -> RecallConversation:
    """Return held-out conversation number `seed`. The layouts alternate.

    Args:
        context_tokens: Prompt tokens of the first of the `num_questions` tail questions.
    """
    rng = recall_rng("heldout", seed)
    style = draw_style(rng, LAYOUTS[seed % len(LAYOUTS)])
    return make_conversation(rng, style, context_tokens, num_questions, count_tokens)


class _Writer:
    """The state of a conversation while it is written: stated codes, and names not asked yet."""

    def __init__(self, rng: random.Random, style: RecallStyle) -> None:
        self._rng = rng
        self._style = style
        self.told: dict[str, str] = {}
        self._unasked: list[str] = []

    def body_turn(self, budget: int, count_tokens: CountTokens, ask: bool) -> RecallTurn:
        """Write facts and filler up to `budget` tokens, with a question if `ask` or by chance."""
        rng, style = self._rng, self._style
        if not ask and rng.random() < style.filler_rate * _FILLER_TURN_SHARE:
            return RecallTurn(self._filler() + style.ending, ACKNOWLEDGEMENT, asks=False)
        ask = ask or rng.random() < style.question_rate
        if ask:
            budget -= count_tokens(QUESTIONS[0]) + 1
        sentences: list[str] = []
        used = TURN_OVERHEAD_TOKENS
        wanted = rng.randint(1, style.facts_per_turn) if style.facts_per_turn < 1000 else MAX_FACTS
        told = 0
        while told < wanted:
            is_filler = bool(self.told) and rng.random() < style.filler_rate
            is_filler = is_filler or len(self.told) >= MAX_FACTS
            sentence = self._filler() if is_filler else self._fact()
            sentences.append(sentence + style.ending)
            told += not is_filler
            used += count_tokens(style.separator + sentences[-1])
            if used + 16 > budget:
                break
        if not ask:
            text = style.separator.join(sentences)
            return RecallTurn(text.removesuffix(" and").rstrip(",;"), ACKNOWLEDGEMENT, asks=False)
        question, answer = self.question()
        return RecallTurn(style.separator.join([*sentences, question]), answer, asks=True)

    def question(self) -> tuple[str, str]:
        """Return a question and its answer, preferably for a name that was not asked yet."""
        rng, style = self._rng, self._style
        if rng.random() < style.unknown_rate:
            name, code = self._fresh_name(), UNKNOWN
        else:
            if not self._unasked:
                self._unasked = list(self.told)
            at = rng.randrange(len(self._unasked))
            self._unasked[at], self._unasked[-1] = self._unasked[-1], self._unasked[at]
            name = self._unasked.pop()
            code = self.told[name]
        text = self._pick(QUESTIONS).format(n=self._surface(name))
        if rng.random() < style.bare_question_rate:
            text = text.rstrip("?.")
        return self._opened(text), code

    def _fact(self) -> str:
        name = self._fresh_name()
        code = f"{self._rng.randrange(10_000):04d}"
        self.told[name] = code
        self._unasked.append(name)
        return self._opened(self._pick(FACTS).format(n=self._surface(name), c=code))

    def _filler(self) -> str:
        rng = self._rng
        if rng.random() < self._style.noise_rate:
            return self._opened(" ".join(self._word() for _ in range(rng.randint(1, 6))))
        return self._opened(rng.choice(FILLERS).format(d=rng.randrange(2, 100)))

    def _fresh_name(self) -> str:
        spelled = self._rng.random() < self._style.spelled_rate
        while True:
            name = self._spelled_name() if spelled else self._rng.choice(NAMES)
            if self._style.shouts:
                name = name.upper()
            if name not in self.told:
                return name

    def _spelled_name(self) -> str:
        """Invent a word. If it happens to be a known name, the case is only easier."""
        word = self._rng.choice((self._word(), self._rng.choice(NAMES)))
        return self._rng.choice((word, word.capitalize(), word.upper()))

    def _word(self) -> str:
        rng = self._rng
        pairs = (rng.choice("bcdfghjklmnprstvwz") + rng.choice("aeiouy") for _ in range(4))
        return "".join(pairs)[: rng.randint(3, 8)]

    def _surface(self, name: str) -> str:
        if name in CAPITALISED and self._rng.random() < self._style.capital_rate:
            return CAPITALISED[name]
        return name

    def _pick(self, templates: tuple[str, ...]) -> str:
        if self._rng.random() < self._style.variety:
            return self._rng.choice(templates)
        return templates[0]

    def _opened(self, sentence: str) -> str:
        if self._style.shouts:
            return sentence.upper()
        if self._rng.random() < self._style.opening_rate:
            return sentence[0].upper() + sentence[1:]
        return sentence
