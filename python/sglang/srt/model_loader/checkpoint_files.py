"""Loads weights from the files of a checkpoint, with errors that name the file; identifies them.

The identity may be needed long after loading, when the files may contain other weights. So their
names, sizes, times and inodes are recorded before they are read.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from pickle import UnpicklingError  # noqa: TID251 - the error alone; nothing is unpickled here
from typing import TypeAlias

import torch
from safetensors import SafetensorError, safe_open

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.model_loader.weight_files import (
    REMEDY,
    config_file,
    weight_files,
    weights_identity,
)
from sglang.srt.model_loader.weight_source import LoadConfig, WeightSlots

_Signature: TypeAlias = tuple[int, int, int]
"""Size, modification time in nanoseconds, inode."""


class CheckpointFiles:
    """config.json and the weight files of a checkpoint: see `WeightSource`.

    Safetensors files are mapped into memory, and only this rank's parts are read. The files of load
    format "pt" are pickled state dicts; each is in memory as a whole while it is read.
    """

    def __init__(self, model_config: ModelConfig, load_config: LoadConfig) -> None:
        """Raises ValueError: the files are missing, or the directory has other weights."""
        self.name = model_config.model_path
        self._format = load_config.load_format
        config = config_file(self.name)
        self._files = weight_files(Path(self.name), self._format)
        self._noted = _signatures([config, *self._files])
        self._identity: str | None = None

    def fill(self, slots: WeightSlots) -> None:
        for file in self._files:
            if self._format == "pt":
                _fill_from_pickle(slots, file)
            else:
                _fill_from_safetensors(slots, file)

    def identity(self) -> str:
        """Identity of the loaded weights. The first call reads all files, unless their digests are
        cached. The result stays valid even if the files change later.

        Raises:
            ValueError: A file has changed since it was loaded; names the file and the remedy.
        """
        if self._identity is None:
            self._check_unchanged()
            identity = weights_identity(self.name, load_format=self._format)
            self._check_unchanged()  # a file may have changed while it was hashed
            self._identity = identity
        return self._identity

    def _check_unchanged(self) -> None:
        changes = self._changes()
        if changes:
            more = f" (and {len(changes) - 1} more)" if len(changes) > 1 else ""
            raise ValueError(
                f"{self.name}: {changes[0]}{more} since the weights were loaded, so the files no "
                "longer identify the weights in memory: restart this server"
            )

    def _changes(self) -> list[str]:
        present = _signatures(self._noted)
        changes = [
            f"{file.name} {'has changed' if file in present else 'is gone'}"
            for file, noted in self._noted.items()
            if present.get(file) != noted
        ]
        if changes:
            return changes
        try:
            listed = weight_files(Path(self.name), self._format)
        except ValueError:
            listed = []  # an index is damaged, or names a missing file
        changes = [f"{file.name} was added" for file in listed if file not in self._noted]
        return changes or ([] if listed == self._files else ["the index has changed"])


def _fill_from_pickle(slots: WeightSlots, file: Path) -> None:
    for name, tensor in _read_pickled(file).items():
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"{file}: entry {name!r} is not a tensor: use a plain state dict")
        slot = slots.take(str(name), tuple(tensor.shape), file)
        if slot is not None:
            slot.fill(tensor)


def _fill_from_safetensors(slots: WeightSlots, file: Path) -> None:
    name = "its header"
    try:
        with safe_open(str(file), framework="pt", device="cpu") as opened:
            for key in opened.keys():  # noqa: SIM118 - not a dict
                name = f"tensor {key!r}"
                whole = opened.get_slice(key)
                slot = slots.take(key, tuple(whole.get_shape()), file)
                if slot is not None:
                    slot.fill(whole if slot.is_split else opened.get_tensor(key))
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"{file} is torn or not safetensors, at {name} ({error}): {REMEDY}"
        ) from error


def _read_pickled(file: Path) -> dict[object, object]:
    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
    except (UnpicklingError, RuntimeError, OSError, EOFError, ValueError, KeyError) as error:
        cause = " ".join(str(error).split())[:200]
        raise ValueError(
            f"{file} is torn or not a plain pickled state dict ({cause}): {REMEDY}"
        ) from error
    if not isinstance(state, dict):
        raise ValueError(f"{file} holds a {type(state).__name__}, not a state dict: {REMEDY}")
    return state


def _signatures(files: Iterable[Path]) -> dict[Path, _Signature]:
    """Signatures of the files that exist. Links are followed."""
    found = {}
    for file in files:
        try:
            stat = file.stat()
        except OSError:
            continue
        found[file] = (stat.st_size, stat.st_mtime_ns, stat.st_ino)
    return found
