"""A model's decoder layers one by one: what each makes of the inputs that another model's got."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch

from rigs.models.model_oracle import prompt
from rigs.models.tiny_models import StepDriver
from sglang.srt.layers.logits_processor import LogitsProcessorOutput


@dataclass(frozen=True, slots=True)
class LayerStep:
    """A layer's work in one step; sums are fp32 `[rows, hidden_size]`."""

    given: tuple[torch.Tensor | None, torch.Tensor]
    """Copies of the layer's inputs, `[num_tokens, hidden_size]` each: the addend that the residual
    stream still lacks, and the residual stream."""
    before: torch.Tensor
    """The residual stream before the layer, of the tokens that it returns."""
    after: torch.Tensor


def steps_of_every_size(driver: StepDriver) -> torch.Tensor:
    """Run prefills of many and of few tokens, and decode steps of three, two and one. The driver
    has run nothing.

    Returns:
        Logits of all steps, fp32 `[rows, vocab_size]` on the CPU.
    """
    long, middle, short = prompt(203, 3), prompt(90, 1), prompt(12, 2)
    steps: list[Callable[[], LogitsProcessorOutput]] = [
        partial(driver.extend, [(0, short[:5]), (1, middle[:37])]),
        partial(driver.extend, [(2, long[:200])]),
        partial(driver.extend, [(1, middle[37:86])]),
        *(
            partial(driver.decode, [(2, long[200 + i]), (1, middle[86 + i]), (0, short[5 + i])])
            for i in range(2)
        ),
        partial(driver.decode, [(1, middle[88]), (0, short[7])]),
        *(partial(driver.decode, [(0, token)]) for token in short[8:]),
    ]
    return torch.cat([step().next_token_logits.cpu().clone() for step in steps])


@contextmanager
def layers_recorded(
    driver: StepDriver, given: Sequence[LayerStep] | None = None
) -> Iterator[list[LayerStep]]:
    """Record the steps of the decoder layers inside, in order; no step may run as a graph.

    Args:
        given: Each layer gets this input in place of its own; None: its own.
    """
    found: list[LayerStep] = []
    model: Any = driver.runner.model
    with ExitStack() as stack:
        for layer in model.model.decoder_layers:
            run = layer.forward

            def recording(
                x: torch.Tensor | None,
                residual: torch.Tensor,
                step: Any,
                run: Any = run,
            ) -> Any:
                if given is not None:
                    x, residual = given[len(found)].given
                # The layer overwrites both.
                x, residual = None if x is None else x.clone(), residual.clone()
                got = None if x is None else x.clone(), residual.clone()
                before = _sum(*got)
                out, residual = run(x, residual, step)
                wanted = before if step.rows is None else before[step.rows]
                found.append(LayerStep(got, wanted, _sum(out, residual)))
                return out, residual

            stack.enter_context(mock.patch.object(layer, "forward", recording))
        yield found


def _sum(x: torch.Tensor | None, residual: torch.Tensor) -> torch.Tensor:
    return residual.float() if x is None else residual.float() + x.float()


def layer_errors(got: Sequence[LayerStep], want: Sequence[LayerStep]) -> torch.Tensor:
    """For each step and layer, how far it is from what it should add to the residual stream, as a
    part of that: the median over tokens, so that one that chooses another expert does not count."""
    errors = []
    for one, other in zip(got, want, strict=True):
        added = (other.after - other.before).norm(dim=-1)
        errors.append(((one.after - other.after).norm(dim=-1) / added).median())
    return torch.stack(errors).cpu()
