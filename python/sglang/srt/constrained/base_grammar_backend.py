"""What a grammar library has to provide: compiled grammars, one matcher a request, masks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from sglang.srt.constrained.constraint import Constraint, ConstraintKind
from sglang.srt.constrained.ticket import GrammarTicket


class GrammarMatcher(ABC):
    """How far one request has got in its grammar. For one thread, the scheduler's.

    A request that is retracted keeps its matcher: the matcher's state is that of the output
    tokens, and those are kept too.
    """

    @property
    @abstractmethod
    def failure(self) -> str | None:
        """Why this request must be ended: its grammar costs too much time a token.

        One line for the client; None while all is well. Depends on a clock: with several ranks,
        one of them decides.
        """

    @abstractmethod
    def accept_token(self, token_id: int) -> bool:
        """Advance by one sampled token.

        Returns:
            False, with nothing changed, where the grammar does not allow the token, and after
            the end.
        """

    @abstractmethod
    def fill_next_token_bitmask(self, bitmask: torch.Tensor, row: int) -> None:
        """Write the tokens allowed next into `bitmask[row]`; see `allocate_bitmask`.

        Where the grammar is complete, the end tokens are among them, or alone; not for a matcher
        that is terminated.
        """

    @abstractmethod
    def is_terminated(self) -> bool:
        """Whether an end token was accepted; nothing can follow."""

    @abstractmethod
    def copy(self) -> GrammarMatcher:
        """An independent matcher in the same state, for another of a request's `n` answers."""


class Grammar(ABC):
    """A compiled constraint. Immutable and shared; any thread may ask for matchers."""

    @property
    @abstractmethod
    def size_bytes(self) -> int:
        """Host memory it holds, bytes."""

    @abstractmethod
    def matcher(self, stop_token_ids: Sequence[int] = ()) -> GrammarMatcher:
        """A matcher at the start.

        Args:
            stop_token_ids: The request's own, added to the model's end-of-sequence ids. Only
                special tokens among them can end the grammar; a stop token that is also text
                stays text here, and the request stops wherever it appears, as without grammar.
        """


class GrammarBackend(ABC):
    """Compiles constraints away from the caller's thread and keeps the results."""

    @abstractmethod
    def get(self, kind: ConstraintKind | str, text: str) -> GrammarTicket:
        """The ticket of a constraint, compiled, compiling or failed. Never blocks.

        Raises:
            ValueError: `kind` is not known.
        """

    @abstractmethod
    def compile_now(self, constraint: Constraint) -> Grammar:
        """Compile in the calling thread, without a trial: for what another rank has tried.

        Raises:
            GrammarError: It is no grammar of its kind.
        """

    @abstractmethod
    def warm_up(self) -> None:
        """Start what the first compilation would otherwise wait for. Never blocks."""

    @abstractmethod
    def close(self) -> None:
        """End threads and processes; what is compiling fails. Idempotent."""
