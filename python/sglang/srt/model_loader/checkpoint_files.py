"""Loads weights from the files of a checkpoint, with errors that name the file; identifies them.

The identity may be needed long after loading, when the files may contain other weights. So their
names, sizes, times and inodes are recorded before they are read.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from pickle import UnpicklingError  # noqa: TID251 - the error alone; nothing is unpickled here
from typing import Any, Final, TypeAlias

import torch
from safetensors import SafetensorError, safe_open

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.configs.quantization_config import QuantizationConfig
from sglang.srt.layers.weight_format import FormatOf, WeightFormat
from sglang.srt.model_loader.quantized_weights import QuantizedNames, QuantizedWeight
from sglang.srt.model_loader.rounded_weights import format_of_rounded, is_rounded, rounded
from sglang.srt.model_loader.weight_files import (
    REMEDY,
    config_file,
    weight_files,
    weights_identity,
)
from sglang.srt.model_loader.weight_source import LoadConfig, WeightSlots

logger = logging.getLogger(__name__)

_PLAIN_DTYPES: Final = frozenset(("F64", "F32", "F16", "BF16"))
"""Dtypes of weights that are not quantized."""
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
        self._quantization = model_config.quantization
        self._has_draft_layer = model_config.has_draft_layer
        if self._format == "pt" and self._quantization is not None:
            raise ValueError(
                f"{self.name}: weights with a format ({self._quantization}) are read from "
                "safetensors files only: leave --load-format out"
            )
        config = config_file(self.name)
        self._files = weight_files(Path(self.name), self._format)
        self._noted = _signatures([config, *self._files])
        self._identity: str | None = None

    def formats(self) -> FormatOf:
        """See `WeightSource`. Reads the headers of the files."""
        found: dict[str, WeightFormat] = {}
        if self._quantization is not None:
            with ExitStack() as stack:
                found = _SafetensorsFiles(self._files, self._quantization, stack).formats()
        return found.get

    def fill(self, slots: WeightSlots) -> None:
        """See `WeightSource`."""
        if self._format == "pt":
            for file in self._files:
                _fill_from_pickle(slots, file)
            return
        with ExitStack() as stack:
            _SafetensorsFiles(self._files, self._quantization, stack).fill(slots)

    def identity(self) -> str:
        """Identity of the loaded weights. The first call reads all files, unless their digests are
        cached. The result stays valid even if the files change later.

        Raises:
            ValueError: A file has changed since it was loaded; names the file and the remedy.
        """
        if self._identity is None:
            self._check_unchanged()
            config = self._quantization
            rounding = str(config) if config is not None and config.is_at_load else ""
            identity = weights_identity(
                self.name,
                load_format=self._format,
                rounding=rounding,
                has_draft_layer=self._has_draft_layer,
            )
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


class _SafetensorsFiles:
    """All files of a checkpoint, mapped into memory until `stack` ends.

    The tensors of a quantized weight may be in different files.
    """

    def __init__(
        self, files: Iterable[Path], config: QuantizationConfig | None, stack: ExitStack
    ) -> None:
        self._config = config
        self._opened: dict[Path, Any] = {}
        for file in files:
            with _reading(file, "its header"):
                opened = safe_open(str(file), framework="pt", device="cpu")
                self._opened[file] = stack.enter_context(opened)
        # A name that two files have is refused when the second is read.
        self._file_of = {
            name: file
            for file, opened in self._opened.items()
            for name in opened.keys()  # noqa: SIM118 - not a dict
        }
        self._rounds = config is not None and config.is_at_load
        self._names = (
            None
            if config is None or config.is_at_load
            else QuantizedNames(self._file_of.keys(), config)
        )

    def formats(self) -> dict[str, WeightFormat]:
        """Formats of the quantized weights, by name."""
        assert self._config is not None
        if self._names is not None:
            weights = self._names.by_elements.values()
            return {weight.name: weight.format(self._config, self._dtype_of) for weight in weights}
        format_ = format_of_rounded(self._config, torch.float32)
        assert format_ is not None, "fp8"
        return {name: format_ for name in self._file_of if is_rounded(name)}

    def _dtype_of(self, name: str) -> str:
        file = self._file_of.get(name)
        if file is None:
            return "missing"  # an error when the weight is read
        with _reading(file, f"tensor {name!r}"):
            dtype: str = self._opened[file].get_slice(name).get_dtype()
        return dtype

    def fill(self, slots: WeightSlots) -> None:
        """See `WeightSource`."""
        for file, opened in self._opened.items():
            for name in opened.keys():  # noqa: SIM118 - not a dict
                with _reading(file, f"tensor {name!r}"):
                    self._fill(slots, file, name)

    def _fill(self, slots: WeightSlots, file: Path, name: str) -> None:
        opened = self._opened[file]
        stored = opened.get_slice(name)
        shape = tuple(stored.get_shape())
        if self._names is not None and self._config is not None:
            weight = self._names.by_elements.get(name)
            if weight is not None:
                self._fill_quantized(slots, file, weight, self._config)
                return
            if self._names.is_beside(name) or self._is_empty_bias(slots, opened, name):
                return
        slot = slots.take(name, shape, file)
        if slot is None:
            return
        dtype = stored.get_dtype()
        if dtype not in _PLAIN_DTYPES:
            raise ValueError(
                f"{file}: tensor {name!r} is {dtype} and has no scales: the weights and "
                "quantization_config in config.json are not of the same model"
            )
        if self._rounds and is_rounded(name):
            assert self._config is not None
            whole = opened.get_tensor(name).to(slot.dest.device)
            found = rounded(whole, self._config, slot.dest.dtype, torch.float32)
            slots.fill_quantized(name, slot, found)
            return
        slot.fill(stored if slot.is_split else opened.get_tensor(name))

    def _fill_quantized(
        self, slots: WeightSlots, file: Path, weight: QuantizedWeight, config: QuantizationConfig
    ) -> None:
        elements = _StoredTensor(self._opened[file], weight.elements)
        slot = slots.take(weight.name, weight.shape(elements.shape, config), file)
        if slot is None:
            return
        dtype, device = slot.dest.dtype, slot.dest.device
        try:
            opened = weight.open(elements, self._read, config, dtype, device)
            slots.fill_quantized(weight.name, slot, opened)
        except ValueError as error:
            raise ValueError(
                f"{file}: tensor {weight.elements!r}: {error}: the weights and quantization_config "
                "in config.json are not of the same model"
            ) from None

    def _is_empty_bias(self, slots: WeightSlots, opened: Any, name: str) -> bool:
        """True for a bias of zeros that the model does not have. GPTQ's tools write one for each
        quantized layer."""
        is_bias = (
            name.endswith(".bias") and f"{name.removesuffix('.bias')}.qweight" in self._file_of
        )
        return is_bias and not slots.has(name) and not opened.get_tensor(name).any()

    def _read(self, name: str) -> torch.Tensor:
        file = self._file_of.get(name)
        if file is None:
            raise ValueError(f"tensor {name!r} is missing")
        with _reading(file, f"tensor {name!r}"):
            tensor: torch.Tensor = self._opened[file].get_tensor(name)
        return tensor


class _StoredTensor:
    """A tensor of a safetensors file: a `RawTensor`."""

    def __init__(self, opened: Any, name: str) -> None:
        self._opened, self._name = opened, name
        self._slice = opened.get_slice(name)
        self.shape: tuple[int, ...] = tuple(self._slice.get_shape())

    def __getitem__(self, index: tuple[slice, ...]) -> torch.Tensor:
        is_whole = all(one == slice(None) for one in index)
        part: torch.Tensor = self._opened.get_tensor(self._name) if is_whole else self._slice[index]
        return part


@contextmanager
def _reading(file: Path, what: str) -> Iterator[None]:
    """Raise ValueError that names the file if its bytes are damaged."""
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"{file} is torn or not safetensors, at {what} ({error}): {REMEDY}"
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
