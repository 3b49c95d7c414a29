"""A grammar backend without processes, over a vocabulary of single characters, for schedulers."""

from __future__ import annotations

import string
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from sglang.srt.constrained.constraint import Constraint, GrammarError
from sglang.srt.constrained.grammar import (
    Grammar,
    GrammarLimits,
    GrammarTicket,
    Vocabulary,
    compile_constraint,
    make_compiler,
)
from sglang.srt.constrained.xgrammar_backend import XGrammarBackend

VOCAB_SIZE: Final = 160
"""Vocabulary of the tiny model of `SchedulerRig`."""
EOS_ID: Final = 0
_CHARACTERS: Final = string.digits + string.ascii_letters + string.punctuation + " "


def character_vocabulary(vocab_size: int = VOCAB_SIZE) -> Vocabulary:
    """Token i is the i-th character, from 1; token 0 ends; the other tokens are never allowed."""
    tokens = [b""] + [character.encode() for character in _CHARACTERS]
    tokens += [b""] * (vocab_size - len(tokens))
    return Vocabulary(tokens=tokens, eos_token_ids=[EOS_ID], add_prefix_space=False)


def text_of(ids: Sequence[int]) -> str:
    """The characters of `ids`; the end token has none."""
    return "".join(_CHARACTERS[i - 1] for i in ids if i != EOS_ID)


def ids_of(text: str) -> list[int]:
    """The tokens of `text`, one for each character."""
    return [_CHARACTERS.index(character) + 1 for character in text]


@dataclass
class HandBackend(XGrammarBackend):
    """Compiles in the calling thread, at once or on `release`."""

    hold: bool = False
    """True if new tickets wait for `release`, instead of compiling at once."""
    limits: GrammarLimits = field(default_factory=GrammarLimits)
    vocab_size: int = VOCAB_SIZE
    """Columns of the model's logits."""
    held: list[GrammarTicket] = field(default_factory=list)
    num_asked: int = 0
    is_closed: bool = False

    def __post_init__(self) -> None:
        self._vocabulary = character_vocabulary(self.vocab_size)
        self._compiler = make_compiler(self._vocabulary)

    def get(self, constraint: Constraint) -> GrammarTicket:
        self.num_asked += 1
        ticket = GrammarTicket(constraint)
        self.held.append(ticket)
        if not self.hold:
            self.release()
        return ticket

    def release(self) -> None:
        """Compile the held tickets."""
        for ticket in self.held:
            try:
                compiled = compile_constraint(
                    self._compiler, ticket.constraint, any_whitespace=True
                )
            except GrammarError as error:
                ticket.fail(str(error))
                continue
            kind = ticket.constraint.kind
            ticket.set_result(Grammar(compiled, kind, self._vocabulary, self.limits))
        self.held = []

    def compile_now(self, constraint: Constraint) -> Grammar:
        compiled = compile_constraint(self._compiler, constraint, any_whitespace=True)
        return Grammar(compiled, constraint.kind, self._vocabulary, self.limits)

    def close(self) -> None:
        self.is_closed = True
