"""Prefill and decode servers with DP groups of unlike sizes: the words of one rank.

A prompt is read from the group that computed it. Neither the client nor the router has to name it.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import httpx
import pytest

from rigs.disaggregation.pd_groups import (
    IDS,
    GroupedPair,
    Side,
    body_of,
    metric,
    states,
    tiny,
    words_of_one_rank,
)
from rigs.disaggregation.pd_servers import router
from rigs.schedulers.scheduler_rig import prompt
from sglang.srt.utils.network import wait_until
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=40, suite="base-b-test-cpu")

EXPERTS: Final = ("--ep-size", "2")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("models"), "qwen3")


@pytest.fixture(scope="module")
def wanted(model: Path) -> list[list[int]]:
    return words_of_one_rank(model)


@pytest.fixture(scope="module")
def pair(model: Path) -> Iterator[GroupedPair]:
    with GroupedPair(model, Side(dp=2, more=("--enable-metrics",)), Side()) as one:
        yield one
        assert [server.stop() for server in (one.decode, one.prefill)] == [0, 0]


def test_a_group_computes_and_one_rank_decodes(pair: GroupedPair, wanted: list[list[int]]) -> None:
    pair.assert_words(wanted)


def test_groups_share_the_requests_of_a_router(pair: GroupedPair, wanted: list[list[int]]) -> None:
    """It knows nothing of groups."""
    before = metric(pair.prefill, "sglang:prompt_tokens_total")
    with router([(pair.prefill, pair.bootstrap[1])], [pair.decode]) as url:

        def post(ids: list[int]) -> list[int]:
            answer = httpx.post(f"{url}/generate", json=body_of(ids), timeout=60)
            assert answer.status_code == 200, answer.text
            found: list[int] = answer.json()["output_ids"]
            return found

        prompts = [*IDS, *(prompt(seed, 150) for seed in range(50, 58))]
        with ThreadPoolExecutor(len(prompts)) as pool:
            found = list(pool.map(post, prompts))
    assert found[: len(IDS)] == wanted
    after = metric(pair.prefill, "sglang:prompt_tokens_total")
    assert before.keys() == after.keys() == {"0", "1"}
    assert all(after[dp_rank] > before[dp_rank] for dp_rank in after), (before, after)
    pair.assert_given_back()


def test_a_group_that_is_not_there_is_refused_with_the_range(pair: GroupedPair) -> None:
    """The decode server hears of the refusal, whose group is none of the others'."""
    refused, failed = pair.ask(IDS[1], groups=(2, None))
    why = "routed_dp_rank=2 must be from 0 to 1"
    assert refused.status_code == 400 and why in refused.text
    assert failed.status_code == 503 and f"ended the request: {why}" in failed.text
    failed, refused = pair.ask(IDS[1], groups=(None, 1))
    assert refused.status_code == 400 and "routed_dp_rank=1 must be 0" in refused.text
    assert failed.status_code == 503 and "gave it up: routed_dp_rank=1" in failed.text
    pair.assert_given_back()


def test_a_room_is_not_given_to_requests_of_two_groups(
    pair: GroupedPair, wanted: list[list[int]]
) -> None:
    host, port = pair.bootstrap
    room = {"bootstrap_host": host, "bootstrap_port": port, "bootstrap_room": 1 << 60}
    whole = body_of(IDS[2]) | room
    with ThreadPoolExecutor(1) as pool, httpx.Client(timeout=60) as client:
        url, first_of = f"{pair.prefill.url}/generate", whole | {"routed_dp_rank": 0}
        first = pool.submit(httpx.post, url, json=first_of, timeout=60)
        assert wait_until(lambda: bool(states(pair.prefill)[0]["busy"]), 30)
        other = client.post(url, json=whole | {"routed_dp_rank": 1})
        assert other.status_code == 400 and "belongs to another request" in other.text
        answer = client.post(f"{pair.decode.url}/generate", json=whole)
        assert answer.json()["output_ids"] == wanted[2]
        assert first.result().status_code == 200
    pair.assert_given_back()


def test_both_servers_say_that_each_group_works(pair: GroupedPair) -> None:
    for server in (pair.prefill, pair.decode):
        assert server.request("GET", "/health_generate").status == 200


def test_two_ranks_compute_and_a_group_decodes(model: Path, wanted: list[list[int]]) -> None:
    with GroupedPair(model, Side(tp=2), Side(dp=2)) as pair:
        pair.assert_words(wanted)


def test_groups_share_experts_on_both_servers(tmp_path: Path) -> None:
    model = tiny(tmp_path, "qwen3_moe")
    with GroupedPair(model, Side(dp=2, more=EXPERTS), Side(dp=2)) as pair:
        pair.assert_words(words_of_one_rank(model))
