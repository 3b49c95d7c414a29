"""Experts that ranks share with tokens of several DP groups give what one rank with all gives."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from rigs.caches.memory_ranks import MemoryExchange, MemoryTensorGroup, PlaceInGroup
from rigs.layers.live_bytes import LiveBytes
from sglang.srt.layers.forward_batch_info import GroupStep
from sglang.srt.layers.moe import distributed_experts
from sglang.srt.layers.moe.distributed_experts import DistributedExperts
from sglang.srt.layers.moe.experts import RoutedExperts
from sglang.srt.layers.placement import ExpertRanks, TensorPlacement
from sglang.srt.layers.token_exchange import TokenExchange, exchange_bytes
from sglang.srt.layers.triton_ops.arguments import ClampedGate
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=2, suite="base-a-test-cpu")

HIDDEN, FEATURES, EXPERTS, TOP_K = 24, 16, 8, 3


def fill(layer: RoutedExperts) -> None:
    """Fill a layer with its part of the same weights."""
    for name, slot in layer.weight_slots():
        generator = torch.Generator().manual_seed(sum(map(ord, name)))
        slot.fill(torch.randn(slot.shape, generator=generator) * 0.3)


def experts(placement: TensorPlacement, has_bias: bool) -> RoutedExperts:
    make = RoutedExperts if placement.experts is None else DistributedExperts
    layer = make(
        EXPERTS,
        HIDDEN,
        FEATURES,
        placement=placement,
        has_bias=has_bias,
        activation=ClampedGate(limit=7.0, alpha=1.7, shift=1.0) if has_bias else "silu",
    )
    fill(layer)
    return layer


def tokens(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    numbers = torch.Generator().manual_seed(seed)
    x = torch.randn(count, HIDDEN, generator=numbers)
    weights, ids = torch.rand(count, EXPERTS, generator=numbers).topk(TOP_K)
    return x, weights, ids


def of_groups(
    counts: list[int],
    step: GroupStep | None,
    *,
    tp_size: int = 1,
    is_whole: bool,
    has_bias: bool = False,
    is_last: bool = False,
) -> list[torch.Tensor]:
    """The results of groups of `tp_size` ranks."""
    size = len(counts) * tp_size
    across = [MemoryExchange(len(counts)) for _ in range(tp_size)]

    def work(rank: int) -> torch.Tensor:
        dp_rank, tp_rank = divmod(rank, tp_size)
        exchange = TokenExchange(MemoryTensorGroup(across[tp_rank], dp_rank))
        ranks = ExpertRanks(group=PlaceInGroup(rank, size), is_whole=is_whole, exchange=exchange)
        layer = experts(TensorPlacement(dtype=torch.float32, device="cpu", experts=ranks), has_bias)
        assert isinstance(layer, DistributedExperts)
        layer.is_last = is_last
        exchange.begin(step)
        if not counts[dp_rank]:
            layer.run_idle(TOP_K)
            return torch.empty(0, HIDDEN)
        return layer.forward(*tokens(counts[dp_rank], dp_rank))

    with ThreadPoolExecutor(size) as pool:
        parts = list(pool.map(work, range(size)))
    return [sum(parts[first : first + tp_size]) for first in range(0, size, tp_size)]  # type: ignore[misc]


def check(counts: list[int], found: list[torch.Tensor], has_bias: bool = False) -> None:
    alone = experts(TensorPlacement(dtype=torch.float32, device="cpu"), has_bias)
    for dp_rank, count in enumerate(counts):
        want = alone.forward(*tokens(count, dp_rank))
        torch.testing.assert_close(found[dp_rank], want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("is_whole", [False, True])
@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("counts", [[3, 3], [1, 6], [0, 5], [4, 0, 1, 7], [0, 9, 1, 0]])
def test_groups_get_the_sums_of_their_tokens(
    counts: list[int], has_bias: bool, tp_size: int, is_whole: bool
) -> None:
    if len(counts) * tp_size > EXPERTS:
        pytest.skip("more ranks than experts")
    step = GroupStep(tuple(counts), (1,) * len(counts))
    found = of_groups(counts, step, tp_size=tp_size, is_whole=is_whole, has_bias=has_bias)
    check(counts, found, has_bias)


def test_the_last_layer_has_other_counts() -> None:
    counts = [2, 1]
    found = of_groups(counts, GroupStep((40, 1), (2, 1)), is_whole=True, is_last=True)
    check(counts, found)


def test_without_a_step_all_groups_have_as_many_tokens() -> None:
    found = of_groups([4, 4], None, is_whole=True)
    check([4, 4], found)


def test_many_tokens_are_computed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed_experts, "_MOST_TOKENS", 3)
    counts = [5, 2]
    check(counts, of_groups(counts, GroupStep((5, 2), (5, 2)), is_whole=False))


def test_ranks_with_the_same_tokens_add_their_own_experts() -> None:
    parts = []
    for rank in range(2):
        group = PlaceInGroup(rank, 2)
        ranks = ExpertRanks(group=group, is_whole=True, exchange=None)
        placement = TensorPlacement(dtype=torch.float32, device="cpu", experts=ranks)
        parts.append(experts(placement, has_bias=True).forward(*tokens(9, 0)))
    check([9], [parts[0] + parts[1]], has_bias=True)


def test_ids_of_any_dtype_and_weights_of_any_stride_are_sent() -> None:
    x, weights, ids = tokens(3, 0)
    exchange = TokenExchange(MemoryTensorGroup(MemoryExchange(1), 0))
    wide = torch.zeros(3, TOP_K + 1)
    wide[:, :TOP_K] = weights
    for dtype in (torch.int32, torch.int64):
        sent = exchange.dispatch(x.bfloat16(), wide[:, :TOP_K], ids.to(dtype), is_last=False)
        assert torch.equal(sent.x, x.bfloat16())
        assert torch.equal(sent.weights, weights)
        assert torch.equal(sent.ids, ids.int())


class GroupsAlone(PlaceInGroup):
    """The first of several groups, whose collectives take the memory of real ones."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return x.new_zeros(self.size, *x.shape)

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        return x.new_zeros(x.shape[1:])


@pytest.mark.parametrize(
    ("counts", "size", "least"),
    [
        # Few features: gathering takes most, because each use of an expert has 8 bytes.
        ((40, 40), 8, 1.0),
        ((40, 40, 40, 40), 8, 1.0),
        ((40, 39), 8, 0.98),
        # Many: scattering takes most, if groups are unequal and padded.
        ((40, 39), 256, 0.98),
        ((40, 40, 40, 39), 256, 0.98),
        ((40, 40), 256, 0.75),
        ((40, 1), 256, 0.0),
        ((40, 1, 1, 1), 256, 0.0),
    ],
)
def test_an_exchange_takes_the_memory_that_is_set_aside(
    counts: tuple[int, ...], size: int, least: float
) -> None:
    exchange = TokenExchange(GroupsAlone(0, len(counts)))
    exchange.begin(GroupStep(counts, counts))
    x = torch.zeros(counts[0], size, dtype=torch.bfloat16)
    weights, ids = torch.zeros(counts[0], TOP_K), torch.zeros(counts[0], TOP_K, dtype=torch.int64)
    with LiveBytes() as live:
        sent = exchange.dispatch(x, weights, ids, is_last=False)
        out = torch.zeros_like(sent.x)
        del sent
        exchange.combine(out, len(x), is_last=False)
    set_aside = max(counts) * exchange_bytes(len(counts), size, TOP_K, torch.bfloat16)
    assert least * set_aside <= live.most <= set_aside


def test_other_layers_exchange_nothing() -> None:
    group = PlaceInGroup(0, 2)
    of_groups = exchange_bytes(2, HIDDEN, TOP_K, torch.float32)
    for exchange, want in ((None, 0), (TokenExchange(group), of_groups)):
        ranks = ExpertRanks(group=group, is_whole=True, exchange=exchange)
        placement = TensorPlacement(dtype=torch.float32, device="cpu", experts=ranks)
        layer = experts(placement, has_bias=False)
        assert isinstance(layer, DistributedExperts)
        assert layer.exchange_bytes(TOP_K) == want
