"""Interface of sources of weights, their settings, and the record of a model's filled slots."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from sglang.srt.distributed.tensor_group import SingleTensorGroup, TensorGroup
from sglang.srt.layers.layer_weight import SCALES, ZEROS, weight_shape
from sglang.srt.layers.placement import ExpertRanks, WeightSlot, slots_in
from sglang.srt.layers.quantization.quantized_tensor import QuantizedTensor
from sglang.srt.layers.weight_format import FormatOf
from sglang.srt.models.causal_lm import CausalLM
from sglang.srt.utils.network import base_url


@dataclass(frozen=True, slots=True, kw_only=True)
class SeedAddress:
    """The HTTP server whose weights are read."""

    host: str
    port: int
    api_key: str | None = field(default=None, repr=False)
    """Key for the server; None: it needs no key."""

    @property
    def url(self) -> str:
        """`http://HOST:PORT`."""
        return base_url(self.host, self.port)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadConfig:
    """Settings to load a model on this rank."""

    load_format: str = "auto"
    """A key of `loader.WEIGHT_SOURCES`; "auto" means "safetensors"."""
    random_seed: int = 0
    """The seed of `dummy` weights."""
    seed_instance: SeedAddress | None = None
    """The seed of `remote_instance` weights."""
    device: str = "cpu"
    tp_group: TensorGroup = field(default_factory=SingleTensorGroup)
    """The ranks that split the model's layers."""
    experts: ExpertRanks | None = None
    """See `TensorPlacement.experts`."""
    show_progress: bool = True


class WeightSource(Protocol):
    """A source of the weights of one model."""

    @property
    def name(self) -> str:
        """Name of the source, for logs and errors."""

    def identity(self) -> str:
        """Digest that identifies these weights: 32 hexadecimal digits. Call it after `fill`.

        It identifies the weights in memory, even if the files change later. The first call may read
        all files.

        Raises:
            ValueError: Files changed between loading and the first call; names the change and the
                remedy.
        """

    def formats(self) -> FormatOf:
        """Formats of the quantized weights that it has, by name. Call it before the model is
        built.

        Raises:
            ValueError: As `fill`.
        """

    def has_own_head(self, head: str, embedding: str) -> bool:
        """True if it has a head beside the embedding, and they are not equal in the model's dtype.
        Call it before the model is built. May read both tensors.

        Args:
            head: Name of the head's tensor.
            embedding: Name of the embedding's.

        Raises:
            ValueError: As `fill`.
        """

    def fill(self, slots: WeightSlots) -> None:
        """Fill each slot from the tensor of its name, reading only this rank's parts.

        Raises:
            ValueError: In one line: the source, the tensor that is unexpected, torn or of another
                shape, and the remedy.
        """


class WeightSlots:
    """The slots of a model, and which are still empty. Only one thread uses it."""

    def __init__(self, model: CausalLM, on_taken: Callable[[], object]) -> None:
        """Args:
        on_taken: Called for each slot when it is taken.
        """
        self._model = model
        self._on_taken = on_taken
        named = list(model.weight_slots())
        self._all = dict(named)
        assert len(self._all) == len(named), "two slots take one tensor"
        self._empty = dict(self._all)
        self._stacked = dict(model.stacked_slots())
        self._tied: set[str] = set()
        """Names, among those of the tied head and the embedding, that were found."""

    def __len__(self) -> int:
        return len(self._all)

    def has(self, name: str) -> bool:
        """True if the model has a tensor of that name."""
        return name in self._all

    def empty(self) -> dict[str, WeightSlot]:
        """The slots that are not taken yet, by tensor name."""
        return dict(self._empty)

    def take_all(self) -> Iterator[tuple[str, WeightSlot]]:
        """Take each empty slot, and yield it unless other ranks have all of its tensor. The caller
        fills a slot, perhaps with `fill_quantized`, before it takes the next."""
        for name, slot in list(self._empty.items()):
            if name in self._empty:
                self._take((name,))
                if slot.dest.numel():
                    yield name, slot

    def take(self, name: str, shape: tuple[int, ...] | None, file: Path | str) -> WeightSlot | None:
        """Take the slot of a checkpoint tensor, to be filled now or filled just before. None: the
        model does not need the tensor, or other ranks take all of it.

        Args:
            shape: Shape of the whole tensor, or of the weight that it encodes; None: not checked.
            file: The tensor's file, for errors.

        Raises:
            ValueError: The tensor has no slot, was found before, or has another shape.
        """
        own_name = name
        tied = self._model.tied_names
        if name in tied:
            if name in self._tied:
                raise _twice(name, file)
            # A checkpoint may have either tensor, or both, which are equal.
            self._tied.add(name)
            if len(self._tied) == 2:
                return None
            own_name = tied[1]
        slot = self._stacked.get(name) or self._all.get(own_name)
        if slot is None:
            if self._model.is_redundant(name):
                return None
            raise ValueError(
                f"{file}: tensor {name!r} has no place in {type(self._model).__name__}: "
                "the weights and config.json are not of the same model"
            )
        names = slot.parts or (own_name,)
        if not all(part in self._empty for part in names):
            raise _twice(name, file)
        if shape not in (None, wanted := weight_shape(slot)):
            raise ValueError(
                f"{file}: tensor {name!r} has shape {list(shape)}, config.json asks for "
                f"{list(wanted)}: the weights and config.json are not of the same model"
            )
        self._take(names)
        if slot.dest.numel():
            return slot
        for suffix in (SCALES, ZEROS):
            self._take_beside(name + suffix)
        return None

    def fill_quantized(self, name: str, slot: WeightSlot, weight: QuantizedTensor) -> None:
        """Fill a slot with a quantized weight: as it is stored, together with the slots of its
        scales and zero points, where the layer keeps those; otherwise dequantized.

        Args:
            name: Name of the weight, whose `slot` was taken.

        Raises:
            ValueError: The weight has another format than its source said.
        """
        beside = {suffix: self._take_beside(name + suffix) for suffix in (SCALES, ZEROS)}
        scales, zeros = beside[SCALES], beside[ZEROS]
        if scales is None:
            slot.fill(weight)
            return
        sizes = zip(weight.shape[-2:], scales.shape[-2:], strict=True)
        height, group = (size // count for size, count in sizes)
        stored = weight.stored(height, group)
        slot.fill(stored.elements)
        scales.fill(stored.scales)
        assert (zeros is None) == (stored.zeros is None), "the format says whether it has some"
        if zeros is not None and stored.zeros is not None:
            zeros.fill(stored.zeros)

    def _take_beside(self, name: str) -> WeightSlot | None:
        slot = self._stacked.get(name) or self._all.get(name)
        if slot is not None:
            self._take(slot.parts or (name,))
        return slot

    def _take(self, names: tuple[str, ...]) -> None:
        for part in names:
            del self._empty[part]
            self._on_taken()

    def check_filled(self, source: str) -> None:
        """Raise ValueError if a slot is empty.

        Args:
            source: Name of the source, for the error.
        """
        if not self._empty:
            return
        first, draft = next(iter(self._empty)), self._model.draft_layer
        missing = f"tensor {first!r} is in no weight file ({len(self._empty)} of {len(self)}"
        if draft is not None and self._empty.keys() <= dict(slots_in(draft)).keys():
            raise ValueError(
                f"{source}: {type(self._model).__name__} has no whole layer that drafts tokens: "
                f"{missing} are missing): remove --speculative-algorithm"
            )
        raise ValueError(f"{source}: {missing} are missing): copy the checkpoint again")


def _twice(name: str, file: Path | str) -> ValueError:
    return ValueError(f"{file}: tensor {name!r} is there twice: remove the stray weight file")
