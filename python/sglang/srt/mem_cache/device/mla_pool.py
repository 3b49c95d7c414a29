"""Latent rows of multi-head latent attention (MLA).

All heads share a token's row: the latent vector that keys and values are projected from, then the
rotated part of the key. It is the same on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sglang.srt.mem_cache.device.base_device_pool import (
    FP8_DTYPES,
    HasLayerId,
    PagedDevicePool,
    held_layers,
    refuse_memory_saver,
)
from sglang.srt.mem_cache.device.memory_pool import KVCache
from sglang.srt.mem_cache.device.state_spec import PoolName, StateBuffer, StateSpec


def refuse_fp8(spec: StateSpec, what: str) -> None:
    """Raise ValueError if a buffer of `spec` is fp8; `what` names the values in the error."""
    if any(buffer.dtype in FP8_DTYPES for buffer in spec.buffers):
        dtype = str(spec.dtype).removeprefix("torch.")
        raise ValueError(
            f"state '{spec.name}': {what} are not kept in {dtype}; "
            "use --kv-cache-dtype auto or bfloat16"
        )


def check_row_dim(name: str, given: int | None, kv_lora_rank: int, qk_rope_head_dim: int) -> None:
    """Raise ValueError unless the argument `name` is None or the number of elements of a row."""
    row_dim = kv_lora_rank + qk_rope_head_dim
    if given not in (None, row_dim):
        raise ValueError(
            f"{name}={given}: rows of {row_dim} elements are kept, latent vector and rotated part "
            "as computed; leave it out"
        )


@dataclass(frozen=True, kw_only=True)
class MLASpec(StateSpec):
    """A latent row per token: `latent` `[1, kv_lora_rank + qk_rope_head_dim]`.

    Raises:
        ValueError: The dtype is fp8, or `StateSpec` raises it.
    """

    name: PoolName = PoolName.KV
    kv_lora_rank: int
    """Elements of the latent vector, at the row's start."""
    qk_rope_head_dim: int
    """Elements of the rotated part of the key, which follows the latent vector."""

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_fp8(self, "latent rows of MLA")

    @classmethod
    def of(
        cls,
        layers: Sequence[int],
        kv_lora_rank: int,
        qk_rope_head_dim: int,
        dtype: torch.dtype,
    ) -> MLASpec:
        """The spec of rows of `kv_lora_rank + qk_rope_head_dim` elements in `layers`."""
        return cls(
            layers=tuple(layers),
            buffers=(StateBuffer("latent", (1, kv_lora_rank + qk_rope_head_dim), dtype),),
            kv_lora_rank=kv_lora_rank,
            qk_rope_head_dim=qk_rope_head_dim,
        )

    @property
    def row_dim(self) -> int:
        """Elements of a row."""
        return self.kv_lora_rank + self.qk_rope_head_dim


class MLATokenToKVPool(KVCache):
    """Latent rows of multi-head latent attention.

    The keys of a layer are its whole rows, the values their latent part: one tensor, one head.

    Attributes:
        kv_buffer: For each layer `[size + page_size, 1, kv_lora_rank + qk_rope_head_dim]`.
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
        *,
        layers: Sequence[int] | None = None,
    ) -> None:
        """See `KVCache`.

        Args:
            dtype: Dtype of the rows; fp8 is refused.
            kv_lora_rank: Elements of the latent vector.
            qk_rope_head_dim: Elements of the rotated part of the key.
            enable_memory_saver: Refused.
            start_layer: See `held_layers`; so are `end_layer` and `layers`.
            use_dsa: Refused: the pool of such a model is a `DSATokenToKVPool`.
            override_kv_cache_dim: Elements of a row; see `check_row_dim`.
        """
        refuse_memory_saver(enable_memory_saver)
        if use_dsa:
            raise ValueError("use_dsa: make a DSATokenToKVPool, which has the indexer's keys too")
        check_row_dim(
            "override_kv_cache_dim", override_kv_cache_dim, kv_lora_rank, qk_rope_head_dim
        )
        held = held_layers(layer_num, start_layer, end_layer, layers)
        spec = MLASpec.of(held, kv_lora_rank, qk_rope_head_dim, dtype)
        self._set_up(spec, size, page_size, device)

    def _set_up(self, spec: MLASpec, size: int, page_size: int, device: torch.device | str) -> None:
        PagedDevicePool.__init__(self, spec, size, page_size, device)
        self.kv_lora_rank = spec.kv_lora_rank
        self.qk_rope_head_dim = spec.qk_rope_head_dim
        self.kv_cache_dim = spec.row_dim
        """Elements of a row."""
        (self.kv_buffer,) = self.parts

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        """Whole rows of a layer. Waits for a load that fills the layer."""
        return self.kv_buffer[self.wait_for_layer(layer_id)]

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        """The latent part of the rows, as a view. Waits for a load that fills the layer."""
        return self._latent(self.get_key_buffer(layer_id))

    def get_kv_buffer(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        rows = self.get_key_buffer(layer_id)
        return rows, self._latent(rows)

    def kv_buffer_to_write(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Whole rows of a layer, and their latent part. Does not wait."""
        rows = self.kv_buffer[self.place_to_write(layer_id)]
        return rows, self._latent(rows)

    def set_kv_buffer(
        self,
        layer: HasLayerId | int,
        loc: torch.Tensor,
        cache_k: torch.Tensor,
        cache_v: torch.Tensor,
    ) -> None:
        """Store the rows of new tokens.

        Args:
            loc: int64 `[n]`: slots.
            cache_k: `[n, 1, kv_lora_rank + qk_rope_head_dim]`: whole rows, any float dtype.
            cache_v: The latent part of the rows. It is not read, since `cache_k` has it.
        """
        self.kv_buffer[self.place_to_write(layer)].index_copy_(0, loc, cache_k.to(self.dtype))

    def set_mla_kv_buffer(
        self,
        layer: HasLayerId | int,
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
        rows = self.kv_buffer[self.place_to_write(layer)]
        count, rank = len(loc), self.kv_lora_rank
        latent = cache_k_nope.view(count, 1, rank).to(self.dtype)
        rope = cache_k_rope.view(count, 1, self.qk_rope_head_dim).to(self.dtype)
        rows[..., :rank].index_copy_(0, loc, latent)
        rows[..., rank:].index_copy_(0, loc, rope)

    def get_mla_kv_buffer(
        self,
        layer: HasLayerId | int,
        loc: torch.Tensor,
        dst_dtype: torch.dtype | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of the rows of slots. Waits for a load that fills the layer.

        Args:
            loc: int64 `[n]`: slots.
            dst_dtype: Dtype of the copies; by default the pool's.

        Returns:
            Latent vectors `[n, 1, kv_lora_rank]`, and rotated parts `[n, 1, qk_rope_head_dim]`.
        """
        layer_id = layer if isinstance(layer, int) else layer.layer_id
        rows = self.get_key_buffer(layer_id)[loc].to(dst_dtype or self.dtype)
        return self.split_rows(rows)

    def split_rows(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of rows `[..., kv_lora_rank + qk_rope_head_dim]`: their latent vectors, and their
        rotated parts."""
        return self._latent(rows), rows[..., self.kv_lora_rank :]

    def _latent(self, rows: torch.Tensor) -> torch.Tensor:
        return rows[..., : self.kv_lora_rank]
