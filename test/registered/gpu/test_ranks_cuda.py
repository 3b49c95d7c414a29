"""Two GPUs: sums over ranks, logits of one rank, the same words from every tier and with drafts."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from rigs.layers import latent_ranks
from rigs.models.model_oracle import logits_of_batches
from rigs.models.tiny_models import StepDriver, save_tiny_checkpoint
from rigs.schedulers.rank_processes import run_ranks
from rigs.schedulers.scheduler_rig import prompt
from rigs.servers.engine_server import EngineServer
from sglang.serve_pd import count_gpus
from sglang.srt.constants import BUILTIN_MODEL_DIR
from sglang.srt.distributed.parallel_state import (
    get_attention_cp_group,
    get_attention_tp_group,
    get_world_group,
)
from sglang.srt.hardware_backend.device_runtime import detect_device, device_runtime
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.placement import TensorPlacement
from sglang.srt.layers.vocab_parallel_embedding import VocabLogits
from sglang.srt.model_executor.graph_capture import GraphCapture
from sglang.test.ci.ci_register import register_cuda_ci

register_cuda_ci(est_time=170, suite="base-b-test-2-gpu-large")

HAS_TWO: Final = detect_device() == "cuda" and count_gpus() > 1
pytestmark = pytest.mark.skipif(not HAS_TWO, reason="needs two GPUs")

HEADS: Final[dict[str, Any]] = {"num_attention_heads": 8}
FAMILIES: Final[dict[str, dict[str, Any]]] = {
    "qwen3": HEADS,
    "qwen3_moe": HEADS,
    "minimax_m2": HEADS,
    "deepseek_v32": {**HEADS, "num_key_value_heads": 8},
    "kimi_linear": {**HEADS, "num_key_value_heads": 8},
    "qwen3_next": {**HEADS, "linear_num_key_heads": 4, "linear_num_value_heads": 8},
}
RECURRENT: Final = ("kimi_linear", "qwen3_next")
CASES: Final = [
    (family, cp) for family in FAMILIES for cp in (1, 2) if cp == 1 or family not in RECURRENT
]
SHAPES: Final = (1, 64), (3, 4096), (64, 4096), (700, 1000), (9000, 4096)
"""Shapes of summed tensors: some go through symmetric memory, some through NCCL."""
VOCAB: Final = 151_935
"""Vocabulary size; odd, so that the second rank has one token less."""
GREEDY_ROWS: Final = 1, 3, 64, 300, 1800
PAGE: Final = 16
WHOLE: Final = 192
"""Tokens of the whole pages of 200."""


def collect(
    made: list[torch.Tensor],
    run: Callable[[torch.Tensor], list[torch.Tensor]],
    mine: torch.Tensor,
) -> None:
    made += run(mine)


def sums() -> dict[str, Any]:
    """One rank's part: how far the results are from the right ones, and the sums of their numbers.

    Each sum is made eagerly and in a graph, some thousand times, so that kernels of both ranks meet
    in all ways; what the last one made counts.
    """
    group = get_attention_tp_group()
    found: dict[str, Any] = {"has_symmetric_memory": group._symm_mem is not None}
    for dtype in (torch.float32, torch.bfloat16):
        for rows, width in SHAPES:
            generator = torch.Generator().manual_seed(rows)
            parts = torch.randn(group.size, rows, width, generator=generator).to(dtype)
            mine = parts[group.rank].cuda()
            right = parts.float().sum(0)
            residual = torch.randn(rows, width, generator=generator).to(dtype)
            placement = TensorPlacement(dtype=dtype, device="cuda")
            norm = RMSNorm(width, 1e-6, placement=placement)
            norm.weight.fill_(1.0)
            start = residual.cuda()
            after = (right + residual.float()).to(dtype).float()
            normed = torch.nn.functional.rms_norm(after, (width,), None, 1e-6)

            def sum_alone(mine: torch.Tensor) -> list[torch.Tensor]:
                return [group.all_reduce(mine.clone())]

            def sum_in_norms(
                mine: torch.Tensor, residual: torch.Tensor = start, norm: RMSNorm = norm
            ) -> list[torch.Tensor]:
                made = [group.all_reduce(mine.clone())]
                for _ in range(5):  # Odd: the next pass begins in the other place.
                    place = group.empty_part(mine.shape, mine)
                    made += norm.add_(group.sum_later(place.copy_(mine)), residual.clone())
                return made

            for run, wanted in (
                (sum_alone, [right]),
                (sum_in_norms, [right, *[normed, after] * 5]),
            ):
                with torch.inference_mode():
                    results = run(mine)
                    made: list[torch.Tensor] = []
                    graph, _ = GraphCapture().capture(partial(collect, made, run, mine))
                    for _ in range(300):
                        graph.replay()
                    graphed = made[-len(wanted) :]
                device_runtime("cuda").synchronize()
                name = f"{dtype} {rows} x {width} {run.__name__}"
                for way, tensors in (("eager", results), ("graph", graphed)):
                    apart = [
                        (one.float().cpu() - two).abs().max().item()
                        for one, two in zip(tensors, wanted, strict=True)
                    ]
                    found[f"{name} {way} apart"] = max(apart) < 50 * torch.finfo(dtype).eps
                    found[f"{name} {way}"] = [one.double().sum().item() for one in tensors]
    return found


@pytest.mark.parametrize("ranks", [2, 4])
def test_sums_are_the_same_bits_on_all_ranks(ranks: int) -> None:
    if count_gpus() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    first, *others = run_ranks(ranks, sums, device="cuda")
    assert all(one == first for one in others), "the same bits on all ranks"
    assert first["has_symmetric_memory"]
    assert all(is_right for name, is_right in first.items() if name.endswith("apart"))


def greatest() -> list[list[int]]:
    """One rank's part: tokens of the greatest logits, each of many in a row as the gathered logits
    have them. Sums in norms come in between: those of many rows use the same flags."""
    group = get_attention_tp_group()
    placement = TensorPlacement(dtype=torch.float32, device="cuda", tp_group=group)
    tokens = placement.row_share(VOCAB)
    width = -(-VOCAB // group.size)
    norm = RMSNorm(4096, 1e-6, placement=placement)
    norm.weight.fill_(1.0)
    found = []
    with torch.inference_mode():
        for rows in GREEDY_ROWS:
            generator = torch.Generator("cuda").manual_seed(rows)
            # In bf16, so that some of the greatest are equal.
            whole = torch.randn(rows, VOCAB, generator=generator, device="cuda").bfloat16().float()
            whole[0, VOCAB // 3] = whole[0, VOCAB - 2] = float("nan")
            wrong = torch.zeros((), dtype=torch.int64, device="cuda")
            for turn in range(200 if rows < 1000 else 3):
                turned = whole.roll(turn * 997, dims=1)
                part = torch.full((rows, width), 99.0, device="cuda")
                part[:, : tokens.size] = turned[:, tokens.begin : tokens.end]
                x = torch.ones(rows, 4096, device="cuda")
                group.all_reduce(x[:1].clone())
                norm.add_(group.sum_later(x), torch.zeros_like(x))
                best = VocabLogits(part, tokens, group).argmax()
                wrong += (best != turned.argmax(dim=-1)).sum()
            assert wrong.item() == 0, f"{wrong.item()} of {rows} rows are wrong"
            gathered = VocabLogits(part, tokens, group).whole()
            assert torch.equal(gathered.view(torch.int32), turned.view(torch.int32))
            found.append(best.tolist())
    return found


def test_all_ranks_choose_the_greatest_logit() -> None:
    """The last number of rows has more keys than there is memory for: it is gathered."""
    first, second = run_ranks(2, greatest, device="cuda")
    assert first == second
    assert [len(tokens) for tokens in first] == list(GREEDY_ROWS)


def logits(path: str, device: str, dtype: str) -> torch.Tensor:
    """Logits of two chunks of a prompt, of decode steps, and of a short prompt beside them."""
    config: dict[str, Any] = {"device": device}
    if device == "cuda":
        config["gpu_id"] = get_world_group().rank
        config |= {"tp_group": get_attention_tp_group(), "cp_group": get_attention_cp_group()}
    driver = StepDriver(path, page_size=PAGE, dtype=dtype, **config)
    return logits_of_batches(driver)


@pytest.mark.parametrize(("family", "cp"), CASES)
def test_logits_equal_those_of_one_cpu(tmp_path: Path, family: str, cp: int) -> None:
    save_tiny_checkpoint(tmp_path, family, **FAMILIES[family])
    right = logits(str(tmp_path), "cpu", "float32")
    work = str(tmp_path), "cuda", "float32"
    first, second = run_ranks(2, logits, *work, attn_cp_size=cp, device="cuda")
    torch.testing.assert_close(first, right, rtol=1e-3, atol=1e-3)
    assert torch.equal(first, second), "the same bits on all ranks"


def test_ranks_divide_the_choices_of_an_indexer() -> None:
    latent_ranks.check(2, "cuda")


def words(server: EngineServer, seed: int) -> tuple[list[int], tuple[int, int, int]]:
    answer = server.generate(prompt(seed, 200), max_new_tokens=24)
    found = answer.cached
    return answer.output_ids, (found["device"], found["host"], found.get("storage", 0))


@pytest.mark.parametrize("sizes", [("1", "1"), ("2", "1"), ("2", "2")], ids="x".join)
def test_every_tier_gives_the_words_of_no_cache(tmp_path: Path, sizes: tuple[str, str]) -> None:
    ranks, cp = sizes
    env = {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(tmp_path)}
    with EngineServer(
        "--device", "cuda", "--tp-size", ranks, "--attn-cp-size", cp, "--dtype", "float32",
        "--page-size", str(PAGE), "--max-total-tokens", "1024", "--chunked-prefill-size", "64",
        "--enable-hierarchical-cache", "--hicache-ratio", "4",
        "--hicache-storage-backend", "file", "--hicache-storage-prefetch-policy", "wait_complete",
        "--hicache-storage-backend-extra-config", json.dumps({"prefetch_threshold": PAGE}),
        env=env,
    ) as server:  # fmt: skip
        cold, found = words(server, 1)
        assert found == (0, 0, 0)
        assert cold == EXPECTED.setdefault("words", cold), "as with one rank"
        assert words(server, 1) == (cold, (WHOLE, 0, 0))
        for seed in range(100, 105):
            words(server, seed)
        assert words(server, 1) == (cold, (0, WHOLE, 0))
        server.flush()
        assert words(server, 1) == (cold, (0, 0, WHOLE))


@pytest.mark.parametrize(
    ("family", "cp"), [case for case in CASES if case[0] in ("deepseek_v32", "qwen3_next")]
)
def test_words_with_drafts_are_those_of_one_rank_without(
    tmp_path: Path, family: str, cp: int
) -> None:
    sizes = {"vocab_size": 2176, "eos_token_id": None, **FAMILIES[family]}
    save_tiny_checkpoint(tmp_path, family, mtp=True, **sizes)
    drafts = (
        "--tp-size", "2", "--attn-cp-size", str(cp),
        "--speculative-algorithm", "NEXTN", "--speculative-num-steps", "3",
    )  # fmt: skip
    found = []
    for more in ((), drafts, (*drafts, "--disable-cuda-graph")):
        with EngineServer(
            "--device", "cuda", "--tokenizer-path", str(BUILTIN_MODEL_DIR), "--dtype", "float32",
            "--page-size", str(PAGE), "--max-total-tokens", "2048", "--chunked-prefill-size", "64",
            *more, model=str(tmp_path), env={"SGLANG_SPECULATE_ALWAYS": "1"},
        ) as server:  # fmt: skip
            answers = [
                server.generate(prompt(seed, 200), 24, {"ignore_eos": True}) for seed in range(4)
            ]
        output = [answer.output_ids for answer in answers]
        found.append((output, [answer.meta_info.get("spec_verify_ct") for answer in answers]))
    (alone, _), captured, launched = found
    assert captured == launched
    assert captured[0] == alone
    assert all(captured[1]), "drafts were verified"


EXPECTED: Final[dict[str, list[int]]] = {}
"""Output of one rank, which runs first."""
