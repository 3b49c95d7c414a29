"""Attention on CUDA by the `flashinfer` library, over the pages of the pool.

The library plans every batch on the CPU, and compiles its kernels on first use with `nvcc` and
`ninja`. Prompts without a prefix read the keys and values just computed; the pool has the same
values, because its dtype is the model's.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, NamedTuple

import flashinfer
import torch

from sglang.srt.constants import MIB
from sglang.srt.hardware_backend.device_runtime import device_runtime
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend, AttentionConfig
from sglang.srt.layers.forward_batch_info import AttentionInputs, AttentionLayer, ForwardBatch
from sglang.srt.layers.triton_ops.attention.page_indices import page_indices

logger = logging.getLogger(__name__)

WORKSPACE_BYTES = 256 * MIB
"""Memory for partial results of split contexts, shared by all wrappers."""
TENSOR_CORE_GROUP = 4
"""Fewest query heads per KV head for which decoding uses tensor cores. The other kernels exist only
for groups of 1, 2, 3, 4 and 8."""


class _Pages(NamedTuple):
    """The pages of a batch's contexts."""

    indptr: torch.Tensor
    """int32 `[bs + 1]`, page-locked: begin and end of each request's pages in `indices`."""
    indices: torch.Tensor
    """int32 `[pages]` on the device."""
    last_page_len: torch.Tensor
    """int32 `[bs]`, page-locked: tokens in each request's last page."""


class FlashInferAttnBackend(AttentionBackend):
    """Holds the library's wrappers, which hold the plans.

    A wrapper copies its plan to the device through its own page-locked memory. The next plan waits
    for that copy, which runs only after the steps queued before it.
    """

    can_be_captured = True
    attends_new_tokens_directly = True
    """If true, prompts without a prefix read the keys and values just computed; if false (for
    comparisons), those in the pool."""
    short_tokens = 256
    """Most new tokens of a batch with prefixes for the kernels that split contexts. The kernels for
    Hopper do not split, so a short question after a long prefix would leave the device idle. On an
    H200, after 32,000 tokens, 64 new tokens take 0.12 ms split and 0.43 ms unsplit; 512 take 0.82
    and 0.45 ms."""

    def __init__(self, config: AttentionConfig) -> None:
        self._config = config
        self._runtime = device_runtime(config.device)
        self._scaling = config.head_dim**-0.5
        self._use_tensor_cores = config.group >= TENSOR_CORE_GROUP
        self._workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=config.device)
        self._paged: Any = flashinfer.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "NHD")
        self._short: Any = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
            self._workspace, "NHD", backend="fa2"
        )
        self._ragged: Any = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(self._workspace, "NHD")
        self._eager: Any = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace, "NHD", use_tensor_cores=self._use_tensor_cores
        )
        self._captured: dict[int, Any] = {}
        """Wrappers by batch size. Their buffers stay at the addresses that graphs read."""
        self._captured_indices: torch.Tensor | None = None
        self._extending = self._paged
        self._decoding = self._eager
        self._plan_copied = self._runtime.make_event()
        self._has_planned = False

    def warm_up(self) -> None:
        """Compile the kernels of decoding; the warm-up batches compile those of prefill.

        Raises:
            RuntimeError: Compilation failed; with the compiler's message.
        """
        logger.info("Loading FlashInfer's kernels; those not compiled before take minutes")
        with self._planning():
            first_page = torch.zeros(1, dtype=torch.int32, device=self._config.device)
            pages = _Pages(_pinned([0, 1]), first_page, _pinned([1]))
            self._plan_decode(self._eager, pages)

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        with self._planning():
            if forward_batch.forward_mode.is_decode():
                self._decoding = self._eager
                self._plan_decode(self._eager, self._pages(forward_batch))
            else:
                self._plan_extend(forward_batch)

    def init_forward_metadata_graph(self, forward_batch: ForwardBatch) -> None:
        wrapper = self._captured.get(forward_batch.batch_size)
        if wrapper is None:
            wrapper = self._wrapper_for_graph(forward_batch)
            self._captured[forward_batch.batch_size] = wrapper
        self._decoding = wrapper
        with self._planning():
            self._plan_decode(wrapper, self._pages(forward_batch))

    def forward_extend(
        self, inputs: AttentionInputs, layer: AttentionLayer, forward_batch: ForwardBatch
    ) -> torch.Tensor:
        q, k, v = inputs.q, inputs.k, inputs.v
        assert layer.scaling == self._scaling
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if self._extending is self._ragged:
            self._ragged.run(q, k, v, out=out)
        else:
            self._extending.run(q, self._paged_pool(layer, forward_batch), out=out)
        out = out.flatten(1)
        return out if inputs.rows is None else out.index_select(0, inputs.rows)

    def forward_decode(
        self, q: torch.Tensor, layer: AttentionLayer, forward_batch: ForwardBatch
    ) -> torch.Tensor:
        assert layer.scaling == self._scaling
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        self._decoding.run(q, self._paged_pool(layer, forward_batch), out=out)
        return out.flatten(1)

    @contextmanager
    def _planning(self) -> Iterator[None]:
        """Context that first waits until the last plan's copy has left the shared memory."""
        if self._has_planned:
            self._plan_copied.synchronize()
        yield
        self._plan_copied.record()
        self._has_planned = True

    def _plan_extend(self, batch: ForwardBatch) -> None:
        prefix_lens, extend_lens = batch.extend_prefix_lens_cpu, batch.extend_seq_lens_cpu
        assert prefix_lens is not None
        assert extend_lens is not None
        queries = _pinned([0, *accumulate(extend_lens)])
        shape = {
            "num_qo_heads": self._config.num_heads,
            "num_kv_heads": self._config.num_kv_heads,
            "head_dim_qk": self._config.head_dim,
            "causal": True,
            "sm_scale": self._scaling,
            "q_data_type": self._config.dtype,
            "kv_data_type": self._config.dtype,
        }
        if self.attends_new_tokens_directly and not any(prefix_lens):
            self._extending = self._ragged
            self._ragged.plan(qo_indptr=queries, kv_indptr=queries, **shape)
            return
        self._extending = self._short if sum(extend_lens) <= self.short_tokens else self._paged
        pages = self._pages(batch)
        self._extending.plan(
            qo_indptr=queries,
            paged_kv_indptr=pages.indptr,
            paged_kv_indices=pages.indices,
            paged_kv_last_page_len=pages.last_page_len,
            page_size=self._config.page_size,
            **shape,
        )

    def _plan_decode(self, wrapper: Any, pages: _Pages) -> None:
        wrapper.plan(
            indptr=pages.indptr,
            indices=pages.indices,
            last_page_len=pages.last_page_len,
            num_qo_heads=self._config.num_heads,
            num_kv_heads=self._config.num_kv_heads,
            head_dim=self._config.head_dim,
            page_size=self._config.page_size,
            sm_scale=self._scaling,
            q_data_type=self._config.dtype,
            kv_data_type=self._config.dtype,
        )

    def _pages(self, batch: ForwardBatch) -> _Pages:
        page = self._config.page_size
        counts = [-(-length // page) for length in batch.seq_lens_cpu]
        indptr = _pinned([0, *accumulate(counts)])
        indices = page_indices(
            batch.req_to_token_pool.req_to_token,
            batch.req_pool_indices,
            self._runtime.stage_to_device(indptr),
            total=sum(counts),
            longest=max(counts),
            page_size=page,
        )
        last = _pinned([(length - 1) % page + 1 for length in batch.seq_lens_cpu])
        return _Pages(indptr, indices, last)

    def _wrapper_for_graph(self, batch: ForwardBatch) -> Any:
        device = self._config.device
        if self._captured_indices is None:
            rows, context_len = batch.req_to_token_pool.req_to_token.shape
            most = rows * -(-context_len // self._config.page_size)
            self._captured_indices = torch.empty(most, dtype=torch.int32, device=device)
        size = batch.batch_size
        wrapper: Any = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace,
            "NHD",
            use_cuda_graph=True,
            use_tensor_cores=self._use_tensor_cores,
            paged_kv_indptr_buffer=torch.zeros(size + 1, dtype=torch.int32, device=device),
            paged_kv_indices_buffer=self._captured_indices,
            paged_kv_last_page_len_buffer=torch.ones(size, dtype=torch.int32, device=device),
        )
        return wrapper

    def _paged_pool(
        self, layer: AttentionLayer, batch: ForwardBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The layer's keys and values, each `[pages, page_size, num_kv_heads, head_dim]`."""
        k, v = batch.token_to_kv_pool.get_kv_buffer(layer.layer_id)
        shape = (-1, self._config.page_size, self._config.num_kv_heads, self._config.head_dim)
        return k.view(shape), v.view(shape)


def _pinned(values: Sequence[int]) -> torch.Tensor:
    """int32 `[n]` in page-locked memory, which is not reused while a copy from it is in flight."""
    return torch.tensor(values, dtype=torch.int32).pin_memory()
