"""Latent rows of sparse attention (DSA, also called NSA), and the indexer's keys in their slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch

from sglang.srt.mem_cache.device.base_device_pool import (
    BaseDevicePool,
    LayerOrId,
    PagedDevicePool,
    held_layers,
    refuse_memory_saver,
)
from sglang.srt.mem_cache.device.fp8_rows import FP8, GROUP, row_bytes
from sglang.srt.mem_cache.device.mla_pool import (
    MLASpec,
    MLATokenToKVPool,
    check_fp8,
    check_row_dim,
)
from sglang.srt.mem_cache.device.row_buffers import store_rows
from sglang.srt.mem_cache.device.state_spec import PoolName, StateBuffer, StateSpec


@dataclass(frozen=True, kw_only=True)
class IndexerSpec(StateSpec):
    """An indexer key per item: `index_k` `[index_head_dim]`, in the slots of the KV pool; in fp8,
    as many bytes as `fp8_rows` says.

    Raises:
        ValueError: The dtype is fp8 but not e4m3, or `StateSpec` raises it.
    """

    name: PoolName = PoolName.INDEXER
    indices_from_pool: PoolName | None = PoolName.KV
    index_head_dim: int
    """Elements of a key."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fp8(self, "indexer keys")

    @classmethod
    def of(
        cls, layers: Sequence[int], index_head_dim: int, dtype: torch.dtype, *, stride: int = 1
    ) -> IndexerSpec:
        """The spec of keys of `index_head_dim` elements in `layers`, one for each `stride` tokens.

        Raises:
            ValueError: Keys of this size have no form in fp8, or the class raises it.
        """
        width = index_head_dim
        if dtype is FP8:
            if index_head_dim > GROUP:
                raise ValueError(
                    f"config.json: index_head_dim={index_head_dim}: a key in fp8 has one scale, "
                    f"for at most {GROUP} elements; use --kv-cache-dtype auto or bfloat16"
                )
            width = row_bytes(index_head_dim, sizes=f"index_head_dim={index_head_dim}")
        return cls(
            layers=tuple(layers),
            buffers=(StateBuffer("index_k", (width,), dtype),),
            index_head_dim=index_head_dim,
            stride=stride,
        )


class NSAIndexerPool(PagedDevicePool):
    """Indexer keys of token slots.

    Attributes:
        index_k_buffer: For each layer `[(size + page_size) // stride, index_head_dim]`; in fp8
            bytes, which `fp8_rows.read_rows` reads.
    """

    host_pool = "sglang.srt.mem_cache.host.pool_kinds.NSAIndexerPoolHost"

    def __init__(
        self, spec: IndexerSpec, size: int, page_size: int, device: torch.device | str
    ) -> None:
        super().__init__(spec, size, page_size, device)
        self.index_head_dim = spec.index_head_dim
        (self.index_k_buffer,) = self.parts

    def get_index_k_buffer(self, layer_id: int) -> torch.Tensor:
        """Keys of a layer, as stored. Waits for a load that fills the layer."""
        return self.index_k_buffer[self.wait_for_layer(layer_id)]

    def set_index_k_buffer(
        self, layer: LayerOrId, loc: torch.Tensor, index_k: torch.Tensor
    ) -> None:
        """Store new keys. Does not wait, since a load fills other slots.

        Args:
            loc: int64 `[n]`: items; slots, unless an item stands for several tokens.
            index_k: `[n, index_head_dim]`, any float dtype.
        """
        buffer = self.index_k_buffer[self.place_to_write(layer)]
        store_rows(buffer, loc, index_k, self.index_head_dim)


@dataclass(frozen=True, kw_only=True)
class NSASpec(MLASpec):
    """Latent rows whose pool also makes the pool of the indexer's keys.

    A model has both specs: this one, and `indexer`.
    """

    indexer: IndexerSpec
    """Spec of the keys, in the same layers or some of them."""

    @classmethod
    def beside(
        cls,
        rows: MLASpec,
        index_head_dim: int,
        index_dtype: torch.dtype,
        layers: Sequence[int] | None = None,
        *,
        stride: int = 1,
    ) -> NSASpec:
        """The spec of `rows` with keys of `index_head_dim` elements in `layers` (None: in all), one
        for each `stride` tokens."""
        return cls(
            layers=rows.layers,
            buffers=rows.buffers,
            share=rows.share,
            kv_lora_rank=rows.kv_lora_rank,
            qk_rope_head_dim=rows.qk_rope_head_dim,
            indexer=IndexerSpec.of(
                rows.layers if layers is None else layers,
                index_head_dim,
                index_dtype,
                stride=stride,
            ),
        )


class NSATokenToKVPool(MLATokenToKVPool):
    """Latent rows and indexer keys of the same slots.

    Tiers and transfers move them as two pools, this one and `index_pool`.

    Attributes:
        index_pool: Pool of the indexer's keys.
    """

    def __init__(
        self,
        size: int,
        page_size: int,
        kv_lora_rank: int,
        dtype: torch.dtype,
        qk_rope_head_dim: int,
        layer_num: int,
        device: torch.device | str,
        index_head_dim: int,
        enable_memory_saver: bool = False,
        kv_cache_dim: int | None = None,
        start_layer: int | None = None,
        end_layer: int | None = None,
        index_buf_size: int | None = None,
    ) -> None:
        """See `MLATokenToKVPool`.

        Args:
            index_head_dim: Elements of an indexer key.
            kv_cache_dim: See `check_row_dim`.
            index_buf_size: Slots of the keys; refused unless the rows have equally many.

        Raises:
            ValueError: `kv_cache_dim` or `index_buf_size` is wrong; or see `MLATokenToKVPool`.
        """
        if index_buf_size not in (None, size):
            raise ValueError(
                f"index_buf_size={index_buf_size}: keys have the slots of the rows, {size}; leave "
                "it out"
            )
        refuse_memory_saver(enable_memory_saver)
        held = held_layers(layer_num, start_layer, end_layer)
        rows = MLASpec.of(held, kv_lora_rank, qk_rope_head_dim, dtype)
        check_row_dim("kv_cache_dim", kv_cache_dim, rows)
        spec = NSASpec.beside(rows, index_head_dim, dtype)
        self._set_up(spec, size, page_size, device)

    def _set_up(self, spec: MLASpec, size: int, page_size: int, device: torch.device | str) -> None:
        assert isinstance(spec, NSASpec), f"{type(self).__name__} cannot hold {spec}"
        super()._set_up(spec, size, page_size, device)
        self.index_pool = NSAIndexerPool(spec.indexer, size, page_size, device)

    @property
    def auxiliary_pools(self) -> tuple[BaseDevicePool, ...]:
        return (self.index_pool,)

    def get_index_k_buffer(self, layer_id: int) -> torch.Tensor:
        """See `NSAIndexerPool`."""
        return self.index_pool.get_index_k_buffer(layer_id)

    def set_index_k_buffer(
        self, layer: LayerOrId, loc: torch.Tensor, index_k: torch.Tensor
    ) -> None:
        """See `NSAIndexerPool`."""
        self.index_pool.set_index_k_buffer(layer, loc, index_k)

    # -- SGLang's names. SGLang keeps the fp8 keys of a page, and behind them their scales. Here the
    # -- scale of a key in fp8 is behind the key; other keys have none.

    @property
    def index_k_with_scale_buffer(self) -> list[torch.Tensor]:
        """For each layer the keys, see `NSAIndexerPool`."""
        return self.index_pool.index_k_buffer

    @property
    def index_k_with_scale_buffer_dtype(self) -> torch.dtype:
        """Dtype of the keys."""
        return self.index_pool.dtype

    def get_index_k_with_scale_buffer(self, layer_id: int) -> torch.Tensor:
        """The keys of a layer. Waits for a load that fills the layer."""
        return self.get_index_k_buffer(layer_id)

    def get_index_k_continuous(
        self, layer_id: int, seq_len: int, page_indices: torch.Tensor
    ) -> torch.Tensor:
        """A copy of the stored keys of a sequence, `[seq_len, index_head_dim]` or, in fp8, bytes.

        Args:
            seq_len: Keys.
            page_indices: int `[n]`: its pages in order, at least what the keys need.
        """
        size = self.index_pool.page_items
        within = torch.arange(size, device=page_indices.device)
        items = page_indices.to(torch.int64)[:, None] * size + within
        return self.get_index_k_buffer(layer_id)[items.view(-1)[:seq_len]]

    def get_index_k_scale_continuous(self, *_: object, **__: object) -> NoReturn:
        """Refused: there are no scales apart from the keys."""
        raise _no_scales("get_index_k_scale_continuous")

    def get_index_k_scale_buffer(self, *_: object, **__: object) -> NoReturn:
        """Refused: there are no scales apart from the keys."""
        raise _no_scales("get_index_k_scale_buffer")

    def set_index_k_scale_buffer(self, *_: object, **__: object) -> NoReturn:
        """Refused: there are no scales apart from the keys."""
        raise _no_scales("set_index_k_scale_buffer")

    def move_kv_cache(self, tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> None:
        super().move_kv_cache(tgt_loc, src_loc)
        self.index_pool.move_kv_cache(tgt_loc, src_loc)

    def get_kv_size_bytes(self) -> tuple[int, int]:
        """Bytes of rows and keys, and 0 for the values, which are a part of the rows."""
        keys = sum(buffer.nbytes for buffer in self.index_pool.index_k_buffer)
        return super().get_kv_size_bytes()[0] + keys, 0


def _no_scales(name: str) -> ValueError:
    return ValueError(
        f"{name}: the indexer's keys have no scales, or in fp8 each has its own behind it; use "
        "get_index_k_buffer, get_index_k_continuous or set_index_k_buffer"
    )


DSATokenToKVPool = NSATokenToKVPool
"""The same class by the later name of the attention, DSA."""
