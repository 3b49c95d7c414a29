"""Latent rows of multi-head latent attention (MLA).

All heads share a token's row: the latent vector that keys and values are projected from, then the
rotated part of the key. It is the same on every rank. `fp8_rows.py` has the form of rows in fp8.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sglang.srt.mem_cache.device.base_device_pool import (
    FP8_DTYPES,
    LayerOrId,
    PagedDevicePool,
    held_layers,
    refuse_memory_saver,
)
from sglang.srt.mem_cache.device.fp8_rows import FP8, row_bytes
from sglang.srt.mem_cache.device.memory_pool import KVCache
from sglang.srt.mem_cache.device.row_buffers import gather_rows, store_rows
from sglang.srt.mem_cache.device.state_spec import PoolName, StateBuffer, StateSpec


def check_fp8(spec: StateSpec, what: str) -> None:
    """Raise ValueError if `spec` is in another fp8 than e4m3; `what` names the values."""
    if spec.dtype in FP8_DTYPES and spec.dtype is not FP8:
        dtype = str(spec.dtype).removeprefix("torch.")
        raise ValueError(
            f"state '{spec.name}': {what} are not kept in {dtype}; "
            "use --kv-cache-dtype auto, bfloat16 or fp8_e4m3"
        )


def check_row_dim(name: str, given: int | None, spec: MLASpec) -> None:
    """Raise ValueError unless the argument `name` is None or the width of a stored row."""
    width = spec.buffers[0].shape[-1]
    if given not in (None, width):
        unit = "bytes" if spec.dtype is FP8 else "elements"
        raise ValueError(
            f"{name}={given}: rows of {width} {unit} are kept, latent vector and rotated part "
            "behind each other; leave it out"
        )


@dataclass(frozen=True, kw_only=True)
class MLASpec(StateSpec):
    """A latent row per token: `latent` `[1, kv_lora_rank + qk_rope_head_dim]`; in fp8, as many
    bytes as `fp8_rows` says.

    Raises:
        ValueError: The dtype is fp8 but not e4m3, or `StateSpec` raises it.
    """

    name: PoolName = PoolName.KV
    kv_lora_rank: int
    """Elements of the latent vector, at the row's start."""
    qk_rope_head_dim: int
    """Elements of the rotated part of the key, which follows the latent vector."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fp8(self, "latent rows of MLA")

    @classmethod
    def of(
        cls,
        layers: Sequence[int],
        kv_lora_rank: int,
        qk_rope_head_dim: int,
        dtype: torch.dtype,
    ) -> MLASpec:
        """The spec of rows of `kv_lora_rank + qk_rope_head_dim` elements in `layers`.

        Raises:
            ValueError: Rows of these sizes have no form in fp8, or the class raises it.
        """
        width = kv_lora_rank + qk_rope_head_dim
        if dtype is FP8:
            sizes = f"kv_lora_rank={kv_lora_rank}, qk_rope_head_dim={qk_rope_head_dim}"
            width = row_bytes(kv_lora_rank, qk_rope_head_dim, sizes=sizes)
        return cls(
            layers=tuple(layers),
            buffers=(StateBuffer("latent", (1, width), dtype),),
            kv_lora_rank=kv_lora_rank,
            qk_rope_head_dim=qk_rope_head_dim,
        )

    @property
    def row_dim(self) -> int:
        """Elements of a row as attention reads it."""
        return self.kv_lora_rank + self.qk_rope_head_dim


class MLATokenToKVPool(KVCache):
    """Latent rows of multi-head latent attention.

    The keys of a layer are its whole rows, the values their latent part: one tensor, one head.

    In fp8 they are bytes, which `fp8_rows.read_rows` reads.

    Attributes:
        kv_buffer: For each layer `[size + page_size, 1, kv_cache_dim]` of `store_dtype`.
        kv_cache_dim: `kv_lora_rank + qk_rope_head_dim`, or bytes of a row in fp8.
    """

    host_pool = "sglang.srt.mem_cache.host.pool_kinds.MLATokenToKVPoolHost"

    def __init__(
        self,
        size: int,
        page_size: int,
        dtype: torch.dtype,
        kv_lora_rank: int,
        qk_rope_head_dim: int,
        layer_num: int,
        device: torch.device | str,
        enable_memory_saver: bool = False,
        start_layer: int | None = None,
        end_layer: int | None = None,
        use_dsa: bool = False,
        override_kv_cache_dim: int | None = None,
    ) -> None:
        """SGLang's arguments, for consecutive layers; `from_spec` takes any spec.

        Args:
            dtype: Dtype of the rows.
            kv_lora_rank: Elements of the latent vector.
            qk_rope_head_dim: Elements of the rotated part of the key.
            enable_memory_saver: Refused.
            start_layer: See `held_layers`; so is `end_layer`.
            use_dsa: Refused: the pool of such a model is a `DSATokenToKVPool`.
            override_kv_cache_dim: See `check_row_dim`.
        """
        refuse_memory_saver(enable_memory_saver)
        if use_dsa:
            raise ValueError("use_dsa: make a DSATokenToKVPool, which has the indexer's keys too")
        held = held_layers(layer_num, start_layer, end_layer)
        spec = MLASpec.of(held, kv_lora_rank, qk_rope_head_dim, dtype)
        check_row_dim("override_kv_cache_dim", override_kv_cache_dim, spec)
        self._set_up(spec, size, page_size, device)

    def _set_up(self, spec: MLASpec, size: int, page_size: int, device: torch.device | str) -> None:
        PagedDevicePool.__init__(self, spec, size, page_size, device)
        self.kv_lora_rank = spec.kv_lora_rank
        self.qk_rope_head_dim = spec.qk_rope_head_dim
        (self.kv_buffer,) = self.parts
        self.kv_cache_dim = self.kv_buffer[0].shape[-1]

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        """Whole rows of a layer, as stored. Waits for a load that fills the layer."""
        return self.kv_buffer[self.wait_for_layer(layer_id)]

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        """The latent part of the stored rows, as a view. Waits for a load that fills the layer."""
        return self._latent(self.get_key_buffer(layer_id))

    def get_kv_buffer(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        rows = self.get_key_buffer(layer_id)
        return rows, self._latent(rows)

    def kv_buffer_to_write(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Whole rows of a layer, and their latent part. Does not wait."""
        rows = self.kv_buffer[self.place_to_write(layer_id)]
        return rows, self._latent(rows)

    def set_kv_buffer(
        self, layer: LayerOrId, loc: torch.Tensor, cache_k: torch.Tensor, cache_v: torch.Tensor
    ) -> None:
        """Store the rows of new tokens.

        Args:
            loc: int64 `[n]`: slots.
            cache_k: `[n, 1, kv_lora_rank + qk_rope_head_dim]`: whole rows, any float dtype.
            cache_v: The latent part of the rows. It is not read, since `cache_k` has it.
        """
        buffer = self.kv_buffer[self.place_to_write(layer)]
        store_rows(buffer, loc, cache_k, self.kv_lora_rank)

    def set_mla_kv_buffer(
        self,
        layer: LayerOrId,
        loc: torch.Tensor,
        cache_k_nope: torch.Tensor,
        cache_k_rope: torch.Tensor,
    ) -> None:
        """Store the rows of new tokens, given in two parts. Does not wait.

        Args:
            loc: int64 `[n]`: slots.
            cache_k_nope: `[n, kv_lora_rank]` or `[n, 1, kv_lora_rank]`: latent vectors.
            cache_k_rope: `[n, qk_rope_head_dim]` or `[n, 1, qk_rope_head_dim]`: rotated parts.
        """
        count = len(loc)
        latent = cache_k_nope.view(count, 1, self.kv_lora_rank)
        rope = cache_k_rope.view(count, 1, self.qk_rope_head_dim)
        self.set_kv_buffer(layer, loc, torch.cat((latent, rope), dim=-1), latent)

    def get_mla_kv_buffer(
        self,
        layer: LayerOrId,
        loc: torch.Tensor,
        dst_dtype: torch.dtype | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of the rows of slots. Waits for a load that fills the layer.

        Args:
            loc: int64 `[n]`: slots.
            dst_dtype: Dtype of the copies; by default the pool's, or bf16 if that is fp8.

        Returns:
            Latent vectors `[n, 1, kv_lora_rank]`, and rotated parts `[n, 1, qk_rope_head_dim]`.
        """
        layer_id = layer if isinstance(layer, int) else layer.layer_id
        buffer, rank = self.get_key_buffer(layer_id), self.kv_lora_rank
        dtype = dst_dtype or (torch.bfloat16 if self.dtype is FP8 else self.dtype)
        rows = gather_rows(buffer, loc, rank, dtype)
        return rows[..., :rank], rows[..., rank:]

    def split_rows(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of stored rows `[..., kv_cache_dim]`: their latent vectors, in fp8 with the scales,
        and their rotated parts."""
        rope = self.qk_rope_head_dim * (2 if self.dtype is FP8 else 1)
        latent = rows.shape[-1] - rope
        return rows[..., :latent], rows[..., latent:]

    def _latent(self, rows: torch.Tensor) -> torch.Tensor:
        return self.split_rows(rows)[0]
