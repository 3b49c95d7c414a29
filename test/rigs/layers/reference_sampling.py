"""The distribution of a sampled token by plain loops in float64, to compare samplers with."""

from __future__ import annotations

import torch

from sglang.srt.sampling.sampling_params import SamplingParams


def kept_tokens(logits: torch.Tensor, params: SamplingParams) -> dict[int, float]:
    """Each token that temperature, top-k, top-p and min-p leave, with its probability; the most
    probable first.

    Args:
        logits: `[vocab_size]`, of the model.
    """
    probs = (logits.double() / params.temperature).softmax(-1).tolist()
    order = sorted(range(len(probs)), key=lambda token: (-probs[token], token))
    kept: dict[int, float] = {}
    before = 0.0
    for rank, token in enumerate(order):
        if params.top_k != -1 and rank >= params.top_k:
            break
        if before >= params.top_p or probs[token] < params.min_p * probs[order[0]]:
            break
        kept[token] = probs[token]
        before += probs[token]
    total = sum(kept.values())
    return {token: prob / total for token, prob in kept.items()}
