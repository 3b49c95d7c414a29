"""GPTQ: rounding of a weight's columns that makes up for the errors of earlier ones.

Source: Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained
Transformers", 2023. The moments are those of the plain model, for all layers at once; the scales
are chosen before any column is rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoModelForCausalLM

Floats: TypeAlias = npt.NDArray[np.float32]
Moments: TypeAlias = Mapping[str, Floats]
"""The second moments `[inputs, inputs]` of the inputs of layers, by the names of their weights."""

NO_MOMENTS: Final[Moments] = MappingProxyType({})
_DAMPING: Final = 0.003
"""Share of the mean second moment that is added to each, for a stable inverse."""
_COLUMNS: Final = 128
"""Columns that are rounded before those after them are corrected."""


def input_moments(path: Path, batches: Sequence[torch.Tensor]) -> Moments:
    """Run the model at `path` in fp32, and take the second moments of its linear layers' inputs.

    Args:
        batches: Token ids `[texts, tokens]`.
    """
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    sums: dict[str, torch.Tensor] = {}

    def note(name: str, layer: torch.nn.Linear, inputs: tuple[torch.Tensor, ...]) -> None:
        rows = inputs[0].flatten(0, -2)
        sums[name] = rows.T @ rows + sums.get(name, 0)

    for name, layer in model.named_modules():
        if isinstance(layer, torch.nn.Linear):
            layer.register_forward_pre_hook(partial(note, f"{name}.weight"))
    with torch.no_grad():
        for ids in batches:
            model(ids)
    count = sum(ids.numel() for ids in batches)
    return {name: (found / count).numpy() for name, found in sums.items()}


def compensated(
    weight: Floats, moments: Floats, nearest: Callable[[Floats, int], Floats]
) -> Floats:
    """GPTQ: round the columns of a weight `[outputs, inputs]` one after another, the input of the
    largest second moment first. The columns left compensate the error of each rounded column.

    Args:
        moments: Second moments of the inputs.
        nearest: The values nearest to a column, given its index.
    """
    order = np.argsort(-moments.diagonal())
    damped = moments[np.ix_(order, order)].astype(np.float64)
    damped += _DAMPING * damped.diagonal().mean() * np.eye(len(order))
    # The upper factor of the inverse.
    factor = np.linalg.cholesky(np.linalg.inv(damped)).T.astype(np.float32)
    left = weight.T[order]
    for begin in range(0, len(left), _COLUMNS):
        end = min(begin + _COLUMNS, len(left))
        off = np.empty_like(left[begin:end])
        for place in range(begin, end):
            values = nearest(left[place], order[place])
            off[place - begin] = (left[place] - values) / factor[place, place]
            left[place + 1 : end] -= np.outer(factor[place, place + 1 : end], off[place - begin])
            left[place] = values
        left[end:] -= factor[begin:end, end:].T @ off
    return left[np.argsort(order)].T
