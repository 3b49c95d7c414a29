"""One rank's model, its pools and its attention backend."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable
from fractions import Fraction
from functools import partial
from typing import Protocol

import torch

from sglang.srt.distributed.device_communicators.mooncake_mem_pool import (
    init_mooncake_custom_mem_pool,
)
from sglang.srt.distributed.device_communicators.mooncake_transfer_engine import (
    MooncakeTransferEngine,
    get_mooncake_transfer_engine,
    init_mooncake_transfer_engine,
)
from sglang.srt.distributed.device_context import mark_device_set
from sglang.srt.distributed.parallel_state import (
    get_attention_cp_group,
    get_attention_tp_group,
    init_distributed_environment,
    initialize_model_parallel,
)
from sglang.srt.distributed.tensor_group import SingleTensorGroup, TensorGroup
from sglang.srt.hardware_backend.device_runtime import device_runtime
from sglang.srt.layers.attention.attention_registry import create_attention_backends
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend, AttentionConfig
from sglang.srt.layers.attention_kind import AttentionKind
from sglang.srt.layers.context_parallel import split_context
from sglang.srt.layers.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.layers.linear_attention.extend_plan import CHUNK
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.layers.mla.latent_attention import LatentAttention
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.allocator import BaseTokenToKVPoolAllocator, make_allocator
from sglang.srt.mem_cache.device.base_device_pool import BaseDevicePool
from sglang.srt.mem_cache.device.hidden_rows import HiddenRows, hidden_spec
from sglang.srt.mem_cache.device.memory_pool import HybridReqToTokenPool, KVCache, ReqToTokenPool
from sglang.srt.mem_cache.device.pool_registry import kv_pool, make_pools, resolve_kv_dtype
from sglang.srt.mem_cache.device.request_pool import RequestPool
from sglang.srt.mem_cache.device.state_pool import state_pool
from sglang.srt.mem_cache.device.state_spec import (
    ItemKind,
    PoolName,
    bytes_per_request,
    bytes_per_state,
    bytes_per_token,
    check_page_size,
)
from sglang.srt.model_executor.cuda_graph_runner import (
    MAX_BATCH_SIZE,
    CudaGraphRunner,
    Forward,
    estimate_graph_bytes,
    graph_batch_sizes,
)
from sglang.srt.model_executor.expert_ranks import expert_ranks
from sglang.srt.model_executor.extend_graph_runner import TOKEN_COUNTS, ExtendGraphRunner
from sglang.srt.model_executor.graph_capture import uncaptured
from sglang.srt.model_executor.runner_config import ModelRunnerConfig, check_groups
from sglang.srt.model_executor.warm_up import run_step, warm_up_batches, warm_up_masks
from sglang.srt.model_loader.loader import build_model, load_weights
from sglang.srt.model_loader.weight_seed import register_weights
from sglang.srt.model_loader.weight_source import LoadConfig
from sglang.srt.models.causal_lm import attention_layers
from sglang.srt.utils.progress import progress_bar

logger = logging.getLogger(__name__)


class CapturedVerifications(Protocol):
    """The methods of `VerifyGraphs` that a runner calls; documented there."""

    def can_run(self, batch_size: int) -> bool: ...

    def verify(self, batch: ForwardBatch) -> tuple[torch.Tensor, LogitsProcessorOutput]: ...


class ModelRunner:
    """Runs batches. Once it is created, only one thread uses it.

    Attributes:
        model: The model with its weights.
        weight_source: Source of the weights.
        remote_instance_transfer_engine: The Transfer Engine with the weights registered, from which
            peers read them; None without `offers_weights`.
        remote_instance_transfer_engine_session_id: Session id for peers to address it; empty
            without `offers_weights`.
        model_config: The model's configuration.
        tp_group: The ranks that split the model's layers.
        cp_group: The ranks with the same share of the layers, which split the tokens of prefills.
        experts: The ranks that share the routed experts; None: the `tp_group` splits them.
        state_specs: Specs of the state that the model caches per token and per prefix.
        attn_backends: The attention backend of each kind of the model's layers.
        req_to_token_pool: Slots of each running request; after `init_memory_pool`.
        pools: The device pools (L1), one for each of `state_specs`; after `init_memory_pool`.
        token_to_kv_pool: The pool in `pools` whose slots requests own; after `init_memory_pool`.
        token_to_kv_pool_allocator: The allocator of its pages; after `init_memory_pool`.
        verifications: Captured verifications of drafts, which whoever drafts sets; None: none.
    """

    verifications: CapturedVerifications | None = None
    req_to_token_pool: ReqToTokenPool
    pools: dict[PoolName, BaseDevicePool]
    token_to_kv_pool: KVCache
    token_to_kv_pool_allocator: BaseTokenToKVPoolAllocator

    def __init__(
        self, config: ModelRunnerConfig, on_joined: Callable[[], None] = lambda: None
    ) -> None:
        """Load the model.

        Args:
            on_joined: Called when all ranks have joined, before anything is loaded.

        Raises:
            RuntimeError: The process has another device already, or the Transfer Engine did not
                start.
            ValueError: A name or size is not supported, or weights are damaged; in one line.
        """
        if config.page_size < 1:
            raise ValueError(f"page_size={config.page_size} must be at least 1")
        self.config, self._runtime = config, device_runtime(config.device)
        self.init_torch_distributed()
        on_joined()
        self.init_shared_mooncake_transfer_engine()
        self.model_config = config.model_config
        self.kv_cache_dtype = resolve_kv_dtype(
            config.kv_cache_dtype, config.model_config.dtype, self._runtime.kind
        )
        self._graphs: list[CudaGraphRunner | ExtendGraphRunner] = []
        load_config = LoadConfig(
            load_format=config.load_format,
            random_seed=config.random_seed,
            seed_instance=config.seed_instance,
            device=config.device,
            tp_group=self.tp_group,
            experts=self.experts,
            show_progress=self.shows_progress,
        )
        self.model = build_model(config.model_config, load_config)
        self.state_specs = self.model.state_specs(self.kv_cache_dtype)
        if config.model_config.has_draft_layer and self.state_bytes():
            layer, size = config.model_config.num_hidden_layers, config.model_config.hidden_size
            self.state_specs += (hidden_spec(layer, size, config.model_config.dtype),)
        check_page_size(self.state_specs, config.page_size)
        if self.cp_group.size > 1 and self.state_bytes():
            raise ValueError(
                f"--attn-cp-size {self.cp_group.size}: {config.model_config.state_noun}s of "
                f"{config.model_config.architecture} stand for whole prefixes, so ranks cannot "
                "split a prefill: leave it at 1, and split heads (--tp-size)"
            )
        check_groups(config, self.state_specs, self.cp_group.size)
        # Before the weights are loaded, to report a wrong name at once.
        layers, page_size = self.model.attention_layers(), config.page_size
        self.attn_backends = self._make_attention_backends(layers, page_size)
        # Rows of slots that begin at position 1 have no whole pages.
        self._draft_backends: dict[AttentionKind, AttentionBackend] = {}
        if self.model.draft_layer is not None:
            drafting = attention_layers(self.model.draft_layer)
            self._draft_backends = self._make_attention_backends(drafting, page_size=1)
        self.remote_instance_transfer_engine: MooncakeTransferEngine | None = None
        self.remote_instance_transfer_engine_session_id = ""
        if config.offers_weights:
            self.remote_instance_init_transfer_engine()
        self.weight_source = load_weights(self.model, config.model_config, load_config)

    def init_torch_distributed(self) -> None:
        """Make the device current, record that for the process, and join the other ranks. A process
        that has joined already stays in its world.

        Raises:
            RuntimeError: The process has another device already, or a rank did not join.
            ValueError: The numbers of ranks are inconsistent.
        """
        config, device = self.config, self.config.device
        if config.gpu_id is not None:
            self._runtime.set_device(config.gpu_id)
            device = f"{device}:{config.gpu_id}"
        self._runtime.prepare()
        mark_device_set(device)
        rendezvous = config.rendezvous
        backend = self._runtime.kind.process_group
        if rendezvous is not None or backend != "gloo":
            # A single rank needs no gloo. It would listen, and keep a file open for each connection
            # of a stranger, even a closed one.
            init_distributed_environment(backend, rendezvous)
        self.tp_group: TensorGroup = config.tp_group or SingleTensorGroup()
        self.cp_group: TensorGroup = config.cp_group or SingleTensorGroup()
        if rendezvous is not None:
            initialize_model_parallel(rendezvous.size, config.attn_cp_size, config.attn_dp_size)
            if self._runtime.kind.has_symmetric_memory and config.gpu_id is not None:
                own = torch.device(config.device, config.gpu_id)
                get_attention_tp_group().open_symmetric_memory(own)
            self.tp_group = config.tp_group or get_attention_tp_group()
            self.cp_group = config.cp_group or get_attention_cp_group()
        self.experts = config.experts or expert_ranks(config)
        self.shows_progress = config.show_progress and (rendezvous is None or not rendezvous.rank)

    def init_shared_mooncake_transfer_engine(self) -> None:
        """Start the Transfer Engine that features of this server share, if any needs it.

        Raises:
            RuntimeError: `init_torch_distributed` has not set a device yet, or the engine did not
                start.
            ValueError: A setting cannot work on this machine.
        """
        shared = self.config.transfer_engine
        if shared is not None:
            init_mooncake_transfer_engine(shared.hostname, shared.gpu_id, shared.ib_device)

    def remote_instance_init_transfer_engine(self) -> None:
        """Register the weights with the shared Transfer Engine, for peers to read.

        Raises:
            RuntimeError: The transport refused the memory.
        """
        engine = get_mooncake_transfer_engine()
        assert engine is not None, "offers_weights comes with a transfer_engine"
        register_weights(engine, (slot for _, slot in self.model.weight_slots()))
        self.remote_instance_transfer_engine = engine
        self.remote_instance_transfer_engine_session_id = engine.get_session_id()

    def _make_attention_backends(
        self, layers: Iterable[RadixAttention], page_size: int
    ) -> dict[AttentionKind, AttentionBackend]:
        """Make a backend for each kind of `layers`."""
        configs = {
            layer.kind: AttentionConfig(
                num_heads=layer.num_heads,
                specs={spec.name: spec for spec in self.state_specs},
                page_size=page_size,
                dtype=self.model_config.dtype,
                device=self.config.device,
                mla=layer.mla if isinstance(layer, LatentAttention) else None,
                tp_group=self.tp_group,
                has_sinks=layer.sinks is not None,
            )
            for layer in layers
        }
        return create_attention_backends(self.config.attention_backend, configs)

    def weight_bytes(self) -> int:
        """Bytes that the model's weights take on this rank."""
        return sum(p.numel() * p.element_size() for p in self.model.parameters())

    def kv_bytes_per_token(self) -> Fraction:
        """Bytes of one token over all paged pools and layers on this rank."""
        return bytes_per_token(self.state_specs)

    def state_bytes(self) -> int:
        """Bytes of one recurrent state over all layers on this rank; 0: the model has none."""
        return bytes_per_state(self.state_specs)

    def request_bytes(self) -> int:
        """Bytes that a running request takes beside tokens and states, on this rank."""
        return bytes_per_request(self.state_specs)

    def graph_bytes(self) -> int:
        """Estimated device memory, in bytes, of captured steps; 0: there are none."""
        backends = self.attn_backends.values()
        if not self._captures_graphs or not all(backend.can_be_captured for backend in backends):
            return 0
        captures_extend = all(backend.captures_extend for backend in backends)
        largest = self.config.cuda_graph_max_bs or MAX_BATCH_SIZE
        states = (spec for spec in self.state_specs if spec.item is ItemKind.STATE)
        layer_bytes = max((spec.layer_bytes for spec in states), default=0)
        tokens = max(largest, TOKEN_COUNTS[-1] if captures_extend else 0)
        context_len = self.model_config.context_len
        by_context = sum(backend.graph_bytes(tokens, context_len) for backend in backends)
        return by_context + estimate_graph_bytes(largest, self.model_config.vocab_size, layer_bytes)

    def init_memory_pool(
        self,
        max_total_tokens: int,
        max_running_requests: int,
        longest_pass: int = 0,
        num_states: int | None = None,
    ) -> None:
        """Create the pools and the allocator; warm up and capture graphs if the device does so.

        Args:
            max_total_tokens: Slots of the device pool, a multiple of the page size.
            max_running_requests: Rows of the table of slots.
            longest_pass: New tokens of the longest prefill to warm up for; 0: only short ones.
            num_states: Slots of recurrent states; None: one for each row. Unused if the model has
                no recurrent states.

        Raises:
            ValueError: `max_total_tokens` is not a positive multiple of the page size, a kind of
                state has no pool, or the memory that SGLANG_MOONCAKE_CUSTOM_MEM_POOL names is not
                available on this machine.
        """
        page_size = self.config.page_size
        if max_total_tokens < page_size or max_total_tokens % page_size:
            raise ValueError(
                f"max_total_tokens={max_total_tokens} must be a positive multiple of "
                f"page_size={page_size}"
            )
        self._kv_memory = init_mooncake_custom_mem_pool(self.config.device)
        with self._kv_memory.use() if self._kv_memory else contextlib.nullcontext():
            self.pools = make_pools(
                self.state_specs,
                max_total_tokens,
                page_size,
                self.config.device,
                max_running_requests if num_states is None else num_states,
                max_running_requests,
            )
        self.req_to_token_pool = self._make_row_pool(max_running_requests)
        self.token_to_kv_pool = kv_pool(self.pools)
        self.token_to_kv_pool_allocator = make_allocator(self.token_to_kv_pool)
        if not self._runtime.kind.warms_up:
            return
        self._warm_up(longest_pass)
        if not self._captures_graphs:
            return
        if self.model.draft_layer is None:
            self.capture_decoding(self.model.forward)
        self._capture_prefills()

    def _warm_up(self, longest_pass: int) -> None:
        """Do the device's one-time work, most of which compiles kernels."""
        pools = self.req_to_token_pool, self.token_to_kv_pool
        work: list[Callable[[], object]] = [b.warm_up for b in self.attn_backends.values()]
        work.append(self.token_to_kv_pool_allocator.warm_up)
        work += [partial(run_step, self, batch) for batch in warm_up_batches(*pools, longest_pass)]
        work.append(partial(warm_up_masks, self.model_config.vocab_size, self.config.device))
        with progress_bar(
            logger.info, desc="Warming up", total=len(work), disable=not self.shows_progress
        ) as progress:
            for do_next in work:
                do_next()
                progress.update()

    def _make_row_pool(self, rows: int) -> ReqToTokenPool:
        # Drafts may lie beyond the end of the longest context.
        context_len = self.model_config.context_len + self.config.num_draft_tokens - 1
        device = self.config.device
        states = state_pool(self.pools.values())
        of_requests = [pool for pool in self.pools.values() if isinstance(pool, RequestPool)]
        if states is not None:
            hybrid = HybridReqToTokenPool(rows, context_len, device, states)
            hybrid.request_pools = of_requests
            return hybrid
        pool = ReqToTokenPool(rows, context_len, device)
        pool.request_pools = of_requests
        if self.config.num_draft_tokens > 1:
            config = self.model_config
            pool.last_hidden = HiddenRows(rows, config.hidden_size, config.dtype, device)
        return pool

    @property
    def _captures_graphs(self) -> bool:
        return self._runtime.kind.captures_graphs and not self.config.disable_cuda_graph

    @property
    def num_logits(self) -> int:
        """Number of logits of a token on this rank."""
        return -(-self.model_config.vocab_size // self.tp_group.size)

    def capture_decoding(self, forward: Forward) -> list[int]:
        """Capture decode steps, if all backends support it. Call it before loads exist.

        Args:
            forward: The model's `forward`, or one that also runs the draft layer.

        Returns:
            The captured batch sizes, ascending; empty: steps run without graphs.
        """
        if not self._captures_graphs:
            return []
        backends = list(self.attn_backends.items())
        if self.model.draft_layer is None:
            refusal = uncaptured(backends, lambda backend: backend.can_be_captured)
        else:
            backends += self._draft_backends.items()
            refusal = uncaptured(backends, lambda backend: backend.captures_verify)
        if refusal:
            logger.info("Decoding runs without CUDA graphs: attention %s is not captured", refusal)
            return []
        sizes = graph_batch_sizes(self.config.cuda_graph_max_bs, self.req_to_token_pool.size)
        decoding = CudaGraphRunner(
            forward,
            self.attn_backends,
            self.req_to_token_pool,
            self.pools,
            batch_sizes=sizes,
            num_logits=self.num_logits,
            show_progress=self.shows_progress,
            least_context=1 if self.model.draft_layer is None else 2,
        )
        self._graphs.append(decoding)
        return sizes

    def _capture_prefills(self) -> None:
        """Capture short prefills, if all backends support it."""
        refusal = uncaptured(self.attn_backends.items(), lambda backend: backend.captures_extend)
        if refusal:
            logger.info("Prefills run without CUDA graphs: attention %s is not captured", refusal)
            return
        config = self.model_config
        short_prefills = ExtendGraphRunner(
            self.model.forward,
            self.attn_backends,
            self.req_to_token_pool,
            self.pools,
            num_logits=self.num_logits,
            show_progress=self.shows_progress,
            chunk=(config.state_chunk or CHUNK) if config.linear_attention_layers else None,
            capture_hidden=self.model.draft_layer is not None,
        )
        self._graphs.append(short_prefills)

    @torch.inference_mode()
    def forward(self, forward_batch: ForwardBatch) -> LogitsProcessorOutput:
        """Run one step: store the new tokens' keys and values, and return the last tokens' logits.

        On CUDA this queues the work and returns. The next captured step overwrites the logits of
        this one, so queue all reads of them before it.
        """
        output = self._forward(forward_batch)
        states = forward_batch.states
        if states is not None and states.copied is not None:
            pool = state_pool(self.pools.values())
            assert pool is not None, "the step has states"
            pool.copy_from(*states.copied)
        return output

    @torch.inference_mode()
    def forward_draft(
        self,
        forward_batch: ForwardBatch,
        hidden: torch.Tensor,
    ) -> torch.Tensor:
        """Run the draft layer: store its entries of the batch's tokens.

        Args:
            forward_batch: Its rows of slots begin at position 1.
            hidden: `[num_tokens, hidden_size]`: the hidden state before each token.

        Returns:
            `[num_tokens, hidden_size]`: the layer's own hidden states.
        """
        layer, batch = self.model.draft_layer, forward_batch
        assert layer is not None, "the model was loaded with its draft layer"
        self._prepare(batch, self._draft_backends)
        return layer.forward(batch.input_ids, batch.positions, hidden, batch)

    def store_drafts(self, batch: ForwardBatch, hidden: torch.Tensor) -> None:
        """Only store the draft layer's entries of the batch's tokens; arguments as for
        `forward_draft`. It reads tokens, positions, slots and `hidden`: contexts play no part."""
        layer = self.model.draft_layer
        assert layer is not None, "the model was loaded with its draft layer"
        batch.stores_only = True
        batch.attn_backends, batch.pools = self._draft_backends, self.pools
        layer.store(batch.input_ids, batch.positions, hidden, batch)

    def _prepare(
        self, forward_batch: ForwardBatch, backends: dict[AttentionKind, AttentionBackend]
    ) -> None:
        forward_batch.attn_backends = backends
        forward_batch.pools = self.pools
        for backend in backends.values():
            backend.init_forward_metadata(forward_batch)

    def _forward(self, forward_batch: ForwardBatch) -> LogitsProcessorOutput:
        for graphs in self._graphs:
            if graphs.can_run(forward_batch):
                return graphs.replay(forward_batch)
        # Captured prefills are short, so each rank computes them whole: graphs exchange nothing.
        is_prefill = forward_batch.forward_mode is ForwardMode.EXTEND
        if self.cp_group.size > 1 and is_prefill:
            forward_batch = split_context(forward_batch, self.cp_group) or forward_batch
        self._prepare(forward_batch, self.attn_backends)
        return self.model.forward(forward_batch.input_ids, forward_batch.positions, forward_batch)
