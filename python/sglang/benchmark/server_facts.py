"""Properties of a server that a load test needs before it starts: model name and tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import aiohttp
import numpy as np

from sglang.benchmark.workload import Vocabulary
from sglang.srt.utils.hf_tokenizer import get_tokenizer, special_token_ids


@dataclass(frozen=True, slots=True)
class Tokens:
    """A tokenizer, and the tokens that prompts are made of."""

    vocabulary: Vocabulary
    tokenizer: Any

    def printable(self) -> Vocabulary:
        """The tokens that are printable text on their own.

        Parts of characters would become other, and more, tokens when a prompt is sent as text.
        """
        kept = [index for index in self.vocabulary.tolist() if _is_text(self.decode([index]))]
        return np.asarray(kept, dtype=np.uint32)

    def as_text(self, ids: list[int]) -> str:
        """The text of `ids`, cut so that tokenizing it again gives about as many tokens.

        The tokenizer seldom splits the text of random tokens into the same tokens. Equal prefixes
        stay equal.
        """
        again = self.tokenizer.encode(self.decode(ids), add_special_tokens=False)
        return self.decode(again[: len(ids)])

    def decode(self, ids: list[int]) -> str:
        """The text of `ids`."""
        text: str = self.tokenizer.decode(ids)
        return text


def _is_text(piece: str) -> bool:
    return bool(piece) and "\ufffd" not in piece and piece.isprintable()


def load_tokens(path: str) -> Tokens:
    """The tokens of the tokenizer at `path`, without special tokens.

    Raises:
        ValueError: There is no tokenizer.
    """
    tokenizer = get_tokenizer(path)
    kept_out = special_token_ids(tokenizer)
    ids = [index for index in range(len(tokenizer)) if index not in kept_out]
    return Tokens(np.asarray(ids, dtype=np.uint32), tokenizer)


async def fetch_model_info(session: aiohttp.ClientSession, base_url: str) -> dict[str, Any]:
    """`GET /model_info`, or the older `/get_model_info`, which is all that `sglang_router` has.

    Raises:
        ValueError: The server does not answer.
    """
    timeout = aiohttp.ClientTimeout(total=30)
    try:
        async with session.get(f"{base_url}/model_info", timeout=timeout) as response:
            if response.status != 404:
                return await _facts_in(response)
        async with session.get(f"{base_url}/get_model_info", timeout=timeout) as response:
            return await _facts_in(response)
    except (TimeoutError, aiohttp.ClientError, ValueError) as error:
        raise ValueError(
            f"no usable server at {base_url} ({type(error).__name__}: {error}); start one, or give "
            "--base-url, --host and --port, and --model and --tokenizer if it has no /model_info"
        ) from error


async def _facts_in(response: aiohttp.ClientResponse) -> dict[str, Any]:
    response.raise_for_status()
    facts: dict[str, Any] = await response.json(content_type=None)
    return facts


async def flush_cache(session: aiohttp.ClientSession, base_url: str, admin_key: str | None) -> None:
    """Empty L1 and L2 of the server as soon as it is idle.

    Raises:
        ValueError: The server refused.
    """
    headers = {"Authorization": f"Bearer {admin_key}"} if admin_key else {}
    async with session.post(f"{base_url}/flush_cache?timeout=30", headers=headers) as response:
        if response.status != 200:
            said = (await response.text())[:200]
            raise ValueError(f"--flush-cache: the server answered {response.status}: {said}")
