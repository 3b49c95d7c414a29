"""A tokenizer whose tokens are single letters, for stop strings and patterns."""

from __future__ import annotations

from typing import ClassVar


class Letters:
    """Token n is the letter n % 26.

    Attributes:
        num_decoded: Tokens decoded so far.
    """

    all_special_ids: ClassVar[list[int]] = []

    def __init__(self) -> None:
        self.num_decoded = 0

    def decode(
        self,
        token_ids: list[int],
        *,
        skip_special_tokens: bool = True,
        clean_up_tokenization_spaces: bool = False,
    ) -> str:
        self.num_decoded += len(token_ids)
        return "".join(chr(ord("a") + token % 26) for token in token_ids)

    def convert_ids_to_tokens(self, ids: int) -> str:
        return self.decode([ids])
