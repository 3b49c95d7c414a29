"""Settings of a model runner."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed.rendezvous import Rendezvous
from sglang.srt.distributed.tensor_group import TensorGroup
from sglang.srt.layers.placement import ExpertRanks
from sglang.srt.mem_cache.device.state_spec import ItemKind, StateSpec
from sglang.srt.model_loader.weight_source import SeedAddress


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedTransferEngine:
    """Arguments for this process's Transfer Engine; see `MooncakeTransferEngine`."""

    hostname: str
    gpu_id: int | None = None
    ib_device: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRunnerConfig:
    """Settings of a runner, as plain values."""

    model_config: ModelConfig
    device: str = "cpu"
    kv_cache_dtype: str = "auto"
    """One of the device's `DeviceKind.kv_cache_dtypes`; "auto" is the model's own."""
    page_size: int = 1
    attention_backend: str | None = None
    """Name of the backend; None: the default for the device."""
    load_format: str = "auto"
    random_seed: int = 0
    """Seed of `dummy` weights."""
    seed_instance: SeedAddress | None = None
    """The seed of `remote_instance` weights."""
    offers_weights: bool = False
    """If true, peers may read the weights; needs a `transfer_engine`."""
    rendezvous: Rendezvous | None = None
    """Rendezvous of the server's ranks; None: this is the only rank."""
    attn_cp_size: int = 1
    attn_dp_size: int = 1
    """Sizes of the groups of ranks; see `parallel_state`."""
    gpu_id: int | None = None
    """Index of the device; None: the current device."""
    tp_group: TensorGroup | None = None
    """The ranks that split the model's layers; None: the world's attention TP group."""
    cp_group: TensorGroup | None = None
    """The ranks that split the tokens of prefills; None: the world's attention CP group."""
    ep_size: int = 1
    """Ranks that have whole experts: all of the world, or 1 if they split each expert."""
    experts: ExpertRanks | None = None
    """The ranks that share the experts; None: as `ep_size` and `attn_dp_size` say."""
    show_progress: bool = True
    disable_cuda_graph: bool = False
    cuda_graph_max_bs: int | None = None
    """Largest batch whose decoding is captured; None: `max_running_requests`, 256 at most."""
    num_draft_tokens: int = 1
    """Tokens of a decode step for each request; above 1 the model has its draft layer."""
    transfer_engine: SharedTransferEngine | None = None
    """Engine of features that transfer this process's memory; None: no such feature is on."""


def check_groups(config: ModelRunnerConfig, specs: Iterable[StateSpec], cp_size: int) -> None:
    """Refuse what groups of tokens do not support.

    Args:
        specs: Specs of the state that the model caches.
        cp_size: Ranks that split the tokens of prefills.

    Raises:
        ValueError: Ranks split prefills of a model that groups tokens, or drafts are verified that
            an open group would have to forget. Names the flag and the state.
    """
    model = config.model_config.architecture
    for spec in specs:
        is_open = spec.item is ItemKind.REQUEST
        if cp_size > 1 and (is_open or spec.stride > 1):
            raise ValueError(
                f"--attn-cp-size {cp_size}: ranks cannot split a prefill of {model}, whose state "
                f"'{spec.name}' groups tokens: leave it at 1"
            )
        if config.num_draft_tokens > 1 and is_open:
            raise ValueError(
                f"--speculative-algorithm: state '{spec.name}' of {model} would keep tokens of "
                "drafts that are rejected: remove it"
            )
