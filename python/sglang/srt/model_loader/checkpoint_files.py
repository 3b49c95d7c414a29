"""Loads weights from the files of a checkpoint, with errors that name the file."""

from __future__ import annotations

from pathlib import Path
from pickle import UnpicklingError  # noqa: TID251 - the error alone; nothing is unpickled here

import torch
from safetensors import SafetensorError, safe_open

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.model_loader.load_config import LoadConfig
from sglang.srt.model_loader.loaded_files import LoadedFiles
from sglang.srt.model_loader.weight_files import REMEDY
from sglang.srt.model_loader.weight_source import WeightSlots


class CheckpointFiles:
    """The weight files of a checkpoint: see `WeightSource`.

    Safetensors files are mapped into memory, and only this rank's parts are read. The files of load
    format "pt" are pickled state dicts; each is in memory as a whole while it is read.
    """

    def __init__(self, model_config: ModelConfig, load_config: LoadConfig) -> None:
        """Raises ValueError: the files are missing, or the directory has other weights."""
        self.name = model_config.model_path
        self._fill = _fill_from_safetensors
        if load_config.load_format == "pt":
            self._fill = _fill_from_pickle
        self._files = LoadedFiles(self.name, load_config.load_format)
        self.identity = self._files.identity

    def fill(self, slots: WeightSlots) -> None:
        for file in self._files.weights:
            self._fill(slots, file)


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
