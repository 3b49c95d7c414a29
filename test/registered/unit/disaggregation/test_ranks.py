"""Prefill and decode servers of several ranks: the words of one rank, and one mind on each side."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from sglang.srt.disaggregation.common import remote_prompt
from sglang.srt.disaggregation.common.room_desk import RoomDesk
from sglang.srt.distributed.device_communicators.transfer_types import PeerUnreachable
from sglang.srt.environ import envs
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.control_proxy import ControlProxy
from sglang.test.pd_ranks import PdRanks
from sglang.test.rank_rigs import RankRigs
from sglang.test.scheduler_rig import SchedulerRig, greedy, prompt
from sglang.test.tiny_models import save_tiny_checkpoint

register_cpu_ci(est_time=60, suite="base-a-test-cpu")

PAGE: Final = 16
LENGTHS: Final = (1, 16, 17, 64, 90)
PROMPTS: Final = [prompt(seed, length) for seed, length in enumerate(LENGTHS)]
HEADS: Final[dict[str, Any]] = {"num_attention_heads": 8, "eos_token_id": None}
DELTA: Final[dict[str, Any]] = {**HEADS, "linear_num_key_heads": 4, "linear_num_value_heads": 8}
MODELS: Final[dict[str, dict[str, Any]]] = {
    "qwen3": HEADS,
    "qwen3_moe": HEADS,
    "deepseek_v32": {**HEADS, "num_key_value_heads": 8, "index_topk": 12},
    "qwen3_next": DELTA,
    "qwen3_5": DELTA,
}
ARGS: Final[dict[str, Any]] = {
    "page_size": PAGE,
    "chunked_prefill_size": 48,
    "pool_tokens": 1024,
    "max_requests": 8,
}


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Servers that are gone are missed after two seconds."""
    monkeypatch.setattr(remote_prompt, "REPEAT_S", 0.05)
    with (
        envs.SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL.override(1),
        envs.SGLANG_DISAGGREGATION_HEARTBEAT_MAX_FAILURE.override(2),
    ):
        yield


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def of(family: str) -> Path:
        if family not in made:
            made[family] = tmp_path_factory.mktemp(family)
            save_tiny_checkpoint(made[family], family, **MODELS[family])
        return made[family]

    return of


def check_words(pair: PdRanks, alone: SchedulerRig, turn: str) -> None:
    """What one scheduler says to the prompts, both servers say together."""
    fields: dict[str, Any] = {"return_logprob": True}
    messages = [
        pair.request(f"{turn} {n}", ids, greedy(12), **fields) for n, ids in enumerate(PROMPTS)
    ]
    pair.run(*messages)
    alone.run(
        *(alone.request(f"{turn} {n}", ids, greedy(12), **fields) for n, ids in enumerate(PROMPTS))
    )
    for number in range(len(PROMPTS)):
        got, want = pair.result(f"{turn} {number}"), alone.results[f"{turn} {number}"]
        assert got.output_ids == want.output_ids, f"{turn} {number}"
        assert got.finish_reason == want.finish_reason
        assert got.logprobs == pytest.approx(want.logprobs, abs=1e-3)


CASES: Final = [
    ("qwen3", 2, 2, 1),
    ("qwen3", 2, 1, 1),
    ("qwen3", 1, 2, 1),
    ("qwen3", 4, 2, 1),
    ("qwen3", 1, 4, 1),
    ("qwen3", 2, 1, 2),
    ("qwen3", 4, 2, 2),
    ("qwen3_moe", 2, 1, 1),
    ("deepseek_v32", 2, 2, 1),
    ("deepseek_v32", 2, 1, 1),
    ("deepseek_v32", 1, 2, 1),
    ("deepseek_v32", 2, 1, 2),
    ("qwen3_next", 1, 1, 1),
    ("qwen3_next", 2, 2, 1),
    ("qwen3_next", 2, 1, 1),
    ("qwen3_next", 1, 2, 1),
    ("qwen3_5", 4, 2, 1),
]
"""Family, ranks of prefill, ranks of decode, over how many of prefill's prompts are split."""


@pytest.mark.parametrize(("family", "prefill", "decode", "cp_size"), CASES)
def test_the_words_are_those_of_one_rank(
    models: Callable[[str], Path], family: str, prefill: int, decode: int, cp_size: int
) -> None:
    path = models(family)
    alone = SchedulerRig(path, **ARGS)
    with PdRanks(path, prefill, decode, cp_size=cp_size, **ARGS) as pair:
        for turn in ("cold", "cached on both sides"):
            check_words(pair, alone, turn)
        for rig in pair.decode.rigs:
            assert rig.scheduler.state.counters.prefill_tokens == 0, "nothing is computed twice"


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
