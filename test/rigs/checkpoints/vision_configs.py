"""Configurations of text models that are published beside a vision tower."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

_VISION: Final[dict[str, Any]] = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "num_position_embeddings": 16,
    "patch_size": 4,
}
KIMI_VISION: Final[dict[str, Any]] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "patch_size": 4,
    "pos_emb_height": 4,
    "pos_emb_width": 4,
}


def beside_vision(
    config_class: Any, vision: dict[str, Any] = _VISION, *, image_token: int = 5
) -> Callable[..., Any]:
    """Makes the config of a text model with these fields and a vision tower.

    Args:
        image_token: Id that stands for an image; the next one stands for a video. Random prompts
            contain 5 and 6.
    """

    def make(*, tie_word_embeddings: bool = False, **fields: Any) -> Any:
        return config_class(
            text_config=fields,
            vision_config={**vision, "out_hidden_size": fields["hidden_size"]},
            tie_word_embeddings=tie_word_embeddings,
            image_token_id=image_token,
            video_token_id=image_token + 1,
        )

    return make
