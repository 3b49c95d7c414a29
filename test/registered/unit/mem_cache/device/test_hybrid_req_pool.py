"""HybridReqToTokenPool: a row and a running state for each request, together."""

from __future__ import annotations

import torch

from sglang.srt.layers.forward_batch_info import StateBatch
from sglang.srt.mem_cache.device.memory_pool import HybridReqToTokenPool, ReqToTokenPool
from sglang.srt.mem_cache.device.state_pool import MambaPool, MambaSpec
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=2, suite="base-a-test-cpu")

SPEC = MambaSpec.of_shapes(
    (0, 2), (2, 3, 4), (5, 3), ssm_dtype=torch.float32, conv_dtype=torch.float32
)


class Request:
    def __init__(self) -> None:
        self.req_pool_idx: int | None = None


def pool_of(rows: int, states: int) -> HybridReqToTokenPool:
    return HybridReqToTokenPool(rows, 8, "cpu", MambaPool(SPEC, states, "cpu"))


def slots_of(pool: HybridReqToTokenPool, rows: list[int]) -> list[int]:
    return pool.get_mamba_indices(torch.tensor(rows)).tolist()


def test_requests_get_zeroed_states_and_keep_them() -> None:
    pool = pool_of(4, 6)
    taken = pool.mamba_pool.take(2)
    temporal, conv = pool.mamba_pool.buffers
    temporal.fill_(7.0)
    conv.fill_(7.0)
    first, second = Request(), Request()
    assert pool.alloc([first, second]) == [0, 1]
    assert slots_of(pool, [1, 0]) == [4, 3]
    assert pool.alloc([second, first]) == [1, 0], "who has a row keeps it"
    assert slots_of(pool, [1, 0]) == [4, 3]
    assert temporal[:, :, 0, 0, 0].tolist() == [[7, 7, 7, 0, 0, 7, 7]] * 2
    assert conv[:, :, 4, 2].tolist() == [[7, 7, 7, 0, 0, 7, 7]] * 2
    assert taken == [1, 2]
    assert sorted(pool.running_states()) == [3, 4]


def test_a_request_gives_row_and_state_back() -> None:
    pool = pool_of(2, 2)
    first, second, third = Request(), Request(), Request()
    pool.alloc([first, second])
    assert pool.available_size() == 0
    pool.free(first)
    assert (pool.available_size(), pool.mamba_pool.available_size()) == (1, 1)
    assert pool.alloc([third]) == [0]
    assert slots_of(pool, [0, 1]) == [1, 2]
    pool.clear()
    assert (pool.available_size(), pool.mamba_pool.available_size()) == (2, 2)


def test_nothing_is_given_where_states_are_too_few() -> None:
    pool = pool_of(4, 2)
    requests = [Request() for _ in range(3)]
    assert pool.available_size() == 2
    assert pool.alloc(requests) is None
    assert [req.req_pool_idx for req in requests] == [None] * 3
    assert pool.mamba_pool.available_size() == 2
    assert pool.alloc(requests[:2]) == [0, 1]
    assert pool.alloc(requests[2:]) is None


def test_a_batch_has_states_where_the_model_keeps_some() -> None:
    pool = pool_of(3, 3)
    pool.alloc([Request(), Request()])
    states = StateBatch.running(pool, torch.tensor([1, 0]))
    assert states is not None
    assert states.slots.tolist() == [2, 1]
    assert states.track_slots is None
    assert StateBatch.running(ReqToTokenPool(3, 8, "cpu"), torch.tensor([1])) is None
