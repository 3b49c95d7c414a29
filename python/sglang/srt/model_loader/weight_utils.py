"""Reading checkpoint files: which there are, their tensors, what is wrong with them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from pickle import UnpicklingError  # noqa: TID251 - the error alone; nothing is unpickled here
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open

SAFETENSORS_INDEX = "model.safetensors.index.json"
PICKLE_INDEX = "pytorch_model.bin.index.json"
_REMEDY = "copy the file again"


class CheckpointTensor(NamedTuple):
    """One tensor of a checkpoint file, in the CPU's memory (a view of the mapped file)."""

    file: Path
    name: str
    tensor: torch.Tensor


def weight_files(directory: Path, load_format: str) -> list[Path]:
    """The files that hold a checkpoint's weights, sorted by name.

    Args:
        load_format: "auto" or "safetensors"; "pt" for pickled files, read only when asked for.

    Raises:
        ValueError: There are none, a shard that the index names is missing, or the weights are
            pickled and `load_format` is not "pt".
    """
    if load_format == "pt":
        files = _indexed_files(directory, PICKLE_INDEX) or _glob(
            directory, ("pytorch_model*.bin", "*.pt", "*.pth")
        )
        if not files:
            raise ValueError(f"{directory} has no *.bin, *.pt or *.pth files to load as 'pt'")
        return files
    files = _indexed_files(directory, SAFETENSORS_INDEX) or _glob(directory, ("*.safetensors",))
    if files:
        return files
    if _glob(directory, ("*.bin", "*.pt", "*.pth")):
        raise ValueError(
            f"{directory} has pickled weights only (*.bin, *.pt), which are refused because "
            "unpickling can run code: convert them to safetensors, or ask for --load-format pt"
        )
    raise ValueError(
        f"{directory} has no *.safetensors files: the weights are missing, copy them there "
        "(or use --load-format dummy for random weights)"
    )


def iterate_tensors(files: list[Path], load_format: str) -> Iterator[CheckpointTensor]:
    """Read every tensor of `files`, one at a time.

    Raises:
        ValueError: A file is torn or is not of its format; names the file and the tensor.
    """
    read = _read_pickled if load_format == "pt" else _read_safetensors
    for file in files:
        yield from read(file)


def _glob(directory: Path, patterns: tuple[str, ...]) -> list[Path]:
    # Some checkpoints carry the same weights a second time under this name.
    found = {path for pattern in patterns for path in directory.glob(pattern)}
    return sorted(path for path in found if not path.name.startswith("consolidated"))


def _indexed_files(directory: Path, index_name: str) -> list[Path]:
    index = directory / index_name
    if not index.is_file():
        return []
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        # An index is data: it may only name files beside itself.
        files = [directory / Path(name).name for name in names]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index} is not a valid index ({error}): {_REMEDY}") from error
    for file in files:
        if not file.is_file():
            raise ValueError(f"{file} is missing though {index_name} names it: {_REMEDY}")
    return files


def _read_safetensors(file: Path) -> Iterator[CheckpointTensor]:
    name = "its header"
    try:
        with safe_open(str(file), framework="pt", device="cpu") as opened:
            for key in opened.keys():  # noqa: SIM118 - not a dict
                name = f"tensor {key!r}"
                yield CheckpointTensor(file, key, opened.get_tensor(key))
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"{file} is torn or not safetensors, at {name} ({error}): {_REMEDY}"
        ) from error


def _read_pickled(file: Path) -> Iterator[CheckpointTensor]:
    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
    except (UnpicklingError, RuntimeError, OSError, EOFError, ValueError, KeyError) as error:
        cause = " ".join(str(error).split())[:200]
        raise ValueError(
            f"{file} is torn or not a plain pickled state dict ({cause}): {_REMEDY}"
        ) from error
    if not isinstance(state, dict):
        raise ValueError(f"{file} holds a {type(state).__name__}, not a state dict: {_REMEDY}")
    for name, tensor in state.items():
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"{file}: entry {name!r} is not a tensor: use a plain state dict")
        yield CheckpointTensor(file, str(name), tensor)
