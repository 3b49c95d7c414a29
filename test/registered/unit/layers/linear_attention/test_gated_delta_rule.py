"""The delta rule in chunks and step by step equals its definition, with a decay for each head and
with one for each key channel."""

from __future__ import annotations

import pytest
import torch

from sglang.srt.layers.linear_attention.extend_plan import ExtendPlan
from sglang.srt.layers.linear_attention.gated_delta_rule import DeltaRuleInputs, TorchDeltaRule
from sglang.srt.layers.linear_attention.kimi_delta_rule import KimiDeltaRule
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=4, suite="base-a-test-cpu")

KEY_HEADS, HEADS, KEY_DIM, VALUE_DIM = 2, 4, 8, 6


pytestmark = pytest.mark.parametrize("rule", [TorchDeltaRule(), KimiDeltaRule()])


def random_inputs(rule: TorchDeltaRule, num_tokens: int, seed: int) -> DeltaRuleInputs:
    decays = (HEADS, KEY_DIM) if isinstance(rule, KimiDeltaRule) else (HEADS,)
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(num_tokens, *shape, generator=generator)

    return DeltaRuleInputs(
        normal(KEY_HEADS, KEY_DIM),
        normal(KEY_HEADS, KEY_DIM),
        normal(HEADS, VALUE_DIM),
        -normal(*decays).abs() * 0.3,
        normal(HEADS).sigmoid(),
    )


def random_states(count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(count)
    return torch.randn(count, HEADS, KEY_DIM, VALUE_DIM, generator=generator)


def part_of(inputs: DeltaRuleInputs, begin: int, end: int) -> DeltaRuleInputs:
    return DeltaRuleInputs(*(tensor[begin:end] for tensor in inputs))


def by_definition(
    inputs: DeltaRuleInputs, state: torch.Tensor
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Outputs of one request, and its state after each token; in fp64, head by head."""
    q, k, v, g, beta = (tensor.double() for tensor in inputs)
    state = state.double()
    outputs, states = torch.zeros(v.shape, dtype=torch.float64), []
    for t in range(len(v)):
        state = state.clone()
        for head in range(HEADS):
            own = head * q.shape[1] // HEADS
            key = k[t, own] / (k[t, own].square().sum() + 1e-6).sqrt()
            query = q[t, own] / (q[t, own].square().sum() + 1e-6).sqrt() / KEY_DIM**0.5
            decayed = state[head] * g[t, head].exp().reshape(-1, 1)
            error = beta[t, head] * (v[t, head] - key @ decayed)
            state[head] = decayed + torch.outer(key, error)
            outputs[t, head] = query @ state[head]
        states.append(state)
    return outputs.float(), [one.float() for one in states]


def assert_close(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("lens", [[1], [64], [65, 3], [7, 200, 64, 1, 130]])
def test_chunks_of_a_batch_equal_the_definition(rule: TorchDeltaRule, lens: list[int]) -> None:
    inputs, states = random_inputs(rule, sum(lens), 1), random_states(len(lens))
    plan = ExtendPlan.of(lens, None, 4, "cpu")
    out, after, snapshots = rule.extend(inputs, states, plan, torch.float32)
    assert snapshots.shape == (0, HEADS, KEY_DIM, VALUE_DIM)
    begin = 0
    for request, length in enumerate(lens):
        part = part_of(inputs, begin, begin + length)
        want, each = by_definition(part, states[request])
        assert_close(out[begin : begin + length], want)
        assert_close(after[request], each[-1])
        begin += length


def test_snapshots_are_the_states_after_so_many_tokens(rule: TorchDeltaRule) -> None:
    lens, track = [70, 5, 150, 64], [64, 0, 97, 1]
    inputs, states = random_inputs(rule, sum(lens), 2), random_states(4)
    plan = ExtendPlan.of(lens, track, 4, "cpu")
    out, after, snapshots = rule.extend(inputs, states, plan, torch.float32)
    assert plan.tracked.tolist() == [0, 3, 2], "in the order of the rounds after which they are"
    begin = 0
    for request, length in enumerate(lens):
        want, each = by_definition(part_of(inputs, begin, begin + length), states[request])
        assert_close(out[begin : begin + length], want)
        assert_close(after[request], each[-1])
        if track[request]:
            place = plan.tracked.tolist().index(request)
            assert_close(snapshots[place], each[track[request] - 1])
        begin += length


def test_what_follows_a_snapshot_is_computed_from_what_is_kept_of_it(rule: TorchDeltaRule) -> None:
    inputs, states = random_inputs(rule, 100, 3), random_states(1)
    plan = ExtendPlan.of([100], [70], 4, "cpu")
    whole, after, snapshots = rule.extend(inputs, states, plan, torch.bfloat16)
    kept = snapshots.to(torch.bfloat16)
    assert torch.equal(kept.float(), snapshots)
    rest = ExtendPlan.of([30], None, 4, "cpu")
    out, last, _ = rule.extend(part_of(inputs, 70, 100), kept.float(), rest, torch.bfloat16)
    assert torch.equal(out, whole[70:])
    assert torch.equal(last, after)


def test_a_snapshot_has_the_bits_of_a_prefill_that_ends_there(rule: TorchDeltaRule) -> None:
    lens, track = [70, 5, 150], [64, 0, 128]
    inputs, states = random_inputs(rule, sum(lens), 2), random_states(3)
    plan = ExtendPlan.of(lens, track, 4, "cpu")
    *_, snapshots = rule.extend(inputs, states, plan, torch.float32)
    for place, (request, begin) in enumerate(((0, 0), (2, 75))):
        state = states[request : request + 1]
        for at in range(begin, begin + track[request], 64):
            part = part_of(inputs, at, at + 64)
            _, state, _ = rule.extend(
                part, state, ExtendPlan.of([64], None, 4, "cpu"), torch.float32
            )
        assert torch.equal(snapshots[place], state[0])


def test_extreme_decays_and_corrections_equal_the_definition(rule: TorchDeltaRule) -> None:
    """Exponents over a whole chunk are far below what fp32 holds."""
    inputs = random_inputs(rule, 64, 4)
    strong = inputs._replace(g=torch.full_like(inputs.g, -40.0), beta=torch.ones(64, HEADS))
    states = random_states(1)
    plan = ExtendPlan.of([64], None, 4, "cpu")
    out, after, _ = rule.extend(strong, states, plan, torch.float32)
    want, each = by_definition(strong, states[0])
    assert_close(out, want)
    assert_close(after[0], each[-1])


def test_decays_far_apart_equal_the_definition(rule: TorchDeltaRule) -> None:
    """Some heads or channels lose all in a token, others nothing in a chunk."""
    inputs, states = random_inputs(rule, 150, 5), random_states(1)
    spread = torch.logspace(-4, 2.5, inputs.g[0].numel()).view_as(inputs.g[0])
    inputs = inputs._replace(g=inputs.g * spread)
    plan = ExtendPlan.of([150], None, 4, "cpu")
    out, after, _ = rule.extend(inputs, states, plan, torch.float32)
    want, each = by_definition(inputs, states[0])
    assert_close(out, want)
    assert_close(after[0], each[-1])


def test_steps_of_decoding_equal_the_definition(rule: TorchDeltaRule) -> None:
    states = random_states(3)
    inputs = [random_inputs(rule, 3, seed) for seed in range(5, 9)]
    state, outs = states.clone(), []
    for one in inputs:
        out, state = rule.decode(one, state)
        outs.append(out)
    for request in range(3):
        columns = zip(*inputs, strict=True)
        own = DeltaRuleInputs(*(torch.stack([c[request] for c in column]) for column in columns))
        want, each = by_definition(own, states[request])
        assert_close(torch.stack([out[request] for out in outs]), want)
        assert_close(state[request], each[-1])
