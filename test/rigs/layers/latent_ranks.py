"""Ranks that divide an indexer's choices, by kernels for latent rows: on GPUs, or interpreted.

    TRITON_INTERPRET=1 python -m rigs.layers.latent_ranks 3

Ends with 0 if the logits of so many ranks are those of torch on one.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any, Final
from unittest import mock

import torch

from rigs.layers.quick_interpreter import quicken_interpreter
from rigs.models.latent_driver import latent_driver
from rigs.models.model_oracle import prompt
from rigs.models.tiny_models import StepDriver, save_tiny_checkpoint
from rigs.schedulers.rank_processes import run_ranks
from rigs.step_processes import fork_a_fork_server
from sglang.srt.distributed.parallel_state import get_attention_tp_group
from sglang.srt.layers.attention import latent_triton_backend as backend

LIMITS: Final[dict[str, Any]] = {
    "SHORT_TOKENS": 20, "TOKENS_AT_ONCE": 8, "MASKED_CONTEXT": 40, "FEW_HEADS": 3,
    "HEADS_AT_ONCE": 2, "MASKED_TOKENS": 5, "SHARED_TOKENS": 7,
}  # fmt: skip
"""Small ones. Tokens of a request choose from 32 on: under a mask up to 40 (ranks that have few
heads: 80), then rows."""
SIZES: Final[dict[str, Any]] = {
    "num_attention_heads": 6, "num_key_value_heads": 6, "qk_rope_head_dim": 16, "head_dim": 16,
    "v_head_dim": 16, "intermediate_size": 96, "moe_intermediate_size": 48,
}  # fmt: skip

_TIMEOUT_S: Final = 240.0
"""Interpreted ranks wait for each other without sleeping, beside other tests' processes."""


def logits_of(driver: StepDriver) -> torch.Tensor:
    """Logits of three chunks of a prompt, and of two decode steps."""
    tokens, found = prompt(120, 1), []
    for begin, end in ((0, 37), (37, 90), (90, 118)):
        found.append(driver.extend([(0, tokens[begin:end])]).next_token_logits.clone())
    for token in tokens[118:]:
        found.append(driver.decode([(0, token)]).next_token_logits.clone())
    return torch.cat(found).cpu()


def logits_of_rank(path: str, device: str) -> tuple[torch.Tensor, list[int]]:
    """One rank's logits, and how many rows it has chosen for the ranks, call by call."""
    if device == "cpu":
        quicken_interpreter()
    group, shared = get_attention_tp_group(), []
    gather = backend.LatentTritonBackend._of_all_ranks

    def count(self: Any, part: torch.Tensor, count: int) -> torch.Tensor:
        shared.append(len(part))
        return gather(self, part, count)

    with (
        mock.patch.multiple(backend, **LIMITS),
        mock.patch.object(backend.LatentTritonBackend, "_of_all_ranks", count),
    ):
        driver = latent_driver(Path(path), device, tp_group=group, gpu_id=group.rank)
        shared.clear()  # A GPU has warmed up.
        return logits_of(driver), shared


def check(ranks: int, device: str) -> None:
    """Raises AssertionError: a rank's logits differ, or ranks did not divide the choices."""
    with tempfile.TemporaryDirectory() as directory:
        save_tiny_checkpoint(directory, "deepseek_v32", **SIZES)
        right = logits_of(StepDriver(directory, page_size=16, device="cpu"))
        results = run_ranks(
            ranks, logits_of_rank, directory, device, device=device, timeout_s=_TIMEOUT_S,
            preload=["rigs.layers.latent_ranks"],
        )  # fmt: skip
        for found, shared in results:
            torch.testing.assert_close(found, right, rtol=1e-3, atol=1e-3)
            # The first of two layers: tokens 37 to 79 under masks, then blocks of 8. The last layer
            # computes the last token.
            assert shared == [-(-43 // ranks), *[-(-8 // ranks)] * 4], shared


if __name__ == "__main__":
    # Ranks come from this process, which has imported all.
    fork_a_fork_server()
    check(int(sys.argv[1]), "cpu")
