"""The rule of Mamba-2 in chunks and step by step equals its definition."""

from __future__ import annotations

import pytest
import torch

from sglang.srt.layers.linear_attention.extend_plan import ExtendPlan
from sglang.srt.layers.linear_attention.state_space import StateSpaceInputs, TorchStateSpace
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=2, suite="base-a-test-cpu")

GROUPS, HEADS, HEAD_DIM, STATE, CHUNK = 2, 4, 6, 5, 16


def random_inputs(num_tokens: int, seed: int) -> StateSpaceInputs:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(num_tokens, *shape, generator=generator)

    dt = normal(HEADS).abs() * 0.3
    return StateSpaceInputs(
        normal(HEADS, HEAD_DIM), normal(GROUPS, STATE), normal(GROUPS, STATE), dt, -dt * 0.7
    )


def random_states(count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(count)
    return torch.randn(count, HEADS, HEAD_DIM, STATE, generator=generator)


def part_of(inputs: StateSpaceInputs, begin: int, end: int) -> StateSpaceInputs:
    return StateSpaceInputs(*(tensor[begin:end] for tensor in inputs))


def plan_of(lens: list[int], track: list[int] | None = None, chunk: int = CHUNK) -> ExtendPlan:
    return ExtendPlan.of(lens, track, 4, "cpu", chunk)


def by_definition(
    inputs: StateSpaceInputs, state: torch.Tensor
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Outputs of one request, and its state after each token; in fp64, head by head."""
    x, b, c, dt, g = (tensor.double() for tensor in inputs)
    state = state.double()
    outputs, states = torch.zeros(x.shape, dtype=torch.float64), []
    for t in range(len(x)):
        state = state.clone()
        for head in range(HEADS):
            group = head // (HEADS // GROUPS)
            change = dt[t, head] * torch.outer(x[t, head], b[t, group])
            state[head] = state[head] * g[t, head].exp() + change
            outputs[t, head] = state[head] @ c[t, group]
        states.append(state)
    return outputs.float(), [one.float() for one in states]


def assert_close(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("chunk", [CHUNK, 64])
def test_chunks_of_a_batch_with_snapshots(chunk: int) -> None:
    lens, track = [7, 70, 1, 64, 33], [0, 48, 0, 64, 1]
    inputs, states = random_inputs(sum(lens), 1), random_states(len(lens))
    plan = plan_of(lens, track, chunk)
    out, after, snapshots = TorchStateSpace().extend(inputs, states, plan, torch.float32)
    begin = 0
    for request, length in enumerate(lens):
        part = part_of(inputs, begin, begin + length)
        want, each = by_definition(part, states[request])
        assert_close(out[begin : begin + length], want)
        assert_close(after[request], each[-1])
        if track[request]:
            place = plan.tracked.tolist().index(request)
            assert_close(snapshots[place], each[track[request] - 1])
        begin += length
    assert len(snapshots) == 3


def test_what_follows_a_snapshot_is_computed_from_what_is_kept_of_it() -> None:
    inputs, states = random_inputs(100, 3), random_states(1)
    whole, after, snapshots = TorchStateSpace().extend(
        inputs, states, plan_of([100], [70]), torch.float16
    )
    kept = snapshots.half().float()
    assert torch.equal(kept, snapshots)
    out, last, _ = TorchStateSpace().extend(
        part_of(inputs, 70, 100), kept, plan_of([30]), torch.float16
    )
    assert torch.equal(out, whole[70:])
    assert torch.equal(last, after)


def test_states_do_not_depend_on_the_cuts_of_a_prefill_at_whole_chunks() -> None:
    """Bit for bit, beside other requests too."""
    inputs, state, rule = random_inputs(96, 4), random_states(1), TorchStateSpace()
    _, want, _ = rule.extend(inputs, state, plan_of([96]), torch.float32)
    for cuts in ([16, 80], [64, 32], [48, 16, 32]):
        got, begin = state, 0
        for count in cuts:
            own = part_of(inputs, begin, begin + count)
            both = StateSpaceInputs(*map(torch.cat, zip(own, random_inputs(40, 5), strict=True)))
            states = torch.cat([got, random_states(1)])
            _, after, _ = rule.extend(both, states, plan_of([count, 40]), torch.float32)
            got, begin = after[:1], begin + count
        assert torch.equal(got, want)


def test_a_decay_to_nothing() -> None:
    """Exponents over a whole chunk are far below what fp32 holds."""
    inputs = random_inputs(40, 6)
    strong = inputs._replace(g=torch.full((40, HEADS), -40.0))
    states = random_states(1)
    out, after, _ = TorchStateSpace().extend(strong, states, plan_of([40]), torch.float32)
    want, each = by_definition(strong, states[0])
    assert_close(out, want)
    assert_close(after[0], each[-1])


def test_steps_of_decoding() -> None:
    states, inputs = random_states(3), [random_inputs(3, seed) for seed in range(5, 9)]
    state = states.clone()
    outs = [TorchStateSpace().decode(one, state) for one in inputs]
    for request in range(3):
        columns = zip(*inputs, strict=True)
        own = StateSpaceInputs(*(torch.stack([c[request] for c in column]) for column in columns))
        want, each = by_definition(own, states[request])
        assert_close(torch.stack([out[request] for out in outs]), want)
        assert_close(state[request], each[-1])
