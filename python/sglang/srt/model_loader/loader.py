"""Making a model with its weights, from files or from a seed."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.placement import TensorPlacement
from sglang.srt.layers.weight_slot import WeightSlot
from sglang.srt.model_loader.dummy_weights import dummy_tensor
from sglang.srt.model_loader.weight_files import weight_files
from sglang.srt.model_loader.weight_utils import CheckpointTensor, iterate_tensors
from sglang.srt.models.llama import LlamaForCausalLM
from sglang.srt.models.registry import MODEL_CLASSES

logger = logging.getLogger(__name__)

LOAD_FORMATS = ("auto", "safetensors", "pt", "dummy")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadConfig:
    """Where a model's weights come from and where they go."""

    load_format: str = "auto"
    """One of `LOAD_FORMATS`; "auto" is "safetensors"."""
    random_seed: int = 0
    """Of `dummy` weights."""
    device: str = "cpu"
    tp_rank: int = 0
    tp_size: int = 1
    show_progress: bool = True

    def __post_init__(self) -> None:
        if self.load_format not in LOAD_FORMATS:
            raise ValueError(
                f"load format {self.load_format!r} is not supported: "
                f"supported are {', '.join(LOAD_FORMATS)}"
            )


def get_model(model_config: ModelConfig, load_config: LoadConfig) -> LlamaForCausalLM:
    """Build the model and fill all of its weights.

    Raises:
        ValueError: One line that names the file and the tensor that is missing, unexpected,
            torn or of another shape, and the remedy.
    """
    started = time.monotonic()
    placement = TensorPlacement(
        dtype=model_config.dtype,
        device=load_config.device,
        tp_rank=load_config.tp_rank,
        tp_size=load_config.tp_size,
    )
    with torch.inference_mode():
        model = MODEL_CLASSES[model_config.architecture](model_config, placement)
        slots = dict(model.weight_slots())
        if load_config.load_format == "dummy":
            source = "random"
            tensors = dummy_tensors(slots, load_config.random_seed)
        else:
            source = model_config.model_path
            files = weight_files(Path(source), load_config.load_format)
            tensors = iterate_tensors(files, load_config.load_format)
        progress = tqdm(
            tensors,
            total=len(slots),
            desc="Loading weights",
            unit="tensor",
            disable=not load_config.show_progress,
        )
        _fill(model, slots, progress, source)
    num_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    logger.info(
        "Loaded %s from %s: %d tensors, %.1f MiB, %s, %.2f s",
        model_config.architecture,
        source,
        len(slots),
        num_bytes / (1 << 20),
        str(model_config.dtype).removeprefix("torch."),
        time.monotonic() - started,
    )
    return model.eval()


def dummy_tensors(slots: dict[str, WeightSlot], seed: int) -> Iterator[CheckpointTensor]:
    """Random weights, each determined by (`seed`, its name) alone and generated whole.

    See `dummy_weights`. They are made where their places are, in their dtype.
    """
    for name, slot in slots.items():
        dest = slot.dest
        tensor = dummy_tensor(name, slot.shape, seed, dtype=dest.dtype, device=dest.device)
        yield CheckpointTensor(Path("dummy"), name, tensor)


def _fill(
    model: LlamaForCausalLM,
    slots: dict[str, WeightSlot],
    tensors: Iterator[CheckpointTensor] | tqdm[CheckpointTensor],
    source: str,
) -> None:
    """Copy every tensor to its place; each must fit one and each place must get one."""
    missing = dict(slots)
    for file, name, tensor in tensors:
        slot = missing.pop(name, None)
        if slot is None:
            if name in slots:
                raise ValueError(
                    f"{file}: tensor {name!r} is there twice: remove the stray weight file"
                )
            if model.is_redundant(name):
                continue
            raise ValueError(
                f"{file}: tensor {name!r} has no place in {type(model).__name__}: "
                "the weights and config.json are not of the same model"
            )
        if tuple(tensor.shape) != slot.shape:
            raise ValueError(
                f"{file}: tensor {name!r} has shape {list(tensor.shape)}, config.json asks for "
                f"{list(slot.shape)}: the weights and config.json are not of the same model"
            )
        slot.fill(tensor)
    if missing:
        first = next(iter(missing))
        raise ValueError(
            f"{source}: tensor {first!r} is in no weight file ({len(missing)} of {len(slots)} are "
            "missing): copy the checkpoint again"
        )
