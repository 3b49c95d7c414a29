"""Text to token ids without holding up the event loop.

Thread `tokenize` encodes long texts with a tokenizer of its own: the library's tokenizers must
not be used from two threads at once. Short texts are encoded where they are, since handing them
over would take longer than encoding them.
"""

from __future__ import annotations

import asyncio
import copy
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SHORT_CHARS: Final = 4096
"""Texts up to this many characters take well under a millisecond to encode."""


class PromptEncoder:
    """Encodes prompts. `encode` may be awaited concurrently, from one event loop."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._near = tokenizer
        self._far = copy.deepcopy(tokenizer)
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenize")

    async def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of `text`, of any length."""
        if len(text) <= SHORT_CHARS:
            return _encode(self._near, text, add_special_tokens)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, _encode, self._far, text, add_special_tokens)

    def close(self) -> None:
        """Let the thread end after what it is doing."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def _encode(tokenizer: PreTrainedTokenizerBase, text: str, add_special_tokens: bool) -> list[int]:
    # `verbose` would warn about the model's length, which is checked with a better message.
    ids = tokenizer.encode(text, add_special_tokens=add_special_tokens, verbose=False)
    return [int(i) for i in ids]
