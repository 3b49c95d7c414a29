"""Reads marked-up text that is still growing."""

from __future__ import annotations


class NeedMoreText(Exception):
    """The text ends too early to be classified."""


class BrokenCall(Exception):
    """The text cannot be a call."""


class TextCursor:
    """A place in a text.

    Attributes:
        position: Characters read.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        self.position = 0

    def skip_blanks(self) -> None:
        """Read on to the next character that is no blank."""
        rest = self._text[self.position :]
        self.position = len(self._text) - len(rest.lstrip())

    def accept(self, *literals: str) -> str | None:
        """Read the one of `literals` that comes next, and return it; None: none of them comes next.

        Raises:
            NeedMoreText: The text ends within one of them.
        """
        for literal in literals:
            if self._text.startswith(literal, self.position):
                self.position += len(literal)
                return literal
        longest = max(map(len, literals))
        if len(self._text) - self.position < longest:
            rest = self._text[self.position :]
            if any(literal.startswith(rest) for literal in literals):
                raise NeedMoreText
        return None

    def expect(self, *literals: str) -> str:
        """Like `accept`, but one of `literals` must come next.

        Raises:
            NeedMoreText: The text ends within one of them.
            BrokenCall: None of them comes next.
        """
        found = self.accept(*literals)
        if found is None:
            raise BrokenCall
        return found

    def until(self, literal: str, *, forbidden: str = "", searched: int = 0) -> str:
        """Read up to `literal` and past it.

        Args:
            forbidden: Characters that may not come before it.
            searched: Position in the text before which `literal` does not begin.

        Raises:
            NeedMoreText: The text ends before `literal`.
            BrokenCall: A forbidden character comes first.
        """
        end = self._text.find(literal, max(self.position, searched))
        read = self._text[self.position : len(self._text) if end < 0 else end]
        if any(char in read for char in forbidden):
            raise BrokenCall
        if end < 0:
            raise NeedMoreText
        self.position = end + len(literal)
        return read
