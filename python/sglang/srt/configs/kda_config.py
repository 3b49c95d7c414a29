"""Checks the settings of Kimi Delta Attention (KDA) in config.json. Needs no transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

_GROUP: Final = "linear_attn_config"
_SIZES: Final[Mapping[str, tuple[str, int, int]]] = {
    "head_dim": ("linear_head_dim", 1, 256),
    "num_heads": ("linear_num_heads", 1, 1 << 16),
    "short_conv_kernel_size": ("linear_conv_kernel_dim", 2, 1 << 10),
}
"""Fields of `linear_attn_config`: their names beside it, least and greatest values. Kernels hold
the key channels of a head in registers."""
_LAYERS: Final[Mapping[str, str]] = {
    "full_attn_layers": "full_attention",
    "kda_layers": "linear_attention",
}
"""Lists of layers, which count from 1, and what `layer_types` calls these layers."""


def check_kda(raw: Mapping[str, Any]) -> None:
    """Check a config.json of Kimi-Linear.

    Raises:
        ValueError: A size or a list of layers is impossible, or a setting is not known. One line
            that names the field, with the remedy.
    """
    check_linear_attention(raw, ())


def check_linear_attention(raw: Mapping[str, Any], more: Sequence[str]) -> None:
    """Check sizes and layers of linear attention in a text model's settings.

    Args:
        more: Further known fields of `linear_attn_config`.

    Raises:
        ValueError: As `check_kda`.
    """
    own = raw.get(_GROUP, {})
    if not isinstance(own, Mapping):
        raise ValueError(f"config.json: {_GROUP} must be an object: copy the checkpoint again")
    for name, (beside, least, most) in _SIZES.items():
        for field, value in ((f"{_GROUP}.{name}", own.get(name)), (beside, raw.get(beside))):
            is_int = isinstance(value, int) and not isinstance(value, bool)
            if value is not None and not (is_int and least <= value <= most):
                raise ValueError(
                    f"config.json: {field}={str(value)[:60]} must be an integer from {least} to "
                    f"{most}: copy the checkpoint again"
                )
        if None not in (own.get(name), raw.get(beside)) and own[name] != raw[beside]:
            raise ValueError(
                f"config.json: {beside}={raw[beside]} contradicts {_GROUP}.{name}={own[name]}: "
                "remove one"
            )
    known = {*_SIZES, *_LAYERS, *more}
    unknown = [name for name in own if name not in known and own[name]]
    if unknown:
        raise ValueError(
            f"config.json: {_GROUP}.{unknown[0]}={str(own[unknown[0]])[:60]} is not known and may "
            "change what the model computes: remove it if it does not"
        )
    _check_layers(own, raw)


def _check_layers(own: Mapping[str, Any], raw: Mapping[str, Any]) -> None:
    """Check that each layer is in one of the lists, and that `layer_types` says the same."""
    lists = {name: own[name] for name in _LAYERS if name in own}
    if not lists:
        return
    if len(lists) < len(_LAYERS):
        raise ValueError(
            f"config.json: {_GROUP} has {next(iter(lists))} alone: it needs "
            f"{' and '.join(_LAYERS)}, or neither: copy the checkpoint again"
        )
    count = raw.get("num_hidden_layers")
    if count is None:
        raise ValueError(
            f"config.json: num_hidden_layers is missing beside {_GROUP}: copy the checkpoint again"
        )
    types: list[str | None] = [None] * count
    for name, layers in lists.items():
        for layer in layers if isinstance(layers, list) else [layers]:
            is_int = isinstance(layer, int) and not isinstance(layer, bool)
            if not is_int or not 1 <= layer <= count or types[layer - 1] is not None:
                raise ValueError(
                    f"config.json: {_GROUP}.{name} has {str(layer)[:60]}: each layer from 1 to "
                    f"{count} must be in one of {' and '.join(_LAYERS)}, once: copy the checkpoint "
                    "again"
                )
            types[layer - 1] = _LAYERS[name]
    if None in types:
        raise ValueError(
            f"config.json: layer {types.index(None) + 1} of {count} is in none of "
            f"{_GROUP}.{f' and {_GROUP}.'.join(_LAYERS)}: copy the checkpoint again"
        )
    stated = raw.get("layer_types")
    if stated is not None and stated != types:
        raise ValueError(
            f"config.json: layer_types contradicts {_GROUP}.{next(iter(_LAYERS))}: remove one"
        )
