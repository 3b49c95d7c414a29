"""`test_dp_experts.py` for every family with experts, and for more sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

from rigs.words_of_ranks import WITH_SAME_LAYERS, Layout, assert_layouts_say_the_same
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=300, suite="nightly-test-cpu", nightly=True)

LAYOUTS: Final = [
    Layout(2, dp=2),
    Layout(2, ep=2),
    Layout(2, dp=2, ep=2),
    Layout(4, dp=2),
    Layout(4, dp=2, ep=4),
    Layout(4, dp=4),
    Layout(4, dp=4, ep=4),
]
FAMILIES: Final = (
    "qwen3_moe", "deepseek_v32", "minimax_m2", "kimi_linear", "qwen3_next", "nemotron_h", "gpt_oss",
    "deepseek_v4", "glm5_next", *WITH_SAME_LAYERS,
)  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_groups_and_whole_experts_say_what_one_rank_says(tmp_path: Path, family: str) -> None:
    assert_layouts_say_the_same(tmp_path, family, LAYOUTS)


@pytest.mark.parametrize("family", ["deepseek_v32", "qwen3_next", "glm4_moe", "qwen3_5_moe"])
def test_groups_and_whole_experts_draft_tokens(tmp_path: Path, family: str) -> None:
    layouts = [Layout(2, ep=2), Layout(2, dp=2), Layout(4, dp=2, ep=4)]
    drafts = ("--speculative-algorithm", "NEXTN")
    assert_layouts_say_the_same(tmp_path, family, layouts, *drafts)
