"""Interface of attention backends."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch

from sglang.srt.configs.mla_config import MLAConfig
from sglang.srt.distributed.tensor_group import SingleTensorGroup, TensorGroup
from sglang.srt.layers.forward_batch_info import AttentionInputs, AttentionLayer, ForwardBatch
from sglang.srt.layers.triton_ops.arguments import RoundedRows, ScaledWeight
from sglang.srt.mem_cache.device.state_spec import KVSpec, PoolName, StateSpec


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """Common settings of the attention layers of one kind, on this rank."""

    num_heads: int
    """Query heads on this rank; a multiple of `num_kv_heads`."""
    specs: Mapping[PoolName, StateSpec]
    """Specs of all state that the model caches, by pool."""
    page_size: int
    """Tokens per page of the pools."""
    dtype: torch.dtype
    """Dtype of queries, keys and values, before they are stored."""
    device: str
    mla: MLAConfig | None = None
    """Sizes of latent attention, for the kinds that have it."""
    has_sinks: bool = False
    """True if the layers have `RadixAttention.sinks`."""
    tp_group: TensorGroup = field(default_factory=SingleTensorGroup)
    """The ranks that have the other heads of the same tokens."""

    @cached_property
    def kv(self) -> KVSpec:
        """Spec of the KV pool, for kinds that cache keys and values per head."""
        spec = self.specs[PoolName.KV]
        assert isinstance(spec, KVSpec), f"{spec} has no keys and values per head"
        return spec

    @cached_property
    def num_kv_heads(self) -> int:
        """KV heads on this rank."""
        return self.kv.head_num

    @cached_property
    def head_dim(self) -> int:
        """Elements of a key of one head; values have as many."""
        return self.kv.head_dim

    @cached_property
    def kv_dtype(self) -> torch.dtype:
        """Dtype of the KV pool."""
        return self.kv.dtype

    @cached_property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.num_kv_heads


class AttentionBackend(ABC):
    """Attention of one model runner, with the plan of the current batch. Only the thread that runs
    the model uses it.
    """

    rotates_in_decoding = False
    """True if decode steps take queries and keys that are not rotated, with their rotation."""

    can_be_captured = False
    """True if graphs can capture decode steps; `init_forward_metadata_graph` runs before each
    capture and replay."""

    captures_extend = False
    """True if graphs can capture short prefills; `init_forward_metadata_extend_graph` runs before
    each capture and replay."""

    captures_verify = False
    """True if graphs can capture verifications, and decode steps too: `init_forward_metadata` does
    nothing for them."""

    @abstractmethod
    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Plan the batch (runs of slots, masks), once for all layers."""

    def init_forward_metadata_graph(self, forward_batch: ForwardBatch) -> None:
        """Plan a decode step that a graph runs. Called before the capture and before each replay.

        Buffers that captured kernels read must stay at the addresses of the first call for a size.
        The default, for backends that decode without a plan, does nothing.

        Args:
            forward_batch: A batch of a captured size. Its tensors are the same every time and hold
                the step's input; `seq_lens_cpu` is new. Padding requests have one token.
        """

    def init_forward_metadata_extend_graph(
        self, forward_batch: ForwardBatch, num_tokens: int, num_requests: int
    ) -> None:
        """Plan a short prefill that graphs run. Called before the capture and before each replay.

        Buffers that captured kernels read must stay at the addresses of the first call for a size.
        Only backends with `captures_extend` implement this.

        Args:
            forward_batch: The step without padding, of at most `num_tokens` and `num_requests`.
            num_tokens: Tokens that the graphs compute; the padding tokens attend to nothing.
            num_requests: Requests that the graphs compute.
        """
        raise NotImplementedError(type(self).__name__)

    def graph_bytes(self, num_tokens: int, context_len: int) -> int:
        """Device memory, in bytes, of captured steps of `num_tokens`, if it grows with
        `context_len`, the longest possible context in tokens."""
        return 0

    def warm_up(self) -> None:
        """Do one-time work of libraries (plans, compiled kernels) before the first request."""

    @abstractmethod
    def forward_extend(
        self, inputs: AttentionInputs, layer: AttentionLayer, forward_batch: ForwardBatch
    ) -> torch.Tensor:
        """Attend from new tokens to their prefix and, causally, to each other.

        With `rows`, only each request's last new token attends and has an output.
        """

    @abstractmethod
    def forward_decode(
        self, q: torch.Tensor, layer: AttentionLayer, forward_batch: ForwardBatch
    ) -> torch.Tensor:
        """Attend from one token of each request, `q` `[bs, num_heads, head_dim]`, to its
        context."""

    def forward_decode_gated(
        self,
        q: torch.Tensor,
        gates: torch.Tensor,
        layer: AttentionLayer,
        forward_batch: ForwardBatch,
    ) -> torch.Tensor | None:
        """`forward_decode`, multiplied by the sigmoid of `gates`, which have the shape of `q`.
        None: the backend leaves the gates to the caller."""
        return None

    def forward_decode_rounded(
        self,
        q: torch.Tensor,
        weight: ScaledWeight,
        layer: AttentionLayer,
        forward_batch: ForwardBatch,
    ) -> RoundedRows | None:
        """`forward_decode`, and `ForwardBatch.begin_layer` before, rounded as `round_rows` does for
        the product with `weight`. None: the backend leaves both to the caller."""
        return None

    def forward(
        self, inputs: AttentionInputs, layer: AttentionLayer, forward_batch: ForwardBatch
    ) -> torch.Tensor:
        """Store K and V, then attend. Returns what `RadixAttention.forward` does, without gates.

        Storing comes first, into slots that no load in flight writes. Reading the pool waits for
        this layer's load, which overlaps with earlier layers.
        """
        assert inputs.index_query is None, f"{type(self).__name__} reads whole contexts"
        self.store(inputs, layer, forward_batch)
        if forward_batch.forward_mode.is_decode():
            return self.forward_decode(inputs.q, layer, forward_batch)
        return self.forward_extend(inputs, layer, forward_batch)

    @staticmethod
    def store(inputs: AttentionInputs, layer: AttentionLayer, forward_batch: ForwardBatch) -> None:
        """Store K and V, unless they are stored already."""
        if inputs.save_kv_cache:
            pool, loc = forward_batch.token_to_kv_pool, forward_batch.out_cache_loc
            pool.set_kv_buffer(layer, loc, inputs.k, inputs.v)
