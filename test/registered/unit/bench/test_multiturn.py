"""Conversations: prompts grow by the answer and the new tokens; figures of a round by hand."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rigs.bench.multiturn import (
    Conversations,
    Distribution,
    ReadyQueuePolicy,
    converse,
    round_figures,
)
from rigs.servers.fake_generate_server import FakeServer
from sglang.benchmark.api_backends import RequestOptions, RequestResult
from sglang.benchmark.serving_metrics import open_session
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=4, suite="base-a-test-cpu")

SHAPE = Conversations(clients=3, rounds=4, request_len=10, output_len=5, parallel=2)
VOCABULARY = np.arange(100, 200, dtype=np.uint32)


def talk(
    server: FakeServer, flushes: list[int] | None = None, shape: Conversations = SHAPE
) -> list[list[RequestResult]]:
    async def run() -> list[list[RequestResult]]:
        async def between() -> None:
            assert flushes is not None
            flushes.append(len(server.bodies))

        async with open_session() as session:
            return await converse(
                session,
                VOCABULARY,
                shape,
                RequestOptions(base_url=server.url),
                between_rounds=None if flushes is None else between,
            )

    return asyncio.run(run())


def by_length(bodies: list[dict[str, Any]]) -> dict[int, list[list[int]]]:
    prompts: dict[int, list[list[int]]] = {}
    for body in bodies:
        prompts.setdefault(len(body["input_ids"]), []).append(body["input_ids"])
    return prompts


def test_each_prompt_continues_the_last_one() -> None:
    with FakeServer(step_s=0.002) as server:
        results = talk(server)
    assert [len(one) for one in results] == [3, 3, 3, 3]
    assert server.most_running == 2
    prompts = by_length(server.bodies)
    assert sorted(prompts) == [10, 25, 40, 55]
    for length in (25, 40, 55):
        for prompt in prompts[length]:
            before = prompt[: length - 15]
            assert before in prompts[length - 15]
            assert prompt[length - 15 : length - 10] == [0, 1, 2, 3, 4]  # the answer
            assert all(100 <= token < 200 for token in prompt[length - 10 :])
    assert len({tuple(prompt) for prompt in prompts[10]}) == 3


def test_a_callback_between_rounds_waits_for_all_clients() -> None:
    flushes: list[int] = []
    with FakeServer() as server:
        talk(server, flushes)
    assert flushes == [3, 6, 9]


def order_of_clients(server: FakeServer) -> list[int]:
    """Identify clients by the first tokens of their prompts, which never change."""
    firsts: dict[tuple[int, ...], int] = {}
    return [firsts.setdefault(tuple(body["input_ids"][:10]), len(firsts)) for body in server.bodies]


def one_at_a_time(policy: ReadyQueuePolicy, seed: int = 1) -> Conversations:
    return Conversations(
        clients=5, rounds=4, request_len=10, output_len=2, parallel=1, seed=seed,
        ready_queue_policy=policy,
    )  # fmt: skip


def test_fifo_takes_clients_in_turn() -> None:
    with FakeServer() as server:
        talk(server, shape=one_at_a_time(ReadyQueuePolicy.FIFO))
        assert order_of_clients(server) == [0, 1, 2, 3, 4] * 4


def test_random_lets_clients_overtake_and_a_seed_fixes_the_order() -> None:
    orders = []
    for seed in (1, 1, 2):
        with FakeServer() as server:
            results = talk(server, shape=one_at_a_time(ReadyQueuePolicy.RANDOM, seed))
            assert [len(one) for one in results] == [5] * 4
            orders.append(order_of_clients(server))
    assert orders[0] == orders[1] != orders[2]
    assert orders[0] != [0, 1, 2, 3, 4] * 4


def test_with_fixed_answers_two_runs_send_the_same_prompts() -> None:
    shape = Conversations(clients=2, rounds=3, request_len=10, output_len=5, fixed_answers=True)
    asked = []
    for _ in range(2):
        with FakeServer() as server:
            talk(server, shape=shape)
            asked.append(sorted(body["input_ids"] for body in server.bodies))
    assert asked[0] == asked[1]
    # The fake server answers 0, 1, 2, ..., which must not appear in the prompts.
    assert all(100 <= token < 200 for prompt in asked[0] for token in prompt)
    assert sorted(len(prompt) for prompt in asked[0]) == [10, 10, 25, 25, 40, 40]


def test_a_barrier_keeps_random_clients_in_one_round() -> None:
    with FakeServer() as server:
        talk(server, [], shape=one_at_a_time(ReadyQueuePolicy.RANDOM))
        order = order_of_clients(server)
    rounds = [order[start : start + 5] for start in range(0, 20, 5)]
    assert all(sorted(one) == [0, 1, 2, 3, 4] for one in rounds)
    assert len({tuple(one) for one in rounds}) > 1


@pytest.mark.parametrize("distribution", list(Distribution))
def test_requests_come_no_faster_than_their_rate(distribution: Distribution) -> None:
    shape = Conversations(
        clients=5, rounds=4, request_len=10, output_len=2, request_rate=100,
        distribution=distribution,
    )  # fmt: skip
    with FakeServer() as server:
        begun = time.perf_counter()
        results = talk(server, shape=shape)
        seconds = time.perf_counter() - begun
    assert sum(map(len, results)) == 20
    # 19 intervals between 20 requests: 10 ms each if uniform, else 10 ms on average.
    assert seconds >= (0.19 if distribution is Distribution.UNIFORM else 0.08)


def test_a_failed_request_ends_its_conversation() -> None:
    with FakeServer(fail_every=2) as server:
        results = talk(server, [])
    # Requests 2, 4, ... fail: one of 3, then one of 2; the last client continues for a round.
    assert [len(one) for one in results] == [3, 2, 1, 0]
    assert [sum(not one.success for one in turn) for turn in results] == [1, 1, 1, 0]


def test_figures_of_a_round_sum_its_results() -> None:
    tiers = {"device": 30, "host": 20, "storage": 10}
    results = [
        RequestResult(
            prompt_tokens=100,
            completion_tokens=5,
            ttft=0.1,
            latency=0.2,
            cached_tokens=60,
            cached_details=tiers,
        ),
        RequestResult(prompt_tokens=50, completion_tokens=5, ttft=0.3, latency=0.4),
        RequestResult(error="no", prompt_tokens=50, ttft=9.0),
    ]
    got = round_figures(2, results)
    assert (got["round"], got["completed"], got["failed"]) == (2, 2, 1)
    assert got["hit_rate"] == pytest.approx(0.4)
    assert got["cached_tokens_details"] == tiers
    assert got["mean_ttft_ms"] == pytest.approx(200)
    for nothing in ([], results[2:]):
        got = round_figures(1, nothing)
        assert got["hit_rate"] is got["median_ttft_ms"] is got["mean_latency_ms"] is None
        assert got["ttfts_ms"] == []


@pytest.mark.parametrize(
    ("setting", "message"),
    [({"parallel": 0}, "--max-parallel 0"), ({"request_rate": 0.0}, "--request-rate 0.0")],
)
def test_errors_name_the_invalid_setting(setting: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Conversations(clients=1, rounds=1, request_len=1, output_len=1, **setting)


def test_lengths_are_positive() -> None:
    with pytest.raises(ValueError, match="--request-length 0"):
        Conversations(clients=1, rounds=1, request_len=0, output_len=1)


def test_conversations_share_a_beginning_and_take_turns_between_servers() -> None:
    shape = replace(SHAPE, shared_len=7, first_len=20, rounds=2)
    with FakeServer(step_s=0.002) as one, FakeServer(step_s=0.002) as other:

        async def run() -> None:
            async with open_session() as session:
                options = RequestOptions(base_url="http://127.0.0.1:1")
                urls = [one.url, other.url]
                await converse(session, VOCABULARY, shape, options, base_urls=urls)

        asyncio.run(run())
    assert len(one.bodies) == len(other.bodies) == 3
    prompts = by_length(one.bodies + other.bodies)
    assert sorted(prompts) == [27, 27 + 5 + 10]
    firsts = prompts[27]
    assert len({tuple(ids[:7]) for ids in firsts}) == 1
    assert len({tuple(ids[7:]) for ids in firsts}) == 3
