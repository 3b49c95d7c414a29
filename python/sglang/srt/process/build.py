"""Builds a rank: model, pools, tree, and the scheduler on them."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import math
import secrets
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import msgspec
import torch

from sglang.srt.arg_groups.checks import ranks_per_node, reports_held_pages
from sglang.srt.arg_groups.cli import flag_name
from sglang.srt.arg_groups.disaggregation import (
    DisaggregationMode,
    TransferBackend,
    moves_pages_by_mooncake,
)
from sglang.srt.arg_groups.kv_events_config import KVEventsConfig
from sglang.srt.arg_groups.remote_weights import offers_weights, reads_weights, seed_host_port
from sglang.srt.arg_groups.speculative import num_draft_tokens
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.constrained.grammar import GrammarLimits
from sglang.srt.constrained.xgrammar_backend import XGrammarBackend
from sglang.srt.disaggregation.base.bootstrap_route import Route
from sglang.srt.disaggregation.base.conn import KVArgs
from sglang.srt.disaggregation.kv_events import ZmqEventPublisher
from sglang.srt.disaggregation.roles import changing_role_of, role_of
from sglang.srt.disaggregation.utils import KVClassType, MetadataBuffers, get_kv_class
from sglang.srt.distributed.rank_group import RankGroup, SingleRank
from sglang.srt.distributed.torch_rank_group import TorchRankGroup
from sglang.srt.environ import envs
from sglang.srt.hardware_backend.device_kinds import device_kind
from sglang.srt.hardware_backend.device_runtime import detect_device, device_runtime
from sglang.srt.layers.linear_attention.extend_plan import CHUNK
from sglang.srt.layers.moe.sparse_moe import exchange_bytes_of
from sglang.srt.managers.detokenizer.detokenizer_manager import make_decoder_factory
from sglang.srt.managers.scheduler.launched_step import TpModelWorker
from sglang.srt.managers.scheduler.role_switch import MakeRole, RemakeRole
from sglang.srt.managers.scheduler.scheduler import Scheduler, SchedulerResources
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.device.pool_registry import ModelPools
from sglang.srt.mem_cache.host.host_layout import check_layout_and_io
from sglang.srt.mem_cache.registry import TreeCacheBuildContext, create_tree_cache
from sglang.srt.mem_cache.tree.held_pages import HeldPages
from sglang.srt.model_executor.grouped_runner import GroupedModelRunner
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.model_executor.pool_sizing import (
    DeviceMemory,
    lines_of_kinds,
    longest_pass,
    memory_parts,
    memory_text,
    size_pools,
    size_running_requests,
)
from sglang.srt.model_executor.runner_config import ModelRunnerConfig, SharedTransferEngine
from sglang.srt.model_loader.weight_files import config_values
from sglang.srt.model_loader.weight_seed import WeightSeed
from sglang.srt.model_loader.weight_source import SeedAddress
from sglang.srt.observability.engine_metrics import SchedulerMetrics, model_label
from sglang.srt.process.dp_groups import check_experts, make_scheduler
from sglang.srt.process.same_settings import check_same_settings
from sglang.srt.speculative.eagle_worker import verification_bytes
from sglang.srt.utils.hf_tokenizer import get_tokenizer
from sglang.srt.utils.network import address_for_peers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from sglang.srt.distributed.rendezvous import Rendezvous
    from sglang.srt.mem_cache.radix_cache import RadixCache
    from sglang.srt.messages.ipc import IpcAddresses
    from sglang.srt.process.tick_watchdog import TickWatchdog
    from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)

_EXAMPLE_PREFIX: Final = 8192
"""Length in tokens of the example prefix in the log line about states."""


@dataclass(frozen=True, slots=True)
class BuiltScheduler:
    """A scheduler that can serve, and the facts that are reported about it."""

    scheduler: Scheduler
    group: RankGroup
    """The ranks of this rank's DP group."""
    dp_rank: int
    """Number of that group."""
    server_args: ServerArgs
    """The arguments, with the fields that depend on the machine filled in."""
    ready_details: dict[str, Any]
    """Parts of the ready message. `tiers` has a line per tier: its size, and why that size;
    `routes` are the addresses at which decode servers find a prefill server's ranks, else empty."""
    event_publisher: ZmqEventPublisher | None
    """Publishes events of KV blocks; None: there is none, or another rank has it."""


def build_scheduler(
    server_args: ServerArgs,
    rendezvous: Rendezvous | None = None,
    watchdog: TickWatchdog | None = None,
    ipc: IpcAddresses | None = None,
    on_joined: Callable[[], None] = lambda: None,
    announce_silence: Callable[[float], None] = lambda seconds: None,
) -> BuiltScheduler:
    """Load the model, size and allocate the tiers, and make a scheduler for them.

    `server_args` must be resolved; a rank without `rendezvous` is alone. `on_joined` is called when
    the ranks have met. DP groups call each other at `ipc`. `announce_silence`: see `RankWatch`.

    Raises:
        ValueError: One line that names the setting and the remedy.
        StorageUnavailable: L3 cannot be reached, and the settings forbid a start without it.
        RankLost: Another rank has ended meanwhile.
    """
    server_args = on_this_machine(server_args, detect_device())
    model_config = ModelConfig.from_args(server_args)
    check_model_flags(server_args, model_config)
    tokenizer = _load_tokenizer(server_args)
    model_config = model_config.with_end_of(tokenizer)

    def joined() -> None:
        on_joined()
        if rendezvous is not None:
            check_same_settings(TorchRankGroup.of_world(), server_args)

    # Only experts are shared with other groups.
    together = server_args.attn_dp_size > 1 and model_config.has_experts
    make_runner = GroupedModelRunner if together else ModelRunner
    runner = make_runner(
        runner_config(
            server_args,
            model_config,
            seed_instance=_seed_address(server_args),
            offers_weights=offers_weights(server_args),
            transfer_engine=_transfer_engine(server_args, rendezvous),
            rendezvous=rendezvous,
            attn_cp_size=server_args.attn_cp_size,
            attn_dp_size=server_args.attn_dp_size,
            ep_size=server_args.ep_size,
            gpu_id=_gpu_of(server_args, rendezvous),
        ),
        joined,
    )
    group = SingleRank() if rendezvous is None else TorchRankGroup.of_dp_group()
    dp_rank = 0 if rendezvous is None else rendezvous.rank // group.size
    # Captured steps of all groups are of the same sizes.
    tiers = init_pools(runner, server_args, TorchRankGroup.of_world() if together else group)
    # Before the tree: a captured step waits for no load, so L2 may not have joined the pools yet.
    worker = TpModelWorker(runner)
    role, remake_role, routes = _make_role(server_args, runner, group, dp_rank)
    of_group = {"dp_rank": str(dp_rank)} if server_args.attn_dp_size > 1 else {}
    labels = model_label(server_args) | of_group
    metrics = SchedulerMetrics(labels, num_draft_tokens(server_args) - 1)
    # The ranks' trees are equal, so one of them tells.
    events = server_args.kv_events()
    publisher = None if events is None or group.rank else ZmqEventPublisher(events, dp_rank)
    reports = reports_held_pages(server_args) and not group.rank
    held_pages = HeldPages(runner.config.page_size, dp_rank) if reports else None
    told = None if publisher is None else events
    tree = _make_tree(server_args, runner, metrics, group, rendezvous, told, held_pages)
    tiers += tree.tiers()
    if remake_role is not None:
        tiers.append(_role_line(server_args, memory_beside(runner, server_args)))
    resources = SchedulerResources(
        worker=worker,
        tree=tree,
        metrics=metrics,
        group=group,
        new_decoder=make_decoder_factory(tokenizer),
        grammar_backend=lambda: XGrammarBackend(
            tokenizer,
            model_config.vocab_size,
            model_config.eos_token_ids,
            GrammarLimits(),
            any_whitespace=not server_args.constrained_json_disable_any_whitespace,
        ),
        weight_seed=_make_weight_seed(runner, group),
        make_role=role,
        remake_role=remake_role,
        publish_events=None if publisher is None else publisher.publish,
        overlap=device_runtime(server_args.device).kind.overlaps_steps
        and not server_args.disable_overlap_schedule,
        tick_guard=nullcontext if watchdog is None else watchdog.guard,
        announce_silence=announce_silence,
    )
    scheduler = make_scheduler(server_args, resources, runner, dp_rank, ipc)
    limits = scheduler.state.limits
    details = {
        "max_total_num_tokens": limits.pool_tokens,
        "max_req_input_len": limits.max_input_tokens,
        "max_running_requests": limits.max_running_requests,
        "context_len": limits.context_len,
        "device": server_args.device,
        "attention_backend": server_args.attention_backend,
        "chunked_prefill_size": server_args.chunked_prefill_size,
        "tiers": tiers,
        "routes": [msgspec.to_builtins(route) for route in routes],
    }
    return BuiltScheduler(scheduler, group, dp_rank, server_args, details, publisher)


def runner_config(
    server_args: ServerArgs, model_config: ModelConfig, **more: Any
) -> ModelRunnerConfig:
    """The runner's settings that resolved arguments name, and `more` of its fields."""
    assert server_args.page_size is not None, "resolved"
    return ModelRunnerConfig(
        model_config=model_config,
        device=server_args.device,
        kv_cache_dtype=server_args.kv_cache_dtype,
        page_size=server_args.page_size,
        attention_backend=server_args.attention_backend,
        disable_cuda_graph=server_args.disable_cuda_graph,
        cuda_graph_max_bs=server_args.cuda_graph_max_bs,
        num_draft_tokens=num_draft_tokens(server_args),
        load_format=server_args.load_format,
        random_seed=server_args.random_seed,
        **more,
    )


def memory_beside(runner: ModelRunner, server_args: ServerArgs) -> DeviceMemory:
    """The memory of the device, with the weights and what graphs will take."""
    runtime = device_runtime(server_args.device)
    available, total = runtime.memory()
    return DeviceMemory(
        has_own_memory=runtime.kind.has_own_memory,
        total_bytes=total,
        available_bytes=available,
        mem_fraction_static=server_args.mem_fraction_static,
        weight_bytes=runner.weight_bytes(),
        sharers=1 if runtime.kind.has_own_memory else ranks_per_node(server_args),
        graph_bytes=runner.graph_bytes()
        + verification_bytes(runner.state_specs, runner.config.num_draft_tokens, runner.num_logits),
        exchange_bytes=exchange_bytes_of(runner.model)
        * longest_pass(server_args.chunked_prefill_size, server_args.max_prefill_tokens),
    )


def on_this_machine(server_args: ServerArgs, detected: str) -> ServerArgs:
    """The resolved arguments with the fields that depend on the device filled in. `detected` is the
    best device of this machine, which `auto` means.

    Raises:
        ValueError: The named device is absent, or does not support another setting.
    """
    device = detected if server_args.device == "auto" else server_args.device
    if device != detected:
        absent = device_runtime(device).why_absent()
        if absent is not None:
            raise ValueError(f"--device {device}: {absent}; use --device {detected}")
    if server_args.enable_hierarchical_cache:
        # Checked before the model is loaded, so that a wrong name is reported at once.
        check_layout_and_io(device, server_args.hicache_io_backend, server_args.hicache_mem_layout)
    return server_args.on_device(device)


def check_model_flags(server_args: ServerArgs, model_config: ModelConfig) -> None:
    """Warn of flags of recurrent states with a model that keeps none. Windows are such states,
    except for their dtype. Raises ValueError for flags of groups and experts that do not work with
    this model."""
    check_experts(server_args, model_config)
    if model_config.linear_attention_layers:
        return
    has_windows = bool(model_config.sliding_window_layers)
    given = [
        flag_name(field.name)
        for field in dataclasses.fields(server_args)
        if "mamba" in field.name and getattr(server_args, field.name) != field.default
    ]
    unused = [one for one in given if not has_windows or one == "--mamba-ssm-dtype"]
    if unused:
        logger.warning(
            "no effect on %s, which keeps no recurrent states: %s",
            model_config.architecture, ", ".join(unused),
        )  # fmt: skip


def init_pools(runner: ModelRunner, server_args: ServerArgs, group: RankGroup) -> list[str]:
    """Allocate L1, as large as the flags, the device and the rank with the least memory allow.
    Returns log lines with the size of each part and the reason for it. A ValueError names the flag
    if no size fits. A collective."""
    page_size = runner.config.page_size
    # Ranks of a CPU share its memory: all have loaded their weights before one reads what is free.
    # The collective below keeps them from taking a part before all have read it.
    group.reduce_min(torch.zeros(1, dtype=torch.int64))
    memory = memory_beside(runner, server_args)
    size, states, state_bytes, own_states, request_bytes = size_pools(
        memory,
        kv_bytes_per_token=runner.kv_bytes_per_token(),
        state_bytes=runner.state_bytes(),
        page_size=page_size,
        context_len=runner.model_config.context_len,
        keeps_snapshots=not server_args.disable_radix_cache,
        max_total_tokens=server_args.max_total_tokens,
        full_memory_ratio=server_args.mamba_full_memory_ratio,
        max_states=server_args.max_mamba_cache_size,
        max_running_requests=server_args.max_running_requests,
        request_bytes=runner.request_bytes(),
    )
    pool_bytes = int((size.amount + page_size) * runner.kv_bytes_per_token())
    rows = size_running_requests(
        pool_tokens=size.amount,
        context_len=runner.model_config.context_len,
        available_bytes=memory.own_available_bytes - pool_bytes - state_bytes - request_bytes,
        max_running_requests=server_args.max_running_requests,
        states=None if states is None else states.amount,
        own_states=None if own_states is None else own_states.amount,
    )
    wanted = [size.amount, rows.amount, *([] if states is None else [states.amount])]
    tokens, requests, *num_states = group.reduce_min(torch.tensor(wanted)).tolist()
    longest = longest_pass(server_args.chunked_prefill_size, server_args.max_prefill_tokens)
    runner.init_memory_pool(tokens, requests, longest, *num_states)
    gigabytes = (tokens + page_size) * runner.kv_bytes_per_token() / 1e9
    other = "what another rank has room for"
    why = size.reason if tokens == size.amount else other
    why_rows = rows.reason if requests == rows.amount else other
    parts = memory_parts(
        runner.state_specs,
        weight_bytes=memory.weight_bytes,
        tokens=tokens,
        states=num_states[0] if num_states else 0,
        page_size=page_size,
        graph_bytes=memory.graph_bytes,
        exchange_bytes=memory.exchange_bytes,
        requests=requests,
    )
    lines = [
        f"L1: {tokens} tokens in pages of {page_size}, {gigabytes:.2f} GB on "
        f"{server_args.device} ({why}); {requests} requests at once ({why_rows}); "
        f"this rank has {memory_text(parts)}"
    ]
    if states is not None:
        why_states = states.reason if num_states == [states.amount] else other
        lines.append(_line_of_states(runner, num_states[0], why_states))
    return lines + lines_of_kinds(runner.state_specs)


def _line_of_states(runner: ModelRunner, num_states: int, why: str) -> str:
    """Log line with the sizes in L1 of all states, and of an example prefix."""
    each = runner.state_bytes()
    prefix_gigabytes = _EXAMPLE_PREFIX * runner.kv_bytes_per_token() / 1e9
    return (
        f"L1: {num_states} {runner.model_config.state_noun}s of {each / 1e6:.2f} MB, "
        f"{(num_states + 1) * each / 1e9:.2f} GB ({why}); a prefix of {_EXAMPLE_PREFIX} tokens "
        f"takes {prefix_gigabytes:.3f} GB of keys and values and {each / 1e9:.3f} GB of state"
    )


def _make_tree(
    server_args: ServerArgs,
    runner: ModelRunner,
    metrics: SchedulerMetrics,
    group: RankGroup,
    rendezvous: Rendezvous | None,
    events: KVEventsConfig | None,
    held_pages: HeldPages | None,
) -> RadixCache:
    hierarchical = server_args.enable_hierarchical_cache
    identity = runner.weight_source.identity() if hierarchical else ""
    params = CacheInitParams(
        disable=server_args.disable_radix_cache,
        req_to_token_pool=runner.req_to_token_pool,
        token_to_kv_pool_allocator=runner.token_to_kv_pool_allocator,
        page_size=runner.config.page_size,
        eviction_policy=server_args.radix_eviction_policy,
        weights_identity=identity,
        tenant_key=_tenant_key(rendezvous),
        bytes_per_token=runner.kv_bytes_per_token(),
        session_share=server_args.keep_session_share,
        session_ttl=server_args.keep_session_seconds,
        enable_kv_cache_events=events is not None,
        held_pages=held_pages,
        announce_keyed=events is not None and events.announce_keyed,
        tp_cache_group=group,
        metrics_registry=metrics.registry,
        model_pools=ModelPools.of(runner.pools.values(), runner.model_config.num_layers),
        mamba_snapshot_alignment=math.lcm(
            runner.config.page_size, runner.model_config.state_chunk or CHUNK
        ),
        mamba_max_states_per_path=server_args.mamba_max_states_per_path,
        pages_alone=server_args.keeps_pages_alone,
    )
    return create_tree_cache(
        TreeCacheBuildContext(
            server_args=server_args,
            params=params,
            enable_hierarchical_cache=server_args.enable_hierarchical_cache,
            radix_cache_backend=server_args.radix_cache_backend,
        )
    )


def _tenant_key(rendezvous: Rendezvous | None) -> bytes:
    """Secret of the labels of tenants, the same in all DP groups of the server. A collective."""
    given = envs.SGLANG_TENANT_LABEL_KEY.get()
    own = secrets.token_bytes(32) if given is None else hashlib.sha256(given.encode()).digest()
    if rendezvous is None:
        return own
    return TorchRankGroup.of_world().broadcast(None if rendezvous.rank else own)


def _seed_address(server_args: ServerArgs) -> SeedAddress | None:
    """Address of the seed to read weights from; None: weights are read from files. The seed gets
    this server's API key, since servers of one fleet have one key."""
    if not reads_weights(server_args):
        return None
    host, port = seed_host_port(server_args)
    return SeedAddress(host=host, port=port, api_key=server_args.api_key)


def _gpu_of(server_args: ServerArgs, rendezvous: Rendezvous | None) -> int | None:
    """Index of this rank's device; None: the kind of device has only one."""
    if not device_kind(server_args.device).has_own_memory:
        return None
    rank = 0 if rendezvous is None else rendezvous.rank
    return server_args.base_gpu_id + rank % ranks_per_node(server_args)


def _transfer_engine(
    server_args: ServerArgs, rendezvous: Rendezvous | None
) -> SharedTransferEngine | None:
    """Start parameters of this process's Transfer Engine; None: no feature needs one."""
    if not (offers_weights(server_args) or moves_pages_by_mooncake(server_args)):
        return None
    name = envs.MOONCAKE_LOCAL_HOSTNAME
    return SharedTransferEngine(
        hostname=name.get() if name.is_set() else address_for_peers(server_args.host),
        gpu_id=_gpu_of(server_args, rendezvous),
        ib_device=server_args.disaggregation_ib_device,
    )


def _make_role(
    server_args: ServerArgs, runner: ModelRunner, group: RankGroup, dp_rank: int
) -> tuple[MakeRole | None, RemakeRole | None, list[Route]]:
    """How to make the role of a prefill or decode server (None: the server does both), how to make
    the other one (None: the role does not change), and the routes of the DP group's ranks for its
    bootstrap server ([]: it has none). A collective of the group."""
    if server_args.disaggregation_mode == DisaggregationMode.NULL:
        return None, None, []
    mode, pools = DisaggregationMode(server_args.disaggregation_mode), list(runner.pools.values())
    args = KVArgs(
        ranks=group,
        pools=pools,
        weights_identity=runner.weight_source.identity(),
        dtype=runner.model_config.dtype,
        aux_buffers=MetadataBuffers.beside(pools[0].device, runner.req_to_token_pool.hidden_bytes),
        dp_rank=dp_rank,
        dp_size=server_args.attn_dp_size,
    )
    backend = TransferBackend(server_args.disaggregation_transfer_backend)
    manager = get_kv_class(backend, KVClassType.MANAGER)(args, mode, server_args)
    remake = None
    if server_args.enable_pd_role_switch:
        remake = changing_role_of(manager, group, backend)
    return role_of(mode, manager, group, backend), remake, manager.register_to_bootstrap()


def _role_line(server_args: ServerArgs, memory: DeviceMemory) -> str:
    """A line about what both roles of a server need that may change between them."""
    graphs = "none"
    if memory.graph_bytes:
        graphs = f"{memory.graph_bytes / 1e9:.2f} GB, captured at the start"
    return (
        f"role: {server_args.disaggregation_mode}, until POST /pd_role_switch; graphs of both "
        f"roles: {graphs}"
    )


def _make_weight_seed(runner: ModelRunner, group: RankGroup) -> WeightSeed | None:
    """Offer of the weights to other servers; None: none may read them. A collective."""
    engine = runner.remote_instance_transfer_engine
    if engine is None:
        return None
    return WeightSeed(
        engine,
        runner.model,
        group=group,
        config=config_values(runner.model_config.model_path),
        identity=runner.weight_source.identity,
    )


def _load_tokenizer(server_args: ServerArgs) -> PreTrainedTokenizerBase:
    path = server_args.tokenizer_path or server_args.model_path
    assert path is not None, "resolved arguments name the model"
    # The server process loads it too, and logs the library's warnings.
    return get_tokenizer(path, trust_remote_code=server_args.trust_remote_code, is_known=True)
