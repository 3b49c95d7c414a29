"""Checkpoints with one wrong field of config.json, or one wrong tensor. A server reads them, or
refuses them in a line that names the mistake."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from safetensors.torch import load_file, save_file

from rigs.models.scaled_products import scaled_products
from sglang.planning.model_costs import config_of_files, costs_of_rank, kept_formats, parameters_of
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.model_loader.loader import get_model
from sglang.srt.model_loader.weight_source import LoadConfig

_VALUES: Final[tuple[Any, ...]] = (
    None, True, [], {}, "", "x", "a" * 300, -1, 0, 1, 3, 0.5, 1e300, float("nan"), float("inf"),
    2**31, 2**40, 2**63 - 1, 2**63, 10**30, -(2**70), [1], [None], ["x"], {"a": 1}, [2**70],
    json.loads("[" * 20 + "]" * 20), json.loads("[" * 40 + "]" * 40),
)  # fmt: skip
"""Values of fields."""
_DTYPES: Final = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn,
    torch.float8_e5m2, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
    torch.complex64,
)  # fmt: skip
_TENSORS: Final = (
    "layers.0.mlp.down_proj", "layers.0.self_attn.q_proj", "model.norm", "embed_tokens", "lm_head",
)  # fmt: skip
"""Parts of the names of the tensors that are changed."""


class Malformed(NamedTuple):
    """A checkpoint with one thing wrong.

    Attributes:
        what: The field or the tensor, and its value.
        names: A refusal must have one of these words, in lower case; empty: any refusal will do.
        path: The checkpoint, until the next one is made.
    """

    what: str
    names: tuple[str, ...]
    path: Path


def malformed_configs(path: Path, *, seed: int, share: float) -> Iterator[Malformed]:
    """`path` with each field of config.json changed in many ways.

    Args:
        share: Share of all changes, which the seed chooses.
    """
    generator = random.Random(seed)
    file = path / "config.json"
    text = file.read_text()
    for place in _places(json.loads(text)):
        for value in _VALUES:
            if generator.random() >= share or place[0] == "vision_config":
                continue
            config = json.loads(text)
            inner = config
            for key in place[:-1]:
                inner = inner[key]
            inner[place[-1]] = value
            file.write_text(json.dumps(config))
            yield Malformed(f"{place} = {str(value)[:40]}", (), path)
    file.write_text(text)


def _places(values: dict[str, Any], before: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in values.items():
        yield (*before, key)
        if isinstance(value, dict):
            yield from _places(value, (*before, key))


def malformed_tensors(path: Path, *, seed: int, share: float) -> Iterator[Malformed]:
    """`path`, which has one file of weights, with tensors of some layers changed in many ways.

    Args:
        share: See `malformed_configs`.
    """
    generator = random.Random(seed)
    (file,) = path.glob("*.safetensors")
    # The file itself is mapped, and is written again.
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    for name in sorted(tensors):
        if not any(part in name for part in _TENSORS):
            continue
        for what, changed in _changes(tensors[name]).items():
            if generator.random() >= share:
                continue
            others = {key: one for key, one in tensors.items() if key != name}
            save_file(others if changed is None else {**others, name: changed}, file)
            layer = name.rpartition(".")[0].lower()
            yield Malformed(f"{name}: {what}", (layer,), path)
    save_file(tensors, file)


def _changes(tensor: torch.Tensor) -> dict[str, torch.Tensor | None]:
    """The tensor in other shapes, dtypes and with other values; None: it is missing."""
    found: dict[str, torch.Tensor | None] = {
        "missing": None,
        "scalar": torch.zeros((), dtype=tensor.dtype),
        "flat": tensor.flatten(),
        "five": torch.zeros(5, dtype=tensor.dtype),
        "empty": torch.zeros(0, dtype=tensor.dtype),
        "empty matrix": torch.zeros((0, 4), dtype=tensor.dtype),
        "a dimension before": tensor.unsqueeze(0),
        "a dimension behind": tensor.unsqueeze(-1),
        "transposed": tensor.t().contiguous() if tensor.dim() == 2 else tensor,
        **{str(dtype): tensor.to(dtype) for dtype in _DTYPES},
    }
    if tensor.dtype.is_floating_point and tensor.numel():
        for value in (float("nan"), float("inf"), 0.0, -1.0):
            spoilt = tensor.to(torch.float32).flatten().clone()
            spoilt[-1] = value
            found[str(value)] = spoilt.view(tensor.shape).to(tensor.dtype)
    return found


def refusal_of(path: Path, *, loads: bool) -> str | None:
    """Read a checkpoint as a server and `sglang.hicache_plan` do. Returns the error; None: there is
    none. Any other error than a ValueError is raised.

    Args:
        loads: Load the weights too: dequantized, and as a GPU keeps them.
    """
    found = []
    for is_kept in (False, True) if loads else (False,):
        try:
            _read(path, is_kept=is_kept, loads=loads)
        except ValueError as error:
            found.append(str(error))
    return found[0] if found else None


def _read(path: Path, *, is_kept: bool, loads: bool) -> None:
    config = ModelConfig.from_path(str(path), dtype="bfloat16" if is_kept else "auto")
    if loads:
        with scaled_products() if is_kept else contextlib.nullcontext():
            get_model(config, LoadConfig(show_progress=False))
        config = config_of_files(config)
    costs_of_rank(config, config.dtype, tp_size=1, formats=kept_formats(config))
    parameters_of(config)


def assert_told(malformed: Malformed, *, loads: bool) -> bool:
    """Check that a checkpoint is read, or refused in one line that names what is wrong. True if it
    is refused."""
    refusal = refusal_of(malformed.path, loads=loads)
    if refusal is None:
        return False
    assert "\n" not in refusal and len(refusal) < 2000, (malformed.what, refusal)
    if malformed.names:
        assert any(name in refusal.lower() for name in malformed.names), (malformed.what, refusal)
    return True
