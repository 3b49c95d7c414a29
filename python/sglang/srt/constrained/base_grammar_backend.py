"""The interface of a grammar library: compiled grammars, a matcher for each request, masks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future

import torch

from sglang.srt.constrained.constraint import Constraint, ConstraintKind, GrammarError


class GrammarMatcher(ABC):
    """The position of one request in its grammar. Scheduler thread only.

    A retracted request keeps its matcher, because it keeps the output tokens that the matcher has
    accepted.
    """

    @property
    @abstractmethod
    def failure(self) -> str | None:
        """Why the engine must end this request: its grammar takes too much time for each token.

        One line for the client; None if the grammar is fast enough. It depends on a clock, so one
        rank decides for all.
        """

    @abstractmethod
    def accept_token(self, token_id: int) -> bool:
        """Advance by one sampled token.

        Returns:
            False if the grammar does not allow the token or has ended; nothing changes then.
        """

    @abstractmethod
    def fill_next_token_bitmask(self, bitmask: torch.Tensor, row: int) -> None:
        """Write the tokens allowed next into `bitmask[row]`; see `allocate_bitmask`.

        If the grammar is complete, the end tokens are allowed too, or only they. The matcher must
        not be terminated.
        """

    @abstractmethod
    def is_terminated(self) -> bool:
        """Whether the matcher has accepted an end token; no token can follow."""


class Grammar(ABC):
    """A compiled constraint. Immutable and shared; any thread may create matchers."""

    @property
    @abstractmethod
    def size_bytes(self) -> int:
        """Host memory of the grammar, in bytes."""

    @abstractmethod
    def matcher(self, stop_token_ids: Sequence[int] = ()) -> GrammarMatcher:
        """A matcher at the start of the grammar.

        Args:
            stop_token_ids: The request's stop tokens, in addition to the model's end-of-sequence
                ids. Only special tokens among them can end the grammar. A stop token that is also
                text remains text here; the request stops at it, as it does without a grammar.
        """


class GrammarTicket(Future[Grammar]):
    """The grammar of one constraint, which may still be compiling. Raises `GrammarError`.

    All requests with the constraint share it. Any thread may read it. With several ranks, one rank
    reads it and tells the others, because compilations end at different times on different ranks.
    """

    def __init__(self, constraint: Constraint) -> None:
        super().__init__()
        self.constraint = constraint

    def fail(self, message: str) -> None:
        """Set the reason of a failure: one line for the client. For the backend."""
        self.set_exception(GrammarError(message))


class GrammarBackend(ABC):
    """Compiles constraints in threads of its own and caches the results."""

    @abstractmethod
    def get(self, kind: ConstraintKind | str, text: str) -> GrammarTicket:
        """The ticket of a constraint: compiled, compiling or failed. Never blocks.

        Raises:
            ValueError: `kind` is unknown.
        """

    @abstractmethod
    def compile_now(self, constraint: Constraint) -> Grammar:
        """Compile in the calling thread, without a trial, because another rank has tried the
        constraint.

        Raises:
            GrammarError: The text is not a grammar of its kind.
        """

    @abstractmethod
    def close(self) -> None:
        """End threads and processes; compilations under way fail. Idempotent."""
