"""The forecast of agents' conversations: times of small loads by hand."""

from __future__ import annotations

import pytest

from benchmark.gpu_hicache.agents_forecast import Costs, forecast
from rigs.bench.multiturn import Conversations
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=2, suite="base-a-test-cpu")

TALK = Conversations(
    clients=1, rounds=2, shared_len=60, first_len=40, request_len=50, output_len=10
)
COSTS = Costs(linear=1.0, by_pair=0.0, step=0.5, by_context=0.0, read=None)


def test_one_session_on_one_server_computes_only_new_tokens() -> None:
    found = forecast(TALK, COSTS, servers=1, l1=1000, page_size=10)
    # 100 tokens; then 50, the answer's last token, and the nine that fill no page.
    assert found.ttft == [100.0, 51.0 + 9.0]
    assert found.seconds == sum(found.ttft) + 2 * 9 * 0.5
    assert found.hit_rate == 100 / (100 + 160)


def test_a_server_without_a_store_computes_what_another_has() -> None:
    found = forecast(TALK, COSTS, servers=2, l1=1000, page_size=10)
    assert found.ttft == [100.0, 160.0] and found.cached_tokens == 0


@pytest.mark.parametrize("rate", [0.1, 2.0])
def test_all_stored_pages_are_read_however_slow(rate: float) -> None:
    costs = Costs(linear=1.0, by_pair=0.0, step=0.5, by_context=0.0, read=rate)
    found = forecast(TALK, costs, servers=2, l1=1000, page_size=10)
    assert found.ttft == [100.0, 100 * rate + 60.0]


def test_sessions_wait_for_each_other() -> None:
    talk = Conversations(clients=2, rounds=1, first_len=100, request_len=1, output_len=10)
    room = forecast(talk, COSTS, servers=1, l1=1000, page_size=10)
    assert room.ttft == [100.0, 200.0] and room.seconds == 200.0 + 9 * 0.5
    small = forecast(talk, COSTS, servers=1, l1=120, page_size=10)
    assert small.ttft == [100.0, 100.0 + 9 * 0.5 + 100.0]


def test_sessions_have_shared_tokens_once_in_l1() -> None:
    talk = Conversations(
        clients=2, rounds=1, shared_len=60, first_len=40, request_len=1, output_len=10
    )
    # 60, and twice 40 and an answer.
    room = forecast(talk, COSTS, servers=1, l1=160, page_size=10)
    assert room.ttft == [100.0, 140.0]
    small = forecast(talk, COSTS, servers=1, l1=150, page_size=10)
    assert small.ttft == [100.0, 100.0 + 9 * 0.5 + 40.0]


def test_requests_that_end_leave_their_room_to_two_others() -> None:
    talk = Conversations(
        clients=5, rounds=1, shared_len=60, first_len=40, request_len=1, output_len=10
    )
    found = forecast(talk, COSTS, servers=1, l1=160, page_size=10)
    assert found.ttft == [100.0, 140.0, 184.5, 224.5, 269.0]


def test_attention_costs_by_pairs() -> None:
    costs = Costs(linear=0.0, by_pair=1.0, step=0.0, by_context=0.0, read=None)
    found = forecast(TALK, costs, servers=1, l1=1000, page_size=10)
    assert found.ttft == [100 * 50.0, 60 * (100 + 30.0)]
