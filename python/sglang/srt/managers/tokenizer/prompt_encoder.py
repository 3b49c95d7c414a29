"""Text to token ids without holding up the event loop.

Thread `tokenize` encodes long texts; short ones are encoded where they are, since handing them over
would take longer than encoding them. Where a tokenizer adds nothing to its core, the core is asked
directly: a third less time for a short text. Any other gets a copy for the thread, since the
library's tokenizers must not be used from two threads at once.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

from sglang.srt.utils.portable_tokenizer import core_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SHORT_CHARS: Final = 4096
"""Texts up to this many characters take well under a millisecond to encode."""


Encode: TypeAlias = Callable[[str, bool], list[int]]
"""Takes the text and whether special tokens may be added."""


@dataclass(slots=True)
class _Encoding:
    """A text that waits for the thread, or is on it."""

    ids: asyncio.Future[list[int]]
    num_readers: int = 0


class PromptEncoder:
    """Encodes prompts. `encode` may be awaited concurrently, from one event loop."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        core = _core_encode(tokenizer)
        self._near = core or _library_encode(tokenizer)
        self._far = core or _library_encode(copy.deepcopy(tokenizer))
        self._in_flight: dict[tuple[str, bool], _Encoding] = {}
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenize")

    def encode_short(self, text: str, *, add_special_tokens: bool) -> list[int] | None:
        """Token ids of `text`; None where it is too long to be encoded on this thread."""
        return self._near(text, add_special_tokens) if len(text) <= SHORT_CHARS else None

    async def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of `text`, of any length. Not to be changed: others may get the same list.

        A text that nobody waits for any more is not encoded, unless that has begun.
        """
        ids = self.encode_short(text, add_special_tokens=add_special_tokens)
        if ids is not None:
            return ids
        # The samples of one prompt ask at the same time.
        key = (text, add_special_tokens)
        encoding = self._in_flight.get(key)
        if encoding is None:
            loop = asyncio.get_running_loop()
            encoding = _Encoding(
                loop.run_in_executor(self._pool, self._far, text, add_special_tokens)
            )
            self._in_flight[key] = encoding
        encoding.num_readers += 1
        try:
            return await asyncio.shield(encoding.ids)
        finally:
            encoding.num_readers -= 1
            if encoding.num_readers == 0:
                del self._in_flight[key]
                encoding.ids.cancel()

    def close(self) -> None:
        """Let the thread end after what it is doing."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def _core_encode(tokenizer: PreTrainedTokenizerBase) -> Encode | None:
    """By a core that nobody changes, and that any number of threads may ask therefore."""
    core = core_tokenizer(tokenizer, ("encode", "_encode_plus"))
    if core is None:
        return None
    core.no_truncation()
    core.no_padding()
    core.encode_special_tokens = bool(getattr(tokenizer, "split_special_tokens", False))

    def encode(text: str, add_special_tokens: bool) -> list[int]:
        (encoding,) = core.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    return encode


def _library_encode(tokenizer: PreTrainedTokenizerBase) -> Encode:
    def encode(text: str, add_special_tokens: bool) -> list[int]:
        # `verbose` would warn about the model's length, which is checked with a better message.
        ids = tokenizer.encode(text, add_special_tokens=add_special_tokens, verbose=False)
        return [int(i) for i in ids]

    return encode
