"""Servers of different numbers of ranks that say the same words from every tier: tiny models."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

from rigs.drafts.guesses import guess_in_rank
from rigs.models.tiny_models import save_tiny_checkpoint
from rigs.schedulers.scheduler_rig import prompt
from rigs.servers.engine_server import EngineServer
from rigs.servers.forked_servers import ForkedServer
from rigs.servers.request_battery import GREEDY, Results, battery, differences
from sglang.srt.constants import BUILTIN_MODEL_DIR

HEADS: Final[dict[str, Any]] = {"num_attention_heads": 8, "vocab_size": 2176, "eos_token_id": 2}
"""Two KV heads: of four ranks each has one that another has too."""
LATENT: Final[dict[str, Any]] = {**HEADS, "num_key_value_heads": 8}
DELTA: Final[dict[str, Any]] = {**HEADS, "linear_num_key_heads": 4, "linear_num_value_heads": 8}
FAMILIES: Final = {
    "qwen3": HEADS,
    "qwen3_moe": HEADS,
    "deepseek_v32": LATENT,
    "minimax_m2": HEADS,
    "kimi_linear": LATENT,
    "qwen3_next": DELTA,
    "qwen3_5": DELTA,
    "nemotron_h": {**HEADS, "n_groups": 2, "chunk_size": 64},
    "gpt_oss": HEADS,
    "deepseek_v4": HEADS,
    "glm5_next": LATENT,
}
WITH_SAME_LAYERS: Final = {"glm4_moe": HEADS, "deepseek_v3": LATENT, "qwen3_5_moe": DELTA}
"""Further families with experts, whose ranks split layers as one of FAMILIES does."""
DRAFTING: Final = ("deepseek_v32",)
IDS: Final = prompt(1, 200)
_WITH_STATES: Final = (
    "kimi_linear", "qwen3_next", "qwen3_5", "qwen3_5_moe", "nemotron_h", "gpt_oss",
    "deepseek_v4", "glm5_next",
)  # fmt: skip
PAGE: Final = 16
WHOLE: Final = 192
"""Tokens of the whole pages of IDS."""
SOURCES: Final = {"L1": (WHOLE, 0, 0), "L2": (0, WHOLE, 0), "L3": (0, 0, WHOLE)}
TOLERANCE: Final = 1e-4


def flags(
    family: str, size: int, backend: str = "file", *, cp_size: int = 1, chunk: int = 128
) -> list[str]:
    words = {
        "tp-size": size,
        "attn-cp-size": cp_size,
        "device": "cpu",
        "tokenizer-path": BUILTIN_MODEL_DIR,
        "page-size": PAGE,
        "max-total-tokens": 1024,
        "max-running-requests": 8,
        "chunked-prefill-size": chunk,
        "hicache-storage-backend": backend,
        "hicache-storage-prefetch-policy": "wait_complete",
        "hicache-storage-backend-extra-config": json.dumps({"prefetch_threshold": PAGE}),
        "hicache-ratio": 4,
    }
    if family in _WITH_STATES:
        words["max-mamba-cache-size"] = 24
    return [
        "--enable-hierarchical-cache",
        "--constrained-json-disable-any-whitespace",
        *(text for name, value in words.items() for text in (f"--{name}", str(value))),
    ]


def ask(server: EngineServer) -> tuple[list[int], tuple[int, int, int]]:
    """The words, and how many tokens of the prompt came from the device, the host and the store."""
    answer = server.generate(IDS, sampling=GREEDY)
    found = answer.cached
    return answer.output_ids, (found["device"], found["host"], found.get("storage", 0))


def push_out(server: EngineServer) -> None:
    """Fill L1 with other prompts."""
    for seed in range(100, 105):
        server.generate(prompt(seed, 220), max_new_tokens=1)


def words_of(server: ForkedServer, *, restarts: bool) -> tuple[list[int], Results]:
    """A server's answers to IDS, equal from every tier and after a restart, and to the battery."""
    cold, found = ask(server)
    assert found == (0, 0, 0)
    assert ask(server) == (cold, SOURCES["L1"])
    results = battery(server)
    server.flush()
    assert ask(server) == (cold, SOURCES["L3"])
    push_out(server)
    assert ask(server) == (cold, SOURCES["L2"])
    assert server.stop() == 0
    if restarts:
        server.start()
        assert ask(server) == (cold, SOURCES["L3"]), "from the store of a server that ended"
    return cold, results


def assert_same_words(
    directory: Path, family: str, sizes: Sequence[tuple[int, int]], **changes: Any
) -> None:
    """Assert that servers of all `sizes` give the results of the first one.

    Args:
        directory: An empty folder, for the model and the stores.
        family: One of FAMILIES.
        sizes: Numbers of ranks, and how many of them divide a prompt.
        changes: Further settings of the tiny model.
    """
    model = directory / "model"
    drafts = family in DRAFTING
    save_tiny_checkpoint(model, family, mtp=drafts, **FAMILIES[family] | changes)
    expected: tuple[list[int], Results] | None = None
    for size, cp_size in sizes:
        told = f"TP {size}, CP {cp_size}"
        env = {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(directory / f"store {told}")}
        words, in_rank = flags(family, size, cp_size=cp_size), None
        if drafts and cp_size > 1:
            assert expected is not None
            # Ranks cut chunks of 96 tokens within pages.
            words = flags(family, size, cp_size=cp_size, chunk=96)
            words += ["--speculative-algorithm", "NEXTN"]
            in_rank = partial(guess_in_rank, [[*IDS, *expected[0]]], 0.8)
        with ForkedServer(*words, env=env, model=str(model), in_rank=in_rank) as server:
            found = words_of(server, restarts=(size, cp_size) == sizes[-1])
        if expected is None:
            expected = found
            check(found[1])
        assert found[0] == expected[0], told
        assert differences(found[1], expected[1], TOLERANCE) == [], told


class Layout(NamedTuple):
    """Ranks of a server: DP groups, and ranks with whole experts."""

    size: int
    dp: int = 1
    ep: int = 1


def assert_layouts_say_the_same(
    directory: Path, family: str, layouts: Sequence[Layout], *more: str
) -> None:
    """Assert that servers of all layouts say what one rank says.

    Args:
        directory: An empty folder, for the model and the stores.
        family: One of FAMILIES or WITH_SAME_LAYERS.
        more: Further flags of all layouts but the single rank. If they ask for drafts, most drafts
            are right.
    """
    model = directory / "model"
    sizes = FAMILIES.get(family) or WITH_SAME_LAYERS[family]
    drafts = "--speculative-algorithm" in more
    save_tiny_checkpoint(model, family, mtp=drafts or family in DRAFTING, **sizes)
    expected: tuple[list[int], Results] | None = None
    for layout in (Layout(1), *layouts):
        env = {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(directory / f"store {layout}")}
        words = flags(family, layout.size)
        words += ["--attn-dp-size", str(layout.dp), "--ep-size", str(layout.ep)]
        in_rank = None
        if layout.size > 1:
            words += more
            if drafts:
                assert expected is not None
                in_rank = partial(guess_in_rank, [[*IDS, *expected[0]]], 0.8)
        with ForkedServer(*words, env=env, model=str(model), in_rank=in_rank) as server:
            cold, found = ask(server)
            assert found == (0, 0, 0)
            for dp_rank in range(layout.dp):
                again = server.generate(IDS, sampling=GREEDY, routed_dp_rank=dp_rank)
                assert again.output_ids == cold, (layout, dp_rank)
            results = battery(server)
            server.flush()
            assert ask(server) == (cold, SOURCES["L3"])
            assert server.stop() == 0
        if expected is None:
            expected = cold, results
            check(results)
        assert cold == expected[0], layout
        assert differences(results, expected[1], TOLERANCE) == [], layout


def check(results: Results) -> None:
    """Assert that the results have everything that is compared."""
    assert all(answer["ids"] for answers in results.values() for answer in answers)
    (schema,) = results["schema"]
    assert json.loads(schema["text"])["name"] in ("heron", "stork")
    assert len({tuple(sample["ids"]) for sample in results["samples"]}) == 3
    (logprobs,) = results["log probabilities"]
    assert len(logprobs["logprobs"]) > 4 * 70
    (stopped,) = results["stop"]
    assert stopped["end"]["type"] == "stop"
