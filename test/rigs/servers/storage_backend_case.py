"""A server of several ranks with an L3: the same words cold and from every tier, as a test case.

A subclass names a checkpoint (`_get_model_name`), and flags and environment
(`_get_additional_server_args_and_env`). Its words are compared with those of a server of one rank
without a cache.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import Any, ClassVar, Final

from rigs.models.tiny_models import save_tiny_checkpoint
from rigs.schedulers.scheduler_rig import prompt
from rigs.servers.engine_server import Answer, EngineServer
from rigs.servers.forked_servers import ForkedServer
from sglang.srt.constants import BUILTIN_MODEL_DIR
from sglang.test.test_utils import CustomTestCase

PAGE: Final = 16
CHUNK: Final = 128
"""Tokens of a chunk. `PROMPT` is computed in two chunks, the second of which ends within a page."""
PROMPT: Final = tuple(prompt(1, 200))
WHOLE_PAGES: Final = len(PROMPT) // PAGE * PAGE
MIXED: Final = tuple(tuple(prompt(seed, length)) for seed, length in ((2, 9), (3, 333), (4, 70)))
"""Prompts of one batch: one too short to be split, one of three chunks, one of one chunk."""
_L1_TOKENS: Final = 640
_WORDS: Final = 12

Words = tuple[int, ...]
Cached = tuple[int, int, int]
"""Tokens from the device, the host and the store."""


@cache
def words_of_one_rank(model: str, prompts: Sequence[tuple[int, ...]]) -> list[Words]:
    """Greedy words of a server of one rank without a cache."""
    with ForkedServer("--disable-radix-cache", *_flags({}), model=model) as server:
        return [ask(server, ids)[0] for ids in prompts]


def ask(server: EngineServer, ids: Sequence[int]) -> tuple[Words, Cached]:
    """The words of a prompt, and the tiers that its prefix came from."""
    answer = server.generate(ids, max_new_tokens=_WORDS, sampling={"ignore_eos": True})
    return tuple(answer.output_ids), _cached(answer)


def save_checkpoint(directory: Path, family: str, **overrides: Any) -> str:
    """A tiny model of eight heads that has the vocabulary of the built-in model's tokenizer.

    Returns:
        `directory`, as `--model-path` takes it.
    """
    save_tiny_checkpoint(
        directory, family, vocab_size=2176, eos_token_id=2, num_attention_heads=8, **overrides
    )
    return str(directory)


def _cached(answer: Answer) -> Cached:
    found = answer.cached
    return found["device"], found["host"], found.get("storage", 0)


def _flags(settings: Mapping[str, object]) -> list[str]:
    """Flags from `settings`, by name; None: a switch."""
    settings = {
        "--tokenizer-path": BUILTIN_MODEL_DIR,
        "--device": "cpu",
        "--page-size": PAGE,
        "--chunked-prefill-size": CHUNK,
        "--max-total-tokens": _L1_TOKENS,
        **settings,
    }
    flags: list[str] = []
    for name, value in settings.items():
        flags += [name] if value is None else [name, str(value)]
    return flags


class StorageBackendCase(CustomTestCase):
    """One server for all tests of a subclass, which are run in the order of their names."""

    __test__: ClassVar[bool] = False
    """True if pytest collects the class. Subclasses with all hooks set it."""
    backend_name: ClassVar[str]
    """Name of the store in answers."""
    server: ClassVar[EngineServer]

    @classmethod
    def _get_model_name(cls) -> str:
        """The directory of a checkpoint."""
        raise NotImplementedError

    @classmethod
    def _get_additional_server_args_and_env(cls) -> tuple[dict[str, object], dict[str, str]]:
        """Flags by name (None: a switch), and environment, of the server beside `_flags`."""
        raise NotImplementedError

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        model = cls._get_model_name()
        cls.cold, *cls.mixed = words_of_one_rank(model, (PROMPT, *MIXED))
        more, env = cls._get_additional_server_args_and_env()
        settings = {
            "--enable-hierarchical-cache": None,
            "--enable-cache-report": None,
            "--hicache-ratio": 4,
            "--hicache-storage-prefetch-policy": "wait_complete",
            "--hicache-storage-backend-extra-config": json.dumps({"prefetch_threshold": PAGE}),
            **more,
        }
        cls.server = ForkedServer(*_flags(settings), env=env, model=model)
        cls.addClassCleanup(cls.server.kill)
        cls.server.start()

    cold: ClassVar[Words]
    mixed: ClassVar[list[Words]]

    def setUp(self) -> None:
        self.server.flush()
        clear = self.server.request("POST", "/hicache/storage-backend/clear", admin=True)
        assert clear.status == 200, clear.body

    def _expect(self, cached: Cached) -> None:
        assert ask(self.server, PROMPT) == (self.cold, cached)

    def test_cold_then_from_l1_and_l2(self) -> None:
        self._expect((0, 0, 0))
        self._expect((WHOLE_PAGES, 0, 0))
        for seed in range(10, 13):
            ask(self.server, prompt(seed, 220))
        self._expect((0, WHOLE_PAGES, 0))

    def test_from_l3_after_a_flush_and_after_a_restart(self) -> None:
        self._expect((0, 0, 0))
        self.server.flush()
        self._expect((0, 0, WHOLE_PAGES))
        cached = self.server.generate(PROMPT, max_new_tokens=1).cached
        assert cached["storage_backend"] == self.backend_name
        assert self.server.stop() == 0
        self.server.start()
        self._expect((0, 0, WHOLE_PAGES))

    def test_long_and_short_prompts_together(self) -> None:
        with ThreadPoolExecutor(len(MIXED)) as pool:
            first = list(pool.map(partial(ask, self.server), MIXED))
        assert [words for words, _ in first] == self.mixed
        self.server.flush()
        with ThreadPoolExecutor(len(MIXED)) as pool:
            second = list(pool.map(partial(ask, self.server), MIXED))
        pages = [(0, 0, len(ids) // PAGE * PAGE) for ids in MIXED]
        assert second == list(zip(self.mixed, pages, strict=True))
