"""Settings of DeepSeek-V4's attention to a window and to compressed rows, from config.json."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from transformers import PretrainedConfig

from sglang.srt.configs.model_config import positive_int
from sglang.srt.configs.rope_config import RopeConfig

SPARSE: Final = "compressed_sparse_attention"
HEAVY: Final = "heavily_compressed_attention"
"""Layer types with rows; the names of their ratios in `compress_rates`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressedConfig:
    """Ratios, sizes and rotations.

    Each layer attends to the last `window` tokens. A row stands for a group of tokens. Heavily
    compressed layers also attend to every row, sparse layers to those that an indexer chooses.
    """

    window: int
    """Tokens that a token sees uncompressed, itself included."""
    sparse_layers: tuple[int, ...]
    sparse_ratio: int
    """Tokens of a group in these layers. A row also reads the group before its own."""
    heavy_layers: tuple[int, ...]
    heavy_ratio: int
    """Likewise; a row reads its own group alone."""
    head_dim: int
    """Elements of a row, and of a token's key, which is its value too."""
    rotary_dim: int
    """The last elements of queries, keys, rows and outputs, and of the indexer's: these rotate."""
    main_rope: RopeConfig
    """Rotation in layers with a window alone."""
    rows_rope: RopeConfig
    """Rotation in layers with rows."""
    q_lora_rank: int
    output_groups: int
    """Groups of heads with a projection of their own."""
    output_rank: int
    """Outputs of each of these projections."""
    index_heads: int
    index_dim: int
    index_topk: int
    """Rows that a token of a sparse layer attends to, at most."""

    def ratio(self, layer_id: int) -> int | None:
        """Tokens of a group in a layer; None: it has a window alone."""
        if layer_id in self.sparse_layers:
            return self.sparse_ratio
        return self.heavy_ratio if layer_id in self.heavy_layers else None

    @property
    def ratios(self) -> set[int]:
        """The ratios of all layers with rows. A page has whole groups of each."""
        kinds = (self.sparse_layers, self.sparse_ratio), (self.heavy_layers, self.heavy_ratio)
        return {ratio for layers, ratio in kinds if layers}

    @classmethod
    def from_hf(cls, hf: PretrainedConfig) -> CompressedConfig:
        """Read a config of DeepSeek-V4.

        Raises:
            ValueError: A size is impossible or contradicts another, or no layer has rows. Names the
                field.
        """
        types: Sequence[str] = hf.layer_types
        sparse, heavy = (
            tuple(i for i, kind in enumerate(types) if kind == name) for name in (SPARSE, HEAVY)
        )
        if not sparse and not heavy:
            raise ValueError(
                f"config.json: layer_types={list(types)} names no layer with compressed rows, and "
                f"at least one is needed: {SPARSE} or {HEAVY}"
            )
        head_dim, heads = positive_int(hf, "head_dim"), positive_int(hf, "num_attention_heads")
        index_dim = positive_int(hf, "index_head_dim")
        groups = positive_int(hf, "o_groups")
        ropes = {
            name: RopeConfig.from_hf(hf, may_be_partial=True, part=name)
            for name in ("main", "compress")
        }
        rotary_dim, *others = {rope.rotary_dim(head_dim) for rope in ropes.values()}
        if others or rotary_dim != hf.qk_rope_head_dim or rotary_dim > index_dim:
            raise ValueError(
                f"config.json: partial_rotary_factor={hf.partial_rotary_factor} of "
                f"head_dim={head_dim} must be qk_rope_head_dim={hf.qk_rope_head_dim} in all of "
                f"rope_parameters, and at most index_head_dim={index_dim}: copy the checkpoint "
                "again"
            )
        if heads % groups:
            raise ValueError(
                f"config.json: o_groups={groups} must divide num_attention_heads={heads}"
            )
        return cls(
            window=positive_int(hf, "sliding_window"),
            sparse_layers=sparse,
            sparse_ratio=hf.compress_rates[SPARSE],
            heavy_layers=heavy,
            heavy_ratio=hf.compress_rates[HEAVY],
            head_dim=head_dim,
            rotary_dim=rotary_dim,
            main_rope=ropes["main"],
            rows_rope=ropes["compress"],
            q_lora_rank=positive_int(hf, "q_lora_rank"),
            output_groups=groups,
            output_rank=positive_int(hf, "o_lora_rank"),
            index_heads=positive_int(hf, "index_n_heads"),
            index_dim=index_dim,
            index_topk=positive_int(hf, "index_topk"),
        )
