"""The built-in hybrid recalls from every tier: real servers, files and a real Mooncake store.

Conversations have about 2,000 tokens, and L1 holds one of them. A server without a cache answers
each; then L1, L2, L3 and a second server serve it again. All answers must be the right codes.
`cached_tokens_details` must show the prefix in the expected tier: its keys and values, and the
recurrent state at its end. Speculation must take the same number of verifications as in a cold run,
which shows that every tier keeps the draft layer's entries intact.

The model computes in bf16, as users run it. No CPU's rounding changes an answer: the logits of the
right tokens lead by 2.8 here, and bf16 moves a logit by 0.3 at most.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from rigs.models.heldout_question import HeldoutQuestion
from rigs.nightly_cases import nightly
from rigs.servers.engine_server import EngineServer
from rigs.servers.forked_servers import ForkedServer
from rigs.stores.mooncake_cluster import MooncakeCluster
from sglang.srt.constants import BUILTIN_HYBRID_MODEL_DIR
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=19, suite="base-b-test-cpu")

MODEL = str(BUILTIN_HYBRID_MODEL_DIR)
CONTEXT = 2000
PAGE = 64
STATES = ("--max-running-requests", "2", "--max-mamba-cache-size", "16",
          "--chunked-prefill-size", "1024")  # fmt: skip
TIERS = (*STATES, "--max-total-tokens", "4096", "--hicache-ratio", "8",
         "--hicache-storage-prefetch-policy", "wait_complete")  # fmt: skip


def whole_pages(question: HeldoutQuestion) -> int:
    """Tokens that a cache of whole pages can have."""
    return (len(question.ids) - 1) // PAGE * PAGE


@pytest.fixture(scope="module")
def questions() -> list[HeldoutQuestion]:
    """Three questions for codes that were told, which an engine without a cache answers right."""
    found = [HeldoutQuestion.of(seed, CONTEXT) for seed in range(3)]
    with ForkedServer("--disable-radix-cache", *STATES, model=MODEL) as server:
        for question in found:
            assert CONTEXT <= len(question.ids) < 4096, "one fits into L1"
            assert question.answer.isdecimal()
            check(server, question, None)
    return found


def check(server: EngineServer, question: HeldoutQuestion, tier: str | None) -> int:
    """Ask; all whole pages must come from `tier`, or nothing from a cache. Returns the number of
    verifications."""
    got = server.generate(question.ids)
    assert got.text == question.answer
    counts = {name: got.cached.get(name, 0) for name in ("device", "host", "storage")}
    expected = dict.fromkeys(counts, 0)
    if tier is not None:
        expected[tier] = whole_pages(question)
    assert counts == expected
    return int(got.meta_info.get("spec_verify_ct", 0))


@pytest.mark.parametrize(
    ("backend", "more"),
    [
        pytest.param("file", (), id="file"),
        nightly("mooncake", (), id="mooncake"),
        pytest.param("mooncake", ("--speculative-algorithm", "NEXTN"), id="speculation"),
    ],
)
def test_facts_are_recalled_from_every_tier(
    questions: list[HeldoutQuestion], backend: str, more: tuple[str, ...], tmp_path: Path
) -> None:
    flags = ("--hicache-storage-backend", backend, *TIERS, *more)
    with ExitStack() as stack:
        env = {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(tmp_path)}
        if backend == "mooncake":
            env = stack.enter_context(MooncakeCluster(segment_size="256mb")).engine_env()
        writer = stack.enter_context(ForkedServer(*flags, env=env, model=MODEL))
        cold = []
        for question in questions:
            cold.append(check(writer, question, None))
            assert check(writer, question, "device") == cold[-1]
        assert all(cold) == bool(more)
        assert [check(writer, question, "host") for question in questions] == cold
        writer.flush()
        assert [check(writer, question, "storage") for question in questions] == cold
        reader = stack.enter_context(ForkedServer(*flags, env=env, model=MODEL))
        assert [check(reader, question, "storage") for question in questions] == cold
        if more:
            tokens = sum(len(question.answer) for question in questions)
            print(f"{tokens} digits in {sum(cold)} verifications")
