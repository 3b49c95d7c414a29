"""Text to token ids without holding up the event loop.

The thread `tokenize` encodes long texts. The caller's thread encodes short ones, because handing
them over would take longer. If a tokenizer adds nothing to its Rust core, only the core is used: it
takes a third less time for a short text. Any other tokenizer is copied for the thread, because two
threads must not use one at once.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

from sglang.srt.managers.tokenizer.generate_request import GenerateRequest
from sglang.srt.mem_cache.tree.radix_key import TokenArray, token_array
from sglang.srt.utils.portable_tokenizer import core_tokenizer
from sglang.srt.utils.threads import started_pool

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SHORT_CHARS: Final = 4096
"""Characters of the longest text that counts as short: it takes well under a millisecond to
encode."""


Encode: TypeAlias = Callable[[str, bool], list[int]]
"""Encodes a text; the second argument is whether special tokens may be added."""


@dataclass(slots=True)
class _Encoding:
    """A text in the thread's queue, or on the thread."""

    ids: asyncio.Future[list[int]]
    num_readers: int = 0


class PromptEncoder:
    """Encodes prompts. `encode` may be awaited concurrently, from one event loop."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        core = _core_encode(tokenizer)
        self._near = core or _library_encode(tokenizer)
        self._far = core or _library_encode(copy.deepcopy(tokenizer))
        self._in_flight: dict[tuple[str, bool], _Encoding] = {}
        self._pool = started_pool(1, "tokenize")

    def encode_now(self, requests: Sequence[GenerateRequest]) -> list[TokenArray | None]:
        """The prompts of `requests`. A text that is too long for this thread to encode gets None.

        Samples share the array of their request, which comes before them.
        """
        prompts: list[TokenArray | None] = []
        first: GenerateRequest | None = None
        for request in requests:
            if first is not None and request.sample_of == first.rid:
                prompts.append(prompts[-1])
                continue
            first, text = request, request.text or ""
            if request.input_ids is not None:
                prompts.append(request.input_ids)
            elif len(text) <= SHORT_CHARS:
                prompts.append(token_array(self._near(text, request.add_special_tokens)))
            else:
                prompts.append(None)
        return prompts

    async def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of `text`, of any length. The caller must not change the list: other callers
        may share it.

        A waiting text leaves the thread's queue when all its callers are cancelled.
        """
        if len(text) <= SHORT_CHARS:
            return self._near(text, add_special_tokens)
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
        """Let the thread end after the text that it encodes."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def _core_encode(tokenizer: PreTrainedTokenizerBase) -> Encode | None:
    """A function that encodes with only the Rust core; None: the tokenizer adds to its core. The
    core does not change, so any thread may use it."""
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
