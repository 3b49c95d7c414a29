"""The built-in hybrid recalls from every tier: real servers, files and a real Mooncake store.

Conversations of about 4,000 tokens, of which L1 holds one. Each is answered by a server without a
cache, then again from L1, L2, L3 and by a second server. All answers must be the right codes, the
words equal, and `cached_tokens_details` must have the prefix in the expected tier: its keys and
values, and the recurrent state at its end.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from sglang.srt.constants import BUILTIN_HYBRID_MODEL_DIR
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.models.heldout_question import HeldoutQuestion
from sglang.test.servers.engine_server import EngineServer
from sglang.test.servers.forked_servers import ForkedServer
from sglang.test.stores.mooncake_cluster import MooncakeCluster

register_cpu_ci(est_time=25, suite="base-b-test-cpu")

MODEL = str(BUILTIN_HYBRID_MODEL_DIR)
CONTEXT = 4000
PAGE = 64
STATES = ("--max-running-requests", "2", "--max-mamba-cache-size", "16")
TIERS = (*STATES, "--max-total-tokens", "8192", "--hicache-ratio", "8",
         "--hicache-storage-prefetch-policy", "wait_complete")  # fmt: skip


@dataclass(frozen=True)
class Asked:
    """A question, and an engine's words."""

    question: HeldoutQuestion
    words: list[int]

    @property
    def whole_pages(self) -> int:
        """Tokens that a cache of whole pages can have."""
        return (len(self.question.ids) - 1) // PAGE * PAGE


@pytest.fixture(scope="module")
def questions() -> list[Asked]:
    """Four questions for codes that were told, and the words of an engine without a cache."""
    found = []
    with ForkedServer("--disable-radix-cache", *STATES, model=MODEL) as server:
        for seed in range(4):
            question = HeldoutQuestion.of(seed, CONTEXT)
            assert CONTEXT <= len(question.ids) < 8192, "one fits into L1"
            cold = server.generate(question.ids)
            assert cold.text.isdecimal()
            assert cold.text == question.answer
            assert cold.cached["device"] == 0
            found.append(Asked(question, cold.output_ids))
    return found


def check(server: EngineServer, asked: Asked, tier: str | None) -> None:
    """Ask; all whole pages must come from `tier`, or nothing from a cache."""
    got = server.generate(asked.question.ids)
    assert (got.text, got.output_ids) == (asked.question.answer, asked.words)
    counts = {name: got.cached.get(name, 0) for name in ("device", "host", "storage")}
    expected = dict.fromkeys(counts, 0)
    if tier is not None:
        expected[tier] = asked.whole_pages
    assert counts == expected


@pytest.mark.parametrize("backend", ["file", "mooncake"])
def test_right_and_the_same_words_from_every_tier(
    questions: list[Asked], backend: str, tmp_path: Path
) -> None:
    flags = ("--hicache-storage-backend", backend, *TIERS)
    with ExitStack() as stack:
        env = {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(tmp_path)}
        if backend == "mooncake":
            env = stack.enter_context(MooncakeCluster(segment_size="256mb")).engine_env()
        writer = stack.enter_context(ForkedServer(*flags, env=env, model=MODEL))
        for question in questions:
            check(writer, question, None)
            check(writer, question, "device")
        for question in questions:
            check(writer, question, "host")
        writer.flush()
        for question in questions:
            check(writer, question, "storage")
        reader = stack.enter_context(ForkedServer(*flags, env=env, model=MODEL))
        for question in questions:
            check(reader, question, "storage")


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q", "-x"]))
