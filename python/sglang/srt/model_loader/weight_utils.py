"""Reading the tensors of checkpoint files, and what is wrong with the files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from pickle import UnpicklingError  # noqa: TID251 - the error alone; nothing is unpickled here
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from sglang.srt.model_loader.weight_files import REMEDY


class CheckpointTensor(NamedTuple):
    """One tensor of a checkpoint file, in the CPU's memory (a view of the mapped file)."""

    file: Path
    name: str
    tensor: torch.Tensor


def iterate_tensors(files: list[Path], load_format: str) -> Iterator[CheckpointTensor]:
    """Read every tensor of `files`, one at a time.

    Raises:
        ValueError: A file is torn or is not of its format; names the file and the tensor.
    """
    read = _read_pickled if load_format == "pt" else _read_safetensors
    for file in files:
        yield from read(file)


def _read_safetensors(file: Path) -> Iterator[CheckpointTensor]:
    name = "its header"
    try:
        with safe_open(str(file), framework="pt", device="cpu") as opened:
            for key in opened.keys():  # noqa: SIM118 - not a dict
                name = f"tensor {key!r}"
                yield CheckpointTensor(file, key, opened.get_tensor(key))
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"{file} is torn or not safetensors, at {name} ({error}): {REMEDY}"
        ) from error


def _read_pickled(file: Path) -> Iterator[CheckpointTensor]:
    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
    except (UnpicklingError, RuntimeError, OSError, EOFError, ValueError, KeyError) as error:
        cause = " ".join(str(error).split())[:200]
        raise ValueError(
            f"{file} is torn or not a plain pickled state dict ({cause}): {REMEDY}"
        ) from error
    if not isinstance(state, dict):
        raise ValueError(f"{file} holds a {type(state).__name__}, not a state dict: {REMEDY}")
    for name, tensor in state.items():
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"{file}: entry {name!r} is not a tensor: use a plain state dict")
        yield CheckpointTensor(file, str(name), tensor)
