"""Rows C5, C11, C13 and C14 with real servers, and the hit rates that SGLang's tests expect.

C11, C13 and C14 hold for the built-in hybrid too, whose prefixes end with a recurrent state.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from rigs.servers.engine_server import EXACT, EngineServer
from rigs.servers.forked_servers import ForkedServer
from rigs.servers.spoiled_models import perturbed_model
from rigs.stores.mooncake_cluster import MooncakeCluster
from sglang.srt.constants import BUILTIN_HYBRID_MODEL_DIR
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=14, suite="base-b-test-cpu")

PAGE = 64
HYBRID = str(BUILTIN_HYBRID_MODEL_DIR)
FLAGS = (
    "--hicache-storage-backend", "mooncake", "--hicache-storage-prefetch-policy", "wait_complete",
    "--enable-metrics", *EXACT,
)  # fmt: skip


def tokens(seed: int, count: int) -> list[int]:
    """A prompt of ordinary tokens."""
    rng = random.Random(seed)
    return [rng.randrange(300, 2000) for _ in range(count)]


@pytest.fixture(scope="module")
def server(cluster: MooncakeCluster) -> Iterator[EngineServer]:
    with ForkedServer(*FLAGS, env=cluster.engine_env()) as running:
        yield running


@pytest.fixture(scope="module")
def hybrid(cluster: MooncakeCluster) -> Iterator[EngineServer]:
    states = ("--max-mamba-cache-size", "256")
    with ForkedServer(*FLAGS, *states, env=cluster.engine_env(), model=HYBRID) as running:
        yield running


@pytest.fixture(params=["server", "hybrid"])
def either(request: pytest.FixtureRequest) -> EngineServer:
    """A server of a model without, and one with recurrent states."""
    found: EngineServer = request.getfixturevalue(request.param)
    return found


def test_c5_engines_that_differ_share_nothing(
    cluster: MooncakeCluster, server: EngineServer, tmp_path: Path
) -> None:
    prompt = tokens(5, 600)
    server.generate(prompt)
    server.flush()
    assert server.generate(prompt).cached["storage"] == 576
    others: list[tuple[tuple[str, ...], str | None]] = [
        (("--page-size", "32"), None),
        (("--kv-cache-dtype", "bfloat16"), None),
        ((), str(perturbed_model(tmp_path))),
    ]
    for flags, model in others:
        with ForkedServer(*FLAGS, *flags, env=cluster.engine_env(), model=model) as other:
            assert other.generate(prompt).meta_info["cached_tokens"] == 0, flags


def test_c13_flushed_prompts_come_from_storage_and_every_other_has_a_counted_reason(
    either: EngineServer,
) -> None:
    prompt = tokens(13, 768)
    cold = either.generate(prompt)
    either.flush()
    before = either.metrics()
    warm = either.generate(prompt)
    assert warm.output_ids == cold.output_ids
    assert warm.cached["storage"] > 700
    either.generate(tokens(14, 768))
    either.generate(tokens(15, 100))
    after = either.metrics()
    reasons = {
        name: after[name] - before.get(name, 0.0)
        for name in after
        if name.startswith("sglang:hicache_prefetch_total")
    }
    counted = {name.split('"')[1]: count for name, count in reasons.items() if count}
    assert counted == {"landed": 1, "miss": 1, "too_short": 1}


@pytest.mark.parametrize("pages", [5, 12, 40])
def test_c14_whole_pages_replayed_hit_all_but_the_last(either: EngineServer, pages: int) -> None:
    prompt = tokens(100 + pages, pages * PAGE)
    either.generate(prompt)
    assert either.generate(prompt).cached["device"] >= (pages - 1) * PAGE
    either.flush()
    again = either.generate(prompt)
    assert again.cached["storage"] >= (pages - 1) * PAGE


def test_c14_the_beginning_of_a_cached_prompt_hits_from_its_second_replay(
    hybrid: EngineServer,
) -> None:
    """The exception: a state stands behind the longer prompt, none before the end of this one."""
    prompt = tokens(150, 12 * PAGE)
    hybrid.generate(prompt)
    assert [hybrid.generate(prompt[: 6 * PAGE]).cached["device"] for _ in range(2)] == [0, 5 * PAGE]


def test_each_round_of_a_conversation_reuses_the_one_before(server: EngineServer) -> None:
    history: list[int] = []
    least = 0
    for turn in range(4):
        history += tokens(1000 + turn, 200)
        answer = server.generate(history, max_new_tokens=30, sampling={"ignore_eos": True})
        assert answer.meta_info["cached_tokens"] >= least
        least = (len(history) + 30 - 1) // PAGE * PAGE
        history += answer.output_ids


@pytest.mark.parametrize("model", [None, HYBRID], ids=["server", "hybrid"])
def test_c11_abort_storm_leaves_the_books_balanced(
    cluster: MooncakeCluster, model: str | None
) -> None:
    """Requests aborted while queued, prefetching, loading, running and backing up.

    The tiers are far smaller than the working set. An idle server checks page ownership and exits
    if the books do not balance. The server must survive the storm, and a flush must free all slots.
    """
    rng = random.Random(11)
    small = ["--max-total-tokens", "4096", "--hicache-ratio", "2", "--max-running-requests", "4"]
    if model is not None:
        small += ["--max-mamba-cache-size", "8", "--mamba-track-interval", str(PAGE),
                  "--chunked-prefill-size", "256"]  # fmt: skip
    prompts = [tokens(2000 + seed, rng.randrange(200, 1200)) for seed in range(8)]
    with ForkedServer(*FLAGS, *small, env=cluster.engine_env(), model=model) as server:
        cold = {i: server.generate(prompt).output_ids for i, prompt in enumerate(prompts)}
        server.flush()

        def ask(number: int) -> None:
            body = {
                "input_ids": prompts[number % len(prompts)],
                "sampling_params": {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True},
                "rid": f"storm-{number}",
            }
            server.request("POST", "/generate", body)

        threads = [threading.Thread(target=ask, args=(n,)) for n in range(48)]

        def abort(**whom: object) -> None:
            assert server.request("POST", "/abort_request", whom, admin=True).status == 200

        with ExitStack() as stack:
            for number, thread in enumerate(threads):
                thread.start()
                stack.callback(thread.join)
                if number >= 4:
                    abort(rid=f"storm-{number - 4}")
                if number % 16 == 15:
                    abort(abort_all=True)
        server.flush()
        state = server.request("GET", "/server_info").body
        assert _find(state, "used_tokens") == 0
        if model is not None:
            assert _find(state, "free_mamba_slots") == 8
        aborted = _find(state, "aborted")
        assert isinstance(aborted, int) and aborted, "or this test showed nothing"
        for number, prompt in enumerate(prompts):
            assert server.generate(prompt).output_ids == cold[number]


def _find(tree: object, name: str) -> object:
    """The first value called `name` in nested objects."""
    if isinstance(tree, dict):
        if name in tree:
            return tree[name]
        found = (_find(value, name) for value in tree.values())
    elif isinstance(tree, list):
        found = (_find(value, name) for value in tree)
    else:
        return None
    return next((value for value in found if value is not None), None)
