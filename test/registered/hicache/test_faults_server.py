"""Rows C5, C11, C13 and C14 with real servers, and the hit rates that SGLang's tests expect."""

from __future__ import annotations

import random
import shutil
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sglang.srt.constants import BUILTIN_MODEL_DIR
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.servers.engine_server import EngineServer
from sglang.test.servers.forked_servers import ForkedServer
from sglang.test.stores.mooncake_cluster import MooncakeCluster

register_cpu_ci(est_time=20, suite="base-b-test-cpu")

PAGE = 64
FLAGS = (
    "--hicache-storage-backend", "mooncake", "--hicache-storage-prefetch-policy", "wait_complete",
    "--enable-metrics",
)  # fmt: skip


def tokens(seed: int, count: int) -> list[int]:
    """A prompt of ordinary tokens."""
    rng = random.Random(seed)
    return [rng.randrange(300, 2000) for _ in range(count)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[MooncakeCluster]:
    with MooncakeCluster(segment_size="256mb") as running:
        yield running


@pytest.fixture(scope="module")
def server(cluster: MooncakeCluster) -> Iterator[EngineServer]:
    with ForkedServer(*FLAGS, env=cluster.engine_env()) as running:
        yield running


def perturbed_model(folder: Path) -> Path:
    """The built-in model with one number of one weight changed."""
    copy = folder / "perturbed"
    shutil.copytree(BUILTIN_MODEL_DIR, copy)
    weights = load_file(copy / "model.safetensors")
    first = next(iter(sorted(weights)))
    weights[first] = weights[first].clone()
    weights[first].view(-1)[0] += torch.tensor(0.5, dtype=weights[first].dtype)
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    return copy


def test_c5_engines_that_differ_share_nothing(
    cluster: MooncakeCluster, server: EngineServer, tmp_path: Path
) -> None:
    prompt = tokens(5, 600)
    server.generate(prompt)
    server.flush()
    assert server.generate(prompt).cached["storage"] == 576
    others: list[tuple[tuple[str, ...], str | None]] = [
        (("--page-size", "32"), None),
        (("--kv-cache-dtype", "float32"), None),
        ((), str(perturbed_model(tmp_path))),
    ]
    for flags, model in others:
        with ForkedServer(*FLAGS, *flags, env=cluster.engine_env(), model=model) as other:
            assert other.generate(prompt).meta_info["cached_tokens"] == 0, flags


def test_c13_flushed_prompts_come_from_storage_and_every_other_has_a_counted_reason(
    server: EngineServer,
) -> None:
    prompt = tokens(13, 768)
    cold = server.generate(prompt)
    server.flush()
    before = server.metrics()
    warm = server.generate(prompt)
    assert warm.output_ids == cold.output_ids
    assert warm.cached["storage"] > 700
    server.generate(tokens(14, 768))
    server.generate(tokens(15, 100))
    after = server.metrics()
    reasons = {
        name: after[name] - before.get(name, 0.0)
        for name in after
        if name.startswith("sglang:hicache_prefetch_total")
    }
    counted = {name.split('"')[1]: count for name, count in reasons.items() if count}
    assert counted == {"landed": 1, "miss": 1, "too_short": 1}


@pytest.mark.parametrize("pages", [5, 12])
def test_c14_whole_pages_replayed_hit_all_but_the_last(server: EngineServer, pages: int) -> None:
    prompt = tokens(100 + pages, pages * PAGE)
    server.generate(prompt)
    assert server.generate(prompt).cached["device"] >= (pages - 1) * PAGE
    server.flush()
    again = server.generate(prompt)
    assert again.cached["storage"] >= (pages - 1) * PAGE


def test_each_round_of_a_conversation_reuses_the_one_before(server: EngineServer) -> None:
    history: list[int] = []
    least = 0
    for turn in range(4):
        history += tokens(1000 + turn, 200)
        answer = server.generate(history, max_new_tokens=30, sampling={"ignore_eos": True})
        assert answer.meta_info["cached_tokens"] >= least
        least = (len(history) + 30 - 1) // PAGE * PAGE
        history += answer.output_ids


def test_c11_abort_storm_leaves_the_books_balanced(cluster: MooncakeCluster) -> None:
    """Requests aborted while queued, prefetching, loading, running and backing up.

    The tiers are far smaller than the working set. An idle server checks its books and ends if
    they do not balance. So the proof is a server that lives after the storm, with all slots free
    after a flush.
    """
    rng = random.Random(11)
    small = ("--max-total-tokens", "4096", "--hicache-ratio", "2", "--max-running-requests", "4")
    prompts = [tokens(2000 + seed, rng.randrange(200, 1200)) for seed in range(8)]
    with ForkedServer(*FLAGS, *small, env=cluster.engine_env()) as server:
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


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
