"""DP groups that share experts, and ranks with whole experts, say what one rank says: tiny models,
real servers. `test_dp_experts_nightly.py` has more sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

from rigs.nightly_cases import nightly
from rigs.words_of_ranks import Layout, assert_layouts_say_the_same
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=60, suite="base-b-test-cpu")

LAYOUTS: Final = {
    "qwen3_moe": [Layout(2, dp=2), Layout(4, dp=2, ep=4)],
    "deepseek_v32": [Layout(4, dp=4, ep=4)],
    "qwen3_next": [Layout(2, dp=2, ep=2)],
    "gpt_oss": [Layout(2, dp=2, ep=2)],
}


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v32", "qwen3_next", nightly("gpt_oss")])
def test_groups_and_whole_experts_say_what_one_rank_says(tmp_path: Path, family: str) -> None:
    assert_layouts_say_the_same(tmp_path, family, LAYOUTS[family])
