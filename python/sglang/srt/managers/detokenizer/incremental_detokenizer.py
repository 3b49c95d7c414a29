"""Text from token ids that arrive a few at a time, never ending in half a character.

`TextDecoder`s are the state of one request; `make_decoder_factory` picks the kind that fits a
tokenizer. Used by one thread at a time.
"""

from __future__ import annotations

import codecs
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

from sglang.srt.utils.hf_tokenizer import is_byte_level, special_token_ids, token_bytes
from sglang.srt.utils.portable_tokenizer import DecodingTokenizer

REPLACEMENT: Final = "\N{REPLACEMENT CHARACTER}"

_WINDOW_TOKENS: Final = 64
_CHARACTER_TOKENS: Final = 4
"""Most tokens of one character: UTF-8 takes up to four bytes."""


class TextDecoder(ABC):
    """Decodes one request's output. The texts of all calls, joined, are the whole text."""

    @abstractmethod
    def feed(self, token_ids: Sequence[int]) -> str:
        """Text that became certain with `token_ids`; bytes of an unfinished character wait."""

    @abstractmethod
    def finish(self) -> str:
        """The text still held back, with U+FFFD for unfinished characters. Call it once, last."""


DecoderFactory: TypeAlias = Callable[[bool], TextDecoder]
"""Makes the decoder of one request; its argument is `skip_special_tokens`."""


def make_decoder_factory(tokenizer: DecodingTokenizer) -> DecoderFactory:
    """A factory of the decoders that are exact for `tokenizer`."""
    special = special_token_ids(tokenizer)
    if is_byte_level(tokenizer):
        vocabulary = ByteVocabulary(tokenizer)
        return lambda skip: ByteLevelDecoder(vocabulary, special if skip else frozenset())
    return lambda skip: WindowDecoder(tokenizer, special if skip else frozenset())


class ByteVocabulary:
    """Token id to bytes, filled as tokens appear; at most one entry for each token."""

    def __init__(self, tokenizer: DecodingTokenizer) -> None:
        self._tokenizer = tokenizer
        self._bytes: dict[int, bytes] = {}

    def __getitem__(self, token_id: int) -> bytes:
        found = self._bytes.get(token_id)
        if found is None:
            # The padding of the vocabulary has ids without a token.
            token = self._tokenizer.convert_ids_to_tokens(token_id)
            found = token_bytes(token) if isinstance(token, str) else b""
            self._bytes[token_id] = found
        return found


class ByteLevelDecoder(TextDecoder):
    """Decoder for byte-level BPE: constant work per token, a state of at most three bytes."""

    def __init__(self, vocabulary: ByteVocabulary, skipped: frozenset[int]) -> None:
        self._vocabulary = vocabulary
        self._skipped = skipped
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token_ids: Sequence[int]) -> str:
        vocabulary, skipped = self._vocabulary, self._skipped
        return self._decoder.decode(b"".join(vocabulary[i] for i in token_ids if i not in skipped))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class WindowDecoder(TextDecoder):
    """Decoder for all other tokenizers: decodes a sliding window of the last tokens.

    The text of a token may depend on its neighbours (spaces, byte fallback), so new text is the
    difference between the window decoded with and without the new tokens. All U+FFFD at the end are
    held back: byte fallback gives one for each byte of an incomplete run.
    """

    def __init__(self, tokenizer: DecodingTokenizer, skipped: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._window: list[int] = []
        self._context = 0
        """Leading tokens of the window that are only context: their text was sent before."""
        self._sent = 0
        """Characters of the decoded window that were sent."""

    def feed(self, token_ids: Sequence[int]) -> str:
        shown = [i for i in token_ids if i not in self._skipped]
        if not shown:
            return ""
        self._window += shown
        text = self._decode(self._window)
        certain = len(text.rstrip(REPLACEMENT))
        whole = certain == len(text)
        if len(self._window) > _WINDOW_TOKENS:
            # Invalid UTF-8: only the last few bytes can still become a character.
            certain = max(certain, len(text) - _CHARACTER_TOKENS)
        fresh = text[self._sent : certain]
        self._sent = max(self._sent, certain)
        self._slide(whole)
        return fresh

    def finish(self) -> str:
        return self._decode(self._window)[self._sent :]

    def _slide(self, whole: bool) -> None:
        """Drop old tokens; keep the tokens on which the text of the next ones may depend."""
        if whole:
            self._drop(self._context)
            self._context = len(self._window)
        elif len(self._window) > _WINDOW_TOKENS:
            self._drop(len(self._window) - 2 * _CHARACTER_TOKENS)
            self._context = 0

    def _drop(self, count: int) -> None:
        unsent = len(self._decode(self._window)) - self._sent
        del self._window[:count]
        self._sent = max(len(self._decode(self._window)) - unsent, 0)

    def _decode(self, token_ids: list[int]) -> str:
        text = self._tokenizer.decode(
            token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        assert isinstance(text, str)
        return text
