"""What every attention backend offers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Final, NamedTuple, NewType

import torch

from sglang.srt.configs.mla_config import MLAConfig
from sglang.srt.mem_cache.device.state_spec import KVSpec, PoolName, StateSpec

if TYPE_CHECKING:
    from sglang.srt.layers.forward_batch_info import ForwardBatch
    from sglang.srt.layers.radix_attention import RadixAttention


AttentionKind = NewType("AttentionKind", str)
"""What an attention layer computes and keeps, which decides who can run it."""

FULL_ATTENTION: Final = AttentionKind("full")
"""Every token sees all tokens up to itself; keys and values are kept per head."""

MLA: Final = AttentionKind("mla")
"""As `FULL_ATTENTION`, but a latent row is kept that all heads share."""

DSA: Final = AttentionKind("dsa")
"""As `MLA`, but every token sees only the tokens that an indexer chooses."""


class IndexQuery(NamedTuple):
    """What an indexer asks for some tokens: which tokens of their contexts are read."""

    q: torch.Tensor
    """`[num_tokens, heads, head_dim]` of the indexer."""
    weights: torch.Tensor
    """fp32 `[num_tokens, heads]`: of each head's positive products with the keys; scaled."""
    topk: int
    """Tokens to choose; contexts that are not longer are read as a whole."""

    def of(self, tokens: slice | torch.Tensor) -> IndexQuery:
        """The same for some of the tokens: a slice, or their places (int64 `[n]`)."""
        return IndexQuery(self.q[tokens], self.weights[tokens], self.topk)


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """What the attention layers of one kind have in common, on this rank."""

    num_heads: int
    """Of queries; a multiple of `num_kv_heads`."""
    specs: Mapping[PoolName, StateSpec]
    """All state that the model keeps."""
    page_size: int
    """Tokens of a page of the pools."""
    dtype: torch.dtype
    """Of queries, and of keys and values before they are stored."""
    device: str
    mla: MLAConfig | None = None
    """Sizes of latent attention, for the kinds that have it."""

    @cached_property
    def kv(self) -> KVSpec:
        """Keys and values per head, for the kinds that keep them."""
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
        """Of the pool."""
        return self.kv.dtype

    @cached_property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.num_heads // self.num_kv_heads


class AttentionBackend(ABC):
    """Attention of one model runner, used by the thread that runs the model, batch after batch.

    Holds the plan of the batch that is being run.
    """

    can_be_captured = False
    """Decoding may be captured in a graph and replayed, with `init_forward_metadata_graph`
    before each."""

    captures_extend = False
    """Short prefills may be captured, with `init_forward_metadata_extend_graph` before each."""

    @abstractmethod
    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Plan the batch, once for all layers: runs of slots, masks."""

    def init_forward_metadata_graph(self, forward_batch: ForwardBatch) -> None:
        """Plan a decode step that a graph runs: called before the capture and before each replay.

        What the captured kernels read must stay where it was when the size was first seen. The
        default is for backends that plan nothing for decoding.

        Args:
            forward_batch: Of a captured size, with the same tensors every time, which hold the
                step's input; `seq_lens_cpu` is the step's. Padding is requests of one token.
        """

    def init_forward_metadata_extend_graph(
        self, forward_batch: ForwardBatch, num_tokens: int, num_requests: int
    ) -> None:
        """Plan a short prefill that graphs run: called before the capture and before each replay.

        What the captured kernels read must stay where it was when the size was first seen. For
        backends with `captures_extend`.

        Args:
            forward_batch: The step as it is, of at most `num_tokens` and `num_requests`.
            num_tokens: Of the graphs: those behind the step's own attend to nothing.
            num_requests: Likewise.
        """
        raise NotImplementedError(type(self).__name__)

    def graph_bytes(self, num_tokens: int, context_len: int) -> int:
        """Device memory that captured steps of `num_tokens` hold, where it depends on the longest
        context that there can be."""
        return 0

    def warm_up(self) -> None:
        """Pay what the first use of a library costs, before the first request waits for it."""

    @abstractmethod
    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend from new tokens to their prefix and, causally, to each other.

        With `rows`, each request's last new token, only the output of these tokens is wanted, and a
        backend may leave out the rest. Shapes as in `RadixAttention.forward`.
        """

    @abstractmethod
    def forward_decode(
        self, q: torch.Tensor, layer: RadixAttention, forward_batch: ForwardBatch
    ) -> torch.Tensor:
        """Attend from one token of each request to its whole context, which the pool holds."""

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        rows: torch.Tensor | None = None,
        *,
        index: IndexQuery | None = None,
    ) -> torch.Tensor:
        """Store K and V, then attend; shapes as in `RadixAttention.forward`.

        `index` is for kinds of attention that choose what is read.

        Storing comes first and writes other slots than any load in flight; reading the pool
        is what waits for this layer's load, so that copying hides behind the layers before.
        """
        assert index is None, f"{type(self).__name__} reads whole contexts"
        if save_kv_cache:
            forward_batch.token_to_kv_pool.set_kv_buffer(layer, forward_batch.out_cache_loc, k, v)
        if forward_batch.forward_mode.is_decode():
            return self.forward_decode(q, layer, forward_batch)
        return self.forward_extend(q, k, v, layer, forward_batch, rows)
