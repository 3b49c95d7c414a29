"""Finds the weight files of a checkpoint by names and indices. Needs no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from sglang.srt.utils.lfs_pointer import refuse_lfs_pointer

SAFETENSORS_INDEX: Final = "model.safetensors.index.json"
PICKLE_INDEX: Final = "pytorch_model.bin.index.json"
REMEDY: Final = "copy the file again"


def weight_files(directory: Path, load_format: str) -> list[Path]:
    """The files that hold a checkpoint's weights, sorted by name.

    Args:
        load_format: "auto", "safetensors", or "pt" for pickled files, which must be asked for.

    Raises:
        ValueError: There are no weight files; a shard that the index names is missing or a git-lfs
            pointer; or the weights are pickled and `load_format` is not "pt".
    """
    files = _find(directory, load_format)
    for file in files:
        refuse_lfs_pointer(file)
    return files


def _find(directory: Path, load_format: str) -> list[Path]:
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


def _glob(directory: Path, patterns: tuple[str, ...]) -> list[Path]:
    # Some checkpoints have the same weights a second time under this name.
    found = {path for pattern in patterns for path in directory.glob(pattern)}
    return sorted(path for path in found if not path.name.startswith("consolidated"))


def _indexed_files(directory: Path, index_name: str) -> list[Path]:
    index = directory / index_name
    if not index.is_file():
        return []
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        # An index is untrusted data: it may only name files in its own directory.
        files = [directory / Path(name).name for name in names]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index} is not a valid index ({error}): {REMEDY}") from error
    for file in files:
        if not file.is_file():
            raise ValueError(f"{file} is missing though {index_name} names it: {REMEDY}")
    return files
