"""Loads weights from the files of a checkpoint, with errors that name the file; identifies them.

The identity may be needed long after loading, when the files may contain other weights. The loader
records names, sizes, times and inodes of the files before it reads them, to detect such a change.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from pickle import UnpicklingError  # noqa: TID251 - the error alone; nothing is unpickled here
from typing import Any, Final, TypeAlias

import torch
from safetensors import SafetensorError, safe_open

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.configs.quantization_config import Packing, QuantizationConfig, ZeroPoints
from sglang.srt.layers.quantization.quantized_tensor import RawTensor
from sglang.srt.layers.weight_format import FormatOf, WeightFormat
from sglang.srt.model_loader.quantized_weights import QuantizedNames, QuantizedWeight
from sglang.srt.model_loader.rounded_weights import format_of_rounded, is_rounded, rounded
from sglang.srt.model_loader.weight_files import (
    REMEDY,
    config_file,
    file_of_each_tensor,
    weight_files,
    weights_identity,
)
from sglang.srt.model_loader.weight_source import LoadConfig, WeightSlots

logger = logging.getLogger(__name__)

_PLAIN_DTYPES: Final = frozenset(("F64", "F32", "F16", "BF16"))
"""Dtypes of weights that are not quantized."""
_INT_DTYPES: Final = frozenset(("I64", "I32", "I16"))
"""Dtypes of tables of integers."""
_COMPARED_ELEMENTS: Final = 1 << 22
"""Elements that are compared at a time."""
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
        self._dtype = model_config.dtype
        self._files = weight_files(Path(self.name), self._format)
        self._index = file_of_each_tensor(Path(self.name), self._format)
        self._stale: list[str] = []
        """Names of the tensors that a file has although the index gives them to another."""
        self._noted = _signatures([config, *self._files])
        self._identity: str | None = None

    def formats(self) -> FormatOf:
        """See `WeightSource`. Reads the headers of the files."""
        found: dict[str, WeightFormat] = {}
        if self._quantization is not None:
            with ExitStack() as stack:
                found = self._open(stack).formats()
        return found.get

    def has_own_head(self, head: str, embedding: str) -> bool:
        """See `WeightSource`."""
        if self._format != "pt":
            with ExitStack() as stack:
                return self._open(stack).differ(head, embedding, self._dtype)
        found: dict[object, object] = {}
        for file in self._files:
            state = _of_index(_read_pickled(file), file, self._index, [])
            found |= {name: state[name] for name in (head, embedding) if name in state}
        first, second = found.get(head), found.get(embedding)
        if not isinstance(first, torch.Tensor) or not isinstance(second, torch.Tensor):
            return False  # what is there and no tensor is refused when it is loaded
        return not _are_equal(first, second, self._dtype)

    def fill(self, slots: WeightSlots) -> None:
        """See `WeightSource`."""
        self._stale = []
        if self._format == "pt":
            for file in self._files:
                _fill_from_pickle(slots, file, self._index, self._stale)
        else:
            with ExitStack() as stack:
                self._stale = self._open(stack).fill(slots)
        if self._stale:
            logger.warning(
                "%s: %d tensors are in a file although the index gives them to another, such as "
                "%s: they are not read",
                self.name,
                len(self._stale),
                self._stale[0],
            )

    def _open(self, stack: ExitStack) -> _SafetensorsFiles:
        return _SafetensorsFiles(self._files, self._index, self._quantization, stack)

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
                reading=self._reading(),
            )
            self._check_unchanged()  # a file may have changed while it was hashed
            self._identity = identity
        return self._identity

    def _reading(self) -> str:
        """Words for the identity where files and config.json do not determine the weights: the
        index's choices, and zero points of symmetric GPTQ weights, which earlier releases read."""
        config = self._quantization
        words = [f" {name} of {self._index[name].name}" for name in sorted(set(self._stale))]
        if config is not None and config.packing is Packing.COLUMNS:
            words += [" centred"] * (config.zero_points is ZeroPoints.CENTRE)
        return "".join(words)

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


def _fill_from_pickle(
    slots: WeightSlots, file: Path, index: Mapping[str, Path], stale: list[str]
) -> None:
    for name, tensor in _of_index(_read_pickled(file), file, index, stale).items():
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"{file}: entry {name!r} is not a tensor: use a plain state dict")
        slot = slots.take(str(name), tuple(tensor.shape), file)
        if slot is not None:
            slot.fill(tensor)


def _of_index(
    state: dict[object, object], file: Path, index: Mapping[str, Path], stale: list[str]
) -> dict[object, object]:
    """The entries of a file without those that the index gives to another; their names are added to
    `stale`."""
    others = [str(name) for name in state if index.get(str(name), file) != file]
    stale += others
    return {name: tensor for name, tensor in state.items() if str(name) not in others}


def _checked_table(opened: Any, name: str, dtype: str, below: int, file: Path) -> torch.Tensor:
    """A table of `WeightSlot.below`. Raises ValueError: it has other elements."""
    if dtype in _INT_DTYPES:
        table: torch.Tensor = opened.get_tensor(name)
        ordered = table.sort(dim=-1).values
        is_inside = not ordered.numel() or 0 <= int(ordered.min()) <= int(ordered.max()) < below
        if is_inside and not (ordered[..., 1:] == ordered[..., :-1]).any():
            return table
    raise ValueError(
        f"{file}: tensor {name!r} of {dtype} must have integers from 0 to {below - 1}, each at "
        "most once in a row: the weights and config.json are not of the same model"
    )


def _are_equal(first: RawTensor, second: RawTensor, dtype: torch.dtype) -> bool:
    """True if two matrices have equal elements in a dtype."""
    shape = tuple(first.shape)
    if shape != tuple(second.shape) or len(shape) != 2:
        return False
    height = max(1, _COMPARED_ELEMENTS // max(1, shape[1]))
    parts = (
        (slice(begin, min(begin + height, shape[0])), slice(0, shape[1]))
        for begin in range(0, shape[0], height)
    )
    return all(torch.equal(first[part].to(dtype), second[part].to(dtype)) for part in parts)


class _SafetensorsFiles:
    """All files of a checkpoint, mapped into memory until `stack` ends.

    The tensors of a quantized weight may be in different files.
    """

    def __init__(
        self,
        files: Iterable[Path],
        index: Mapping[str, Path],
        config: QuantizationConfig | None,
        stack: ExitStack,
    ) -> None:
        self._config = config
        self._opened: dict[Path, Any] = {}
        for file in files:
            with _reading(file, "its header"):
                opened = safe_open(str(file), framework="pt", device="cpu")
                self._opened[file] = stack.enter_context(opened)
        # A name that two files have is refused when the second is read, unless the index decides.
        # An index that is wrong about a name that one file has does not matter.
        self._file_of = {name: file for file, name in self._tensors()}
        decided = {name: file for file, name in self._tensors() if index.get(name) == file}
        self._file_of |= decided
        self._stale = {
            (file, name) for file, name in self._tensors() if decided.get(name, file) != file
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
        return {name: format_ for name in self._file_of if is_rounded(name, self._config)}

    def _dtype_of(self, name: str) -> str:
        file = self._file_of.get(name)
        if file is None:
            return "missing"  # an error when the weight is read
        with _reading(file, f"tensor {name!r}"):
            dtype: str = self._opened[file].get_slice(name).get_dtype()
        return dtype

    def differ(self, first: str, second: str, dtype: torch.dtype) -> bool:
        """True if both weights are there, and are not plain and equal in `dtype`."""
        weights = () if self._names is None else self._names.by_elements.values()
        quantized = {weight.name for weight in weights}
        if not all(name in self._file_of or name in quantized for name in (first, second)):
            return False
        if {first, second} & quantized:
            return True
        one, other = (
            _StoredTensor(self._opened[self._file_of[name]], name) for name in (first, second)
        )
        with _reading(self._file_of[first], f"tensor {first!r}"):
            return not _are_equal(one, other, dtype)

    def fill(self, slots: WeightSlots) -> list[str]:
        """See `WeightSource`. Returns the names of tensors that were passed over because the index
        gives them to another file, which has them too."""
        for file, name in self._tensors():
            if (file, name) not in self._stale:
                with _reading(file, f"tensor {name!r}"):
                    self._fill(slots, file, name)
        return sorted(name for _, name in self._stale)

    def _tensors(self) -> Iterator[tuple[Path, str]]:
        """All names, with the file that has them."""
        for file, opened in self._opened.items():
            for name in opened.keys():  # noqa: SIM118 - not a dict
                yield file, name

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
        if slot.below is not None:
            slot.fill(_checked_table(opened, name, dtype, slot.below, file))
            return
        if dtype not in _PLAIN_DTYPES:
            raise ValueError(
                f"{file}: tensor {name!r} is {dtype} and has no scales: the weights and "
                "quantization_config in config.json are not of the same model"
            )
        if self._rounds and self._config is not None and is_rounded(name, self._config):
            whole = opened.get_tensor(name).to(slot.dest.device)
            found = rounded(whole, self._config, slot.dest.dtype, torch.float32)
            slots.fill_quantized(name, slot, found)
            return
        slot.fill(stored if slot.is_split else opened.get_tensor(name))

    def _fill_quantized(
        self, slots: WeightSlots, file: Path, weight: QuantizedWeight, config: QuantizationConfig
    ) -> None:
        elements = _StoredTensor(self._opened[file], weight.elements)
        shape = weight.shape(elements.shape, config)
        slot = slots.take(weight.name, shape, file)
        if slot is None:
            return
        dtype, device = slot.dest.dtype, slot.dest.device
        try:
            weight.check_elements(self._dtype_of(weight.elements), config)
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
