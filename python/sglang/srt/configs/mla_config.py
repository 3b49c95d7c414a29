"""Settings of latent attention (MLA) and of its sparse form, from a checkpoint's config."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class MLAConfig:
    """Sizes of latent attention: elements of one token's vectors.

    A query or key of one head has a part without position, then a rotated one.
    """

    kv_lora_rank: int
    """Of the latent vector that keys and values of all heads are projected from."""
    q_lora_rank: int | None
    """Of the vector that queries are projected from; None: from the hidden state."""
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    rope_interleave: bool
    """The rotated pairs of the checkpoint are neighbours; otherwise half a head apart."""

    @property
    def qk_head_dim(self) -> int:
        """Of a query or key of one head, both parts."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @classmethod
    def from_hf(cls, hf_config: Any) -> MLAConfig:
        """Read a config of the DeepSeek family.

        Raises:
            ValueError: A size is missing or not a positive integer, or the rotated part is odd.
        """
        rope_dim = _size(hf_config, "qk_rope_head_dim")
        if rope_dim % 2:
            raise ValueError(f"config.json: qk_rope_head_dim={rope_dim} must be even")
        has_q_lora = getattr(hf_config, "q_lora_rank", None) is not None
        return cls(
            kv_lora_rank=_size(hf_config, "kv_lora_rank"),
            q_lora_rank=_size(hf_config, "q_lora_rank") if has_q_lora else None,
            qk_nope_head_dim=_size(hf_config, "qk_nope_head_dim"),
            qk_rope_head_dim=rope_dim,
            v_head_dim=_size(hf_config, "v_head_dim"),
            rope_interleave=bool(getattr(hf_config, "rope_interleave", True)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexerConfig:
    """Settings of DeepSeek Sparse Attention (DSA): an indexer chooses what a token attends to."""

    topk: int
    """Tokens that each token attends to, at most."""
    num_heads: int
    """Of the indexer's queries; all of them share a key."""
    head_dim: int
    """Of the indexer's queries and keys; the first `qk_rope_head_dim` elements are rotated."""

    @classmethod
    def from_hf(cls, hf_config: Any) -> IndexerConfig:
        """Read a config of DeepSeek-V3.2.

        Raises:
            ValueError: A size is missing or not a positive integer, or does not fit to another.
        """
        head_dim = _size(hf_config, "index_head_dim")
        rope_dim = _size(hf_config, "qk_rope_head_dim")
        if head_dim < rope_dim:
            raise ValueError(
                f"config.json: index_head_dim={head_dim} must be at least "
                f"qk_rope_head_dim={rope_dim}"
            )
        return cls(
            topk=_size(hf_config, "index_topk"),
            num_heads=_size(hf_config, "index_n_heads"),
            head_dim=head_dim,
        )


def _size(hf_config: Any, name: str) -> int:
    value = getattr(hf_config, name, None)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"config.json: {name}={value!r} must be a positive integer")
    return value
