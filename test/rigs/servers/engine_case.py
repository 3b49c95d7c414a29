"""An `Engine` of a tiny model with an L3: same words cold, from every tier, and after a restart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import sglang
from rigs.schedulers.scheduler_rig import prompt
from rigs.servers.forked_servers import forking_engines
from sglang.srt.constants import BUILTIN_MODEL_DIR

GREEDY: Final[dict[str, Any]] = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
IDS: Final = prompt(1, 200)
_PAGE: Final = 16
_WHOLE: Final = 192
"""Tokens of the whole pages of `IDS`."""


def start_engine(model: Path, **settings: Any) -> sglang.Engine:
    """An engine on the CPU, with an L1 of 512 tokens and the built-in model's tokenizer."""
    common = {
        "tokenizer_path": str(BUILTIN_MODEL_DIR),
        "page_size": _PAGE,
        "max_total_tokens": 512,
        "device": "cpu",
    }
    with forking_engines():
        return sglang.Engine(model_path=str(model), **{**common, **settings})


def ask(
    engine: sglang.Engine, ids: list[int], **params: Any
) -> tuple[list[int], tuple[int, int, int]]:
    """The words, and the numbers of tokens that came from the device, the host and the store."""
    answer = engine.generate(input_ids=ids, sampling_params={**GREEDY, **params})
    found = answer["meta_info"]["cached_tokens_details"]
    return answer["output_ids"], (found["device"], found["host"], found.get("storage", 0))


def assert_same_words_from_every_tier(
    model: Path, cold: list[int], backend: str, **settings: Any
) -> None:
    """Assert that two successive engines answer `cold` to `IDS`, which comes from each tier in
    turn.

    Args:
        model: The checkpoint.
        cold: The answer of an engine without a cache.
        backend: Backend of L3, which is empty.
        settings: Further settings of the engines.
    """
    settings = {
        "enable_hierarchical_cache": True,
        "hicache_storage_backend": backend,
        "hicache_storage_prefetch_policy": "wait_complete",
        "hicache_storage_backend_extra_config": json.dumps({"prefetch_threshold": _PAGE}),
        **settings,
    }
    with start_engine(model, **settings) as engine:
        assert ask(engine, IDS) == (cold, (0, 0, 0))
        assert ask(engine, IDS) == (cold, (_WHOLE, 0, 0))
        for seed in range(10, 13):
            ask(engine, prompt(seed, 220))
        assert ask(engine, IDS) == (cold, (0, _WHOLE, 0))
        assert engine.flush_cache(timeout=60)
        assert ask(engine, IDS) == (cold, (0, 0, _WHOLE))
    with start_engine(model, **settings) as engine:
        assert ask(engine, IDS) == (cold, (0, 0, _WHOLE)), "from the store of one that ended"
