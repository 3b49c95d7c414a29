"""Small pools of recurrent states with known bytes, for tests of L2 and L3."""

from __future__ import annotations

from typing import Final

import torch

from rigs.stores.host_pools import PoolKind, fill_with_random_bits
from sglang.srt.mem_cache.device.state_pool import MambaPool, MambaSpec
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.memory_pool_host import MambaPoolHost

STATE_DTYPES: Final = (
    (torch.float32, torch.bfloat16),
    (torch.bfloat16, torch.bfloat16),
    (torch.float32, torch.float32),
)
"""Dtypes of `temporal` and of `conv`: equal ones, too, as with `--mamba-ssm-dtype bfloat16`."""


def mamba_spec(
    dtypes: tuple[torch.dtype, torch.dtype] = STATE_DTYPES[0], *, heads: int = 2, dim: int = 3
) -> MambaSpec:
    """The spec of states of `dtypes` in three layers.

    Args:
        dtypes: Dtypes of `temporal` and of `conv`.
        heads: Heads, of keys as of values.
        dim: Elements of a key; a value has one more.
    """
    temporal, conv = dtypes
    channels = heads * (3 * dim + 1)
    return MambaSpec.of_shapes(
        (0, 2, 3), (heads, dim, dim + 1), (channels, 3), ssm_dtype=temporal, conv_dtype=conv
    )


def make_mamba_pool(seed: int = 0, *, spec: MambaSpec | None = None, size: int = 15) -> MambaPool:
    """A pool whose states and padding have random bits."""
    pool = MambaPool(mamba_spec() if spec is None else spec, size, "cpu")
    fill_with_random_bits(pool, seed)
    return pool


def recurrent_states(spec: MambaSpec) -> PoolKind:
    """Recurrent states of `spec`."""
    return PoolKind(PoolName.MAMBA, lambda seed: make_mamba_pool(seed, spec=spec), MambaPoolHost)
