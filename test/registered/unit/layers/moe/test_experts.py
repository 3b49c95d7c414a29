"""Routed experts: each way to compute them against a sum by hand, and their weights' places."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from transformers.models.gpt_oss.configuration_gpt_oss import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from rigs.caches.memory_ranks import PlaceInGroup
from sglang.srt.layers.moe.experts import RoutedExperts
from sglang.srt.layers.placement import TensorPlacement, WeightSlot
from sglang.srt.layers.triton_ops.arguments import ClampedGate
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="base-a-test-cpu")

EXPERTS, HIDDEN, SIZE, TOP_K = 6, 16, 24, 3


def numbers(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def checkpoint() -> dict[str, torch.Tensor]:
    """Tensors of six experts, by the names that Qwen3-MoE and DeepSeek give them."""
    made: dict[str, torch.Tensor] = {}
    for expert in range(EXPERTS):
        for name, shape in (
            ("gate_proj", (SIZE, HIDDEN)),
            ("up_proj", (SIZE, HIDDEN)),
            ("down_proj", (HIDDEN, SIZE)),
        ):
            seed = numbers(10 * expert + len(made))
            made[f"mlp.experts.{expert}.{name}.weight"] = torch.randn(shape, generator=seed) * 0.3
    return made


def experts(
    weights: dict[str, torch.Tensor],
    dtype: torch.dtype = torch.float32,
    rank: int = 0,
    size: int = 1,
) -> RoutedExperts:
    placement = TensorPlacement(
        dtype=dtype, device="cpu", tp_group=PlaceInGroup(rank, size), prefix="mlp.experts"
    )
    layer = RoutedExperts(EXPERTS, HIDDEN, SIZE, placement=placement)
    for name, slot in layer.weight_slots():
        assert slot.shape == tuple(weights[name].shape)
        slot.fill(weights[name])
    return layer


def work(num_tokens: int, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = torch.randn(num_tokens, HIDDEN, generator=numbers(seed))
    scores = torch.rand(num_tokens, EXPERTS, generator=numbers(seed + 1))
    weights, ids = scores.topk(TOP_K, dim=-1)
    return x, weights, ids


def by_hand(
    tensors: dict[str, torch.Tensor], x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    """fp64 `[tokens, hidden]`."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for token in range(len(x)):
        for weight, expert in zip(weights[token].tolist(), ids[token].tolist(), strict=True):
            gate, up, down = (
                tensors[f"mlp.experts.{expert}.{name}_proj.weight"].double()
                for name in ("gate", "up", "down")
            )
            row = x[token].double()
            out[token] += weight * (down @ (F.silu(gate @ row) * (up @ row)))
    return out


@pytest.mark.parametrize("way", ["_one_by_one", "_dense"])
@pytest.mark.parametrize("num_tokens", [0, 1, 2, 40])
def test_weighted_sum_of_the_chosen_experts(num_tokens: int, way: str) -> None:
    tensors, (x, weights, ids) = checkpoint(), work(num_tokens)
    got = getattr(experts(tensors), way)(x, weights, ids)
    assert got.dtype == torch.float32
    want = by_hand(tensors, x, weights, ids)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("way", ["_one_by_one", "_dense"])
def test_bf16_errs_as_little_as_its_roundings(way: str) -> None:
    tensors = {name: tensor.bfloat16() for name, tensor in checkpoint().items()}
    x, weights, ids = work(70)
    x = x.bfloat16()
    got = getattr(experts(tensors, torch.bfloat16), way)(x, weights, ids)
    assert got.dtype == torch.bfloat16
    want = by_hand(tensors, x, weights, ids)
    # Rounded on the way: gate, its activation, up, their product, down, weighted, summed.
    unit = torch.finfo(torch.bfloat16).eps / 2
    assert (got.double() - want).norm() < 7 * unit * want.norm()


def test_a_token_does_not_depend_on_its_neighbours() -> None:
    layer, (x, weights, ids) = experts(checkpoint()), work(40)
    together = layer.forward(x, weights, ids)
    for token in (0, 17, 39):
        rows = slice(token, token + 1)
        alone = layer.forward(x[rows], weights[rows], ids[rows])
        torch.testing.assert_close(together[rows], alone, rtol=1e-5, atol=1e-6)


def test_experts_without_tokens_are_not_read() -> None:
    tensors, (x, _, _) = checkpoint(), work(4)
    layer = experts(tensors)
    for weight in layer.plain():
        weight[2:].fill_(float("nan"))
    weights, ids = torch.full((4, 2), 0.5), torch.tensor([[0, 1]] * 4)
    got = layer.forward(x, weights, ids)
    want = by_hand(tensors, x, weights, ids)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-6)


def test_weights_are_not_copied_for_few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, given = experts(checkpoint()), work(2)
    owners = {p.untyped_storage().data_ptr() for p in layer.parameters()}
    multiplied = []

    def noting(x: torch.Tensor, weight: torch.Tensor, *_: None, **__: torch.dtype) -> torch.Tensor:
        multiplied.append(weight.is_contiguous() and weight.untyped_storage().data_ptr() in owners)
        return F.linear(x, weight)

    monkeypatch.setattr("sglang.srt.layers.moe.experts.apply_linear", noting)
    layer.forward(*given)
    used = len(set(given[2].flatten().tolist()))
    assert multiplied == [True] * (2 * used)


def test_an_unused_expert_that_overflows_does_no_harm() -> None:
    layer, (x, _, _) = experts(checkpoint()), work(4)
    layer.plain()[1][2:].fill_(float("inf"))
    got = layer._dense(x, torch.full((4, 2), 0.5), torch.tensor([[0, 1]] * 4))
    assert got.isfinite().all()


@pytest.mark.parametrize("size", [2, 4])
def test_the_ranks_parts_add_up(size: int) -> None:
    tensors, (x, weights, ids) = checkpoint(), work(9)
    parts = [
        experts(tensors, rank=rank, size=size).forward(x, weights, ids) for rank in range(size)
    ]
    want = by_hand(tensors, x, weights, ids)
    torch.testing.assert_close(sum(parts).double(), want, rtol=1e-5, atol=1e-6)  # type: ignore[union-attr]


def stacked(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same tensors as checkpoints have them that stack experts: gates, then ups."""

    def all_of(name: str) -> torch.Tensor:
        return torch.stack([tensors[f"mlp.experts.{i}.{name}.weight"] for i in range(EXPERTS)])

    return {
        "mlp.experts.gate_up_proj": torch.cat([all_of("gate_proj"), all_of("up_proj")], dim=1),
        "mlp.experts.down_proj": all_of("down_proj"),
    }


@pytest.mark.parametrize(("rank", "size"), [(0, 1), (0, 2), (1, 2), (3, 4)])
def test_stacked_tensors_fill_the_same_weights(rank: int, size: int) -> None:
    tensors = checkpoint()
    want = experts(tensors, rank=rank, size=size)
    got = experts({name: torch.zeros_like(t) for name, t in tensors.items()}, rank=rank, size=size)
    whole = stacked(tensors)
    named = dict(got.stacked_slots())
    assert set(named) == set(whole)
    for name, slot in named.items():
        assert slot.shape == tuple(whole[name].shape)
        assert slot.is_split == (size > 1)
        slot.fill(whole[name])
    assert all(map(torch.equal, got.plain(), want.plain()))
    parts = [part for slot in named.values() for part in slot.parts]
    assert sorted(parts) == sorted(tensors)


def gpt_oss_experts() -> GptOssExperts:
    """transformers' experts with random weights and biases, whose gates and ups reach the limit."""
    config = GptOssConfig(
        num_local_experts=EXPERTS, hidden_size=HIDDEN, intermediate_size=SIZE,
        swiglu_limit=1.5, swiglu_alpha=1.3,
    )  # fmt: skip
    made = GptOssExperts(config).eval()
    for nth, parameter in enumerate(made.parameters()):
        parameter.requires_grad_(False).copy_(torch.randn(parameter.shape, generator=numbers(nth)))
    return made


def biased_experts(rank: int = 0, size: int = 1) -> RoutedExperts:
    group = PlaceInGroup(rank, size)
    return RoutedExperts(
        EXPERTS,
        HIDDEN,
        SIZE,
        placement=TensorPlacement(
            dtype=torch.float32, device="cpu", tp_group=group, prefix="mlp.experts"
        ),
        activation=ClampedGate(limit=1.5, alpha=1.3, shift=1.0),
        has_bias=True,
        has_alternating_stacks=True,
    )


def plain_stacks(layer: RoutedExperts) -> dict[str, WeightSlot]:
    """The slots of stacks, without those of quantized ones."""
    return {name: slot for name, slot in layer.stacked_slots() if not name.endswith("_blocks")}


@pytest.mark.parametrize("way", ["_one_by_one", "_dense"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_experts_with_biases_and_clamped_gates(size: int, way: str) -> None:
    """As transformers computes them, from its checkpoint; ranks add the last bias once."""
    oracle, (x, weights, ids) = gpt_oss_experts(), work(9)
    total = torch.zeros_like(x)
    for rank in range(size):
        layer, tensors = biased_experts(rank, size), dict(oracle.state_dict())
        slots = plain_stacks(layer)
        assert {f"mlp.experts.{name}" for name in tensors} == set(slots)
        for name, slot in slots.items():
            whole = tensors[name.removeprefix("mlp.experts.")]
            assert slot.shape == tuple(whole.shape)
            slot.fill(whole)
        parts = [part for slot in slots.values() for part in slot.parts]
        assert sorted(parts) == sorted(name for name, _ in layer.weight_slots())
        total += getattr(layer, way)(x, weights, ids)
    with torch.inference_mode():
        want = oracle(x, ids, weights)
    torch.testing.assert_close(total, want, rtol=1e-5, atol=1e-5)


def test_slots_of_single_experts_are_parts_of_the_stacks() -> None:
    """Servers exchange weights by the names of single experts."""
    layer, oracle = biased_experts(), gpt_oss_experts()
    for name, slot in plain_stacks(layer).items():
        slot.fill(oracle.state_dict()[name.removeprefix("mlp.experts.")])
    found = {name: slot.dest for name, slot in layer.weight_slots()}
    at = "mlp.experts.2"
    assert torch.equal(found[f"{at}.gate_proj.weight"], oracle.gate_up_proj[2, :, ::2].t())
    assert torch.equal(found[f"{at}.up_proj.weight"], oracle.gate_up_proj[2, :, 1::2].t())
    assert torch.equal(found[f"{at}.down_proj.weight"], oracle.down_proj[2].t())
    assert torch.equal(found[f"{at}.gate_proj.bias"], oracle.gate_up_proj_bias[2, ::2])
    assert torch.equal(found[f"{at}.up_proj.bias"], oracle.gate_up_proj_bias[2, 1::2])
    assert torch.equal(found[f"{at}.down_proj.bias"], oracle.down_proj_bias[2])


def test_ranks_that_do_not_divide_the_features_are_refused() -> None:
    with pytest.raises(ValueError, match="24 features of an expert cannot be split over 5"):
        experts({}, rank=0, size=5)
