"""The fields of DeepSeek-V4 in config.json, and checks of its lists of layers. Needs no
transformers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

_MOST_RATIO: Final = 1 << 16
_TYPES: Final = {
    0: "sliding_attention",
    4: "compressed_sparse_attention",
    128: "heavily_compressed_attention",
}
"""Layer types by their number in `compress_ratios`."""
_RATES: Final = {
    _TYPES[4]: ("compress_rate_csa", 4),
    _TYPES[128]: ("compress_rate_hca", 128),
}
"""Older names of the fields of `compress_rates`, and their defaults."""


def check_compressed(raw: Mapping[str, Any]) -> None:
    """Check a config.json of DeepSeek-V4.

    Raises:
        ValueError: A list of layers or a ratio is impossible, or contradicts another field. One
            line that names the field, with the remedy.
    """
    count = raw.get("num_hidden_layers") or 43
    drafts = raw.get("num_nextn_predict_layers") or 0
    for name, more in (("layer_types", 0), ("mlp_layer_types", 0), ("compress_ratios", drafts)):
        items = raw.get(name)
        if items is not None and not (
            isinstance(items, list) and len(items) in (count, count + more)
        ):
            raise ValueError(
                f"config.json: {name}={_shown(items)} must name each of num_hidden_layers={count} "
                "layers: copy the checkpoint again"
            )
    _check_rates(raw)
    _check_ratios(raw)
    part, head_dim = raw.get("partial_rotary_factor"), raw.get("head_dim") or 512
    dims = raw.get("qk_rope_head_dim")
    if None not in (part, dims) and not (
        isinstance(part, int | float) and 0 < part <= 1 and dims == int(head_dim * part)
    ):
        raise ValueError(
            f"config.json: qk_rope_head_dim={_shown(dims)} contradicts partial_rotary_factor="
            f"{_shown(part)} of head_dim={head_dim}: remove one"
        )
    hashed, types = raw.get("num_hash_layers"), raw.get("mlp_layer_types")
    if hashed is not None and not _is_int(hashed, 0, count):
        raise ValueError(
            f"config.json: num_hash_layers={_shown(hashed)} must be an integer from 0 to "
            f"num_hidden_layers={count}"
        )
    if hashed is not None and types is not None and types.count("hash_moe") != hashed:
        raise ValueError(
            f"config.json: num_hash_layers={hashed} contradicts mlp_layer_types={_shown(types)}: "
            "remove one"
        )


def _check_rates(raw: Mapping[str, Any]) -> None:
    rates = raw.get("compress_rates")
    if rates is not None and not (isinstance(rates, dict) and set(rates) == set(_RATES)):
        raise ValueError(
            f"config.json: compress_rates={_shown(rates)} must have a number for "
            f"{' and '.join(_RATES)}"
        )
    for kind, (older, _) in _RATES.items():
        value, old = (rates or {}).get(kind), raw.get(older)
        given = ((f"compress_rates.{kind}", value, rates), (older, old, old))
        for field, found, where in given:
            if where is not None and not _is_int(found, 2, _MOST_RATIO):
                raise ValueError(
                    f"config.json: {field}={_shown(found)} must be an integer from 2 to "
                    f"{_MOST_RATIO}"
                )
        if None not in (value, old) and value != old:
            raise ValueError(
                f"config.json: {older}={old} contradicts compress_rates.{kind}={value}: remove one"
            )


def _check_ratios(raw: Mapping[str, Any]) -> None:
    """Check `compress_ratios`, the ratio of each layer and of each that drafts."""
    ratios = raw.get("compress_ratios")
    if ratios is None:
        return
    bad = [one for one in ratios if not _is_int(one, 0, 128) or one not in _TYPES]
    if bad:
        raise ValueError(
            f"config.json: compress_ratios has {_shown(bad[0])}: {', '.join(map(str, _TYPES))} are "
            "supported"
        )
    types = raw.get("layer_types")
    if types is not None and [_TYPES[one] for one in ratios[: len(types)]] != types:
        raise ValueError(
            f"config.json: compress_ratios={_shown(ratios)} contradicts layer_types="
            f"{_shown(types)}: remove one"
        )
    for kind, (older, ratio) in _RATES.items():
        said = raw.get(older, (raw.get("compress_rates") or {}).get(kind))
        if said not in (None, ratio) and ratio in ratios:
            raise ValueError(
                f"config.json: compress_ratios of {ratio} contradicts compress_rates.{kind}={said}:"
                " remove one"
            )


def _is_int(value: object, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _shown(value: object) -> str:
    return " ".join(str(value).split())[:60]


DEEPSEEK_V4: Final[Mapping[str, Any]] = {
    "model_types": frozenset("deepseek_v4".split()),
    "read": frozenset("""
        q_lora_rank qk_rope_head_dim o_groups o_lora_rank sliding_window
        compress_rates index_n_heads index_head_dim index_topk
        hc_mult hc_sinkhorn_iters hc_eps swiglu_limit
        n_routed_experts num_experts_per_tok moe_intermediate_size routed_scaling_factor
    """.split()),
    "read_by_class": frozenset("""
        compress_ratios compress_rate_csa compress_rate_hca compress_rope_theta num_hash_layers
        num_local_experts
    """.split()),
    # No reference computes the layers that draft.
    "harmless": frozenset("num_nextn_predict_layers router_jitter_noise".split()),
    "fixed": {
        "attention_bias": (False,),
        "expert_dtype": ("fp4", "fp8"),
        "layer_types": (
            "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention",
        ),
        "mlp_layer_types": ("hash_moe", "moe"),
        "n_shared_experts": (1,),
        # The weights of a token's experts are always divided by their sum.
        "norm_topk_prob": (True,),
        "num_key_value_heads": (1,),
        "scoring_func": ("sqrtsoftplus",),
        "tie_word_embeddings": (False,),
        "topk_method": ("noaux_tc",),
    },
    "check": check_compressed,
}  # fmt: skip
"""The arguments of `ConfigFields`."""
