"""Settings of latent attention (MLA) and of its sparse form, from a checkpoint's config."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PretrainedConfig

from sglang.srt.configs.model_config import positive_int


@dataclass(frozen=True, slots=True, kw_only=True)
class MLAConfig:
    """Sizes of latent attention: elements of one token's vectors.

    A query or key of one head has a part without position, then a rotated one. In Kimi-Linear,
    which rotates nothing, all heads share the second part of a key all the same. GLM-5.3-Flash has
    the first part alone.
    """

    kv_lora_rank: int
    """Elements of the latent vector that keys and values of all heads are projected from."""
    q_lora_rank: int | None
    """Elements of the vector that queries are projected from; None: from the hidden state."""
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    rope_interleave: bool
    """The rotated pairs of the checkpoint are neighbours; otherwise half a head apart."""
    rotates: bool = True

    @property
    def qk_head_dim(self) -> int:
        """Elements of a query or key of one head, both parts."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @classmethod
    def from_hf(cls, hf_config: PretrainedConfig) -> MLAConfig:
        """Read a config of the DeepSeek family.

        Raises:
            ValueError: A size is missing or not a positive integer, or `head_dim` differs from the
                size of the part that is rotated.
        """
        has_rope_part = hf_config.model_type != "glm5_next_text"
        rope_dim = positive_int(hf_config, "qk_rope_head_dim") if has_rope_part else 0
        rotates = has_rope_part and hf_config.model_type != "kimi_linear"
        head_dim = getattr(hf_config, "head_dim", rope_dim)
        if rotates and head_dim != rope_dim:
            raise ValueError(
                f"config.json: head_dim={head_dim} is the rotated part of a head, and contradicts "
                f"qk_rope_head_dim={rope_dim}: remove head_dim"
            )
        has_q_lora = getattr(hf_config, "q_lora_rank", None) is not None
        return cls(
            kv_lora_rank=positive_int(hf_config, "kv_lora_rank"),
            q_lora_rank=positive_int(hf_config, "q_lora_rank") if has_q_lora else None,
            qk_nope_head_dim=positive_int(hf_config, "qk_nope_head_dim"),
            qk_rope_head_dim=rope_dim,
            v_head_dim=positive_int(hf_config, "v_head_dim"),
            rope_interleave=bool(getattr(hf_config, "rope_interleave", True)),
            rotates=rotates,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexerConfig:
    """Settings of DeepSeek Sparse Attention (DSA): an indexer chooses what a token attends to."""

    topk: int
    """Tokens that each token attends to, at most."""
    num_heads: int
    """Query heads of the indexer; all of them share a key."""
    head_dim: int
    """Elements of the indexer's queries and keys; the first `rotary_dim` are rotated."""
    rotary_dim: int
    rope_interleave: bool
    """See `MLAConfig`."""
    full_layers: tuple[int, ...]
    """Layers with an indexer, ascending. The others share the choice of the last one before."""

    @classmethod
    def from_hf(cls, hf_config: PretrainedConfig) -> IndexerConfig:
        """Read a config of DeepSeek-V3.2 or GLM-5.

        Raises:
            ValueError: A size is missing or not a positive integer, or does not fit to another; or
                `indexer_types` does not say what each layer does.
        """
        head_dim = positive_int(hf_config, "index_head_dim")
        rope_dim = positive_int(hf_config, "qk_rope_head_dim")
        if head_dim < rope_dim:
            raise ValueError(
                f"config.json: index_head_dim={head_dim} must be at least "
                f"qk_rope_head_dim={rope_dim}"
            )
        return cls(
            topk=positive_int(hf_config, "index_topk"),
            num_heads=positive_int(hf_config, "index_n_heads"),
            head_dim=head_dim,
            rotary_dim=rope_dim,
            # `config_fields` allows no other value of `indexer_rope_interleave`.
            rope_interleave=hf_config.model_type == "glm_moe_dsa",
            full_layers=_full_layers(hf_config),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PooledIndexerConfig:
    """Settings of DSA over groups of tokens: an indexer chooses groups by one key for each."""

    topk: int
    """Tokens of the groups that a token chooses. It also sees the tokens of its open group."""
    ratio: int
    """Tokens of a group."""
    num_heads: int
    """Query heads of the indexer; all of them share a key."""
    head_dim: int
    """Elements of the indexer's queries and keys."""
    full_layers: tuple[int, ...]
    """Attention layers with an indexer, ascending. Others share the choice of the layer before."""

    @classmethod
    def from_hf(cls, hf_config: PretrainedConfig) -> PooledIndexerConfig:
        """Read a config of GLM-5.3-Flash.

        Raises:
            ValueError: A size is no positive integer; groups do not divide the choice; or the first
                attention layer shares a choice.
        """
        topk, ratio = positive_int(hf_config, "index_topk"), positive_int(hf_config, "index_kpool")
        if topk % ratio or ratio < 2:
            raise ValueError(
                f"config.json: index_kpool={ratio} must be at least 2 and divide index_topk={topk}"
            )
        types, kinds = hf_config.indexer_types, hf_config.layer_types
        if len(types) != len(kinds) or not set(types) <= {"full", "shared"}:
            raise ValueError(
                f"config.json: indexer_types={types} must name each of {len(kinds)} layers 'full' "
                "or 'shared'"
            )
        attention = [i for i, kind in enumerate(kinds) if kind == "indexed_attention"]
        full = tuple(i for i in attention if types[i] == "full")
        # transformers hands a choice to the next layer alone.
        lost = [i for i in attention if i not in full and i - 1 not in full]
        if lost:
            raise ValueError(
                f"config.json: indexer_types: layer {lost[0]} is 'shared', which is supported only "
                "behind an attention layer that is 'full'"
            )
        return cls(
            topk=topk,
            ratio=ratio,
            num_heads=positive_int(hf_config, "index_n_heads"),
            head_dim=positive_int(hf_config, "index_head_dim"),
            full_layers=full,
        )


def _full_layers(hf_config: PretrainedConfig) -> tuple[int, ...]:
    count = positive_int(hf_config, "num_hidden_layers")
    types: list[str] | None = getattr(hf_config, "indexer_types", None)
    if types is None:
        return tuple(range(count))
    if len(types) != count or not set(types) <= {"full", "shared"} or types[0] != "full":
        raise ValueError(
            f"config.json: indexer_types={types} must name each of {count} layers 'full' or "
            "'shared', and the first one 'full'"
        )
    return tuple(layer for layer, name in enumerate(types) if name == "full")
