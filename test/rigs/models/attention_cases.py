"""Cases for tests and benchmarks of attention: paged contexts, batches, reference attention."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sglang.srt.layers.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.device.memory_pool import MHATokenToKVPool, ReqToTokenPool

FP8 = torch.float8_e4m3fn


class PagedContexts:
    """Random keys and values in pages in random order, and a table of requests.

    Attributes:
        k, v: `[slots, kv_heads, head_dim]`.
        table: int32 `[requests + 2, tokens]`: slots; random values in unused entries.
        rows: int64 `[requests]`: the requests' rows, in random order.
    """

    def __init__(
        self,
        lens: Sequence[int],
        kv_heads: int,
        head_dim: int,
        *,
        page_size: int,
        dtype: torch.dtype,
        device: str,
    ) -> None:
        self.lens, self.page_size, self.device = list(lens), page_size, device
        generator = torch.Generator().manual_seed(sum(lens) + page_size)
        pages = [-(-length // page_size) for length in lens]
        slots = (sum(pages) + 3) * page_size
        self.k, self.v = (
            torch.randn(slots, kv_heads, head_dim, generator=generator).to(device).to(dtype)
            for _ in range(2)
        )
        order = torch.randperm(sum(pages) + 2, generator=generator) + 1
        self.table = torch.randint(
            0, slots, (len(lens) + 2, max(lens) + 7), dtype=torch.int32, generator=generator
        )
        self.rows = torch.randperm(len(lens) + 2, generator=generator)[: len(lens)]
        used = 0
        for row, length, count in zip(self.rows.tolist(), lens, pages, strict=True):
            firsts = order[used : used + count].unsqueeze(1) * page_size
            flat = (firsts + torch.arange(page_size)).view(-1)[:length]
            self.table[row, :length] = flat.to(torch.int32)
            used += count
        self.table, self.rows = self.table.to(device), self.rows.to(device)

    def context(self, request: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values (fp32) of the first `length` tokens of a request, gathered."""
        slots = self.table[self.rows[request], :length].long()
        k, v = (x.float()[slots] for x in (self.k, self.v))
        return k, v

    def pools(self) -> tuple[MHATokenToKVPool, ReqToTokenPool]:
        """Pools that contain these contexts as layer 0."""
        size, dtype = self.k.shape[0] - self.page_size, self.k.dtype
        kv_heads, head_dim = self.k.shape[1:]
        pool = MHATokenToKVPool(size, self.page_size, dtype, kv_heads, head_dim, 1, self.device)
        for buffer, values in ((pool.k_buffer[0], self.k), (pool.v_buffer[0], self.v)):
            buffer.copy_(values.view(pool.store_dtype))
        table = ReqToTokenPool(self.table.shape[0], self.table.shape[1], self.device)
        table.req_to_token[:-1].copy_(self.table)
        return pool, table

    def extend_batch(self, prefixes: Sequence[int]) -> ForwardBatch:
        """A step that computes the tokens after the first `prefixes` tokens of each request."""
        new = [length - prefix for length, prefix in zip(self.lens, prefixes, strict=True)]
        rows = self.rows.tolist()
        loc = torch.cat(
            [self.table[r, p:n].long() for r, p, n in zip(rows, prefixes, self.lens, strict=True)]
        )
        batch = self._batch(ForwardMode.EXTEND, loc)
        batch.extend_prefix_lens_cpu, batch.extend_seq_lens_cpu = list(prefixes), new
        return batch

    def decode_batch(self) -> ForwardBatch:
        """A step that computes the last token of each request."""
        lens = torch.tensor(self.lens, device=self.device)
        return self._batch(ForwardMode.DECODE, self.table[self.rows, lens - 1].long())

    def _batch(self, mode: ForwardMode, loc: torch.Tensor) -> ForwardBatch:
        pool, table = self.pools()
        return ForwardBatch(
            forward_mode=mode,
            input_ids=loc,
            positions=loc,
            req_pool_indices=self.rows,
            req_pool_indices_cpu=self.rows.tolist(),
            seq_lens=torch.tensor(self.lens, device=self.device),
            seq_lens_cpu=self.lens,
            out_cache_loc=loc,
            req_to_token_pool=table,
            token_to_kv_pool=pool,
        )


def attention_layer(heads: int, kv_heads: int, head_dim: int) -> RadixAttention:
    """The attention of layer 0 of a model."""
    return RadixAttention(heads, head_dim, head_dim**-0.5, kv_heads, 0)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    prefix: int,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Reference attention in fp64, for q `[new, heads, dim]` at positions from `prefix` on.

    Args:
        window: Last tokens that a token sees, itself included; None: all.
        sinks: `[heads]`: one more logit of each softmax, without a value.
    """
    group = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * q.shape[-1] ** -0.5
    q_pos = torch.arange(prefix, prefix + q.shape[0], device=q.device).unsqueeze(1)
    k_pos = torch.arange(k.shape[0], device=q.device)
    seen = k_pos <= q_pos if window is None else (k_pos <= q_pos) & (k_pos > q_pos - window)
    scores.masked_fill_(~seen, -torch.inf)
    if sinks is not None:
        last = sinks.double().view(-1, 1, 1).expand(-1, q.shape[0], 1)
        scores = torch.cat([scores, last], dim=-1)
    probs = scores.softmax(dim=-1)[..., : k.shape[0]]
    return torch.einsum("hqk,khd->qhd", probs, v).flatten(1)


def queries(
    tokens: int, heads: int, head_dim: int, dtype: torch.dtype, device: str
) -> torch.Tensor:
    """Random queries as attention receives them: a slice of the projection."""
    generator = torch.Generator().manual_seed(tokens)
    wide = torch.randn(tokens, heads + 2, head_dim, generator=generator)
    return wide.to(dtype).to(device)[:, :heads]


def assert_close(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> None:
    """Assert that `got` equals the reference `want` within the accuracy of `dtype`.

    Dtypes of two bytes are rounded three times: queries times the scale, weights, sums. Each time
    changes a number by half of bf16's epsilon at most.
    """
    error = float((got.double() - want).norm() / want.norm())
    assert error < (1e-5 if dtype is torch.float32 else 3 * torch.finfo(torch.bfloat16).eps / 2)
