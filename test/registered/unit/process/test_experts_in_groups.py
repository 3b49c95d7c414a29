"""Flags of DP groups and of expert parallelism that do not work with a model are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from rigs.models.tiny_models import FAMILIES, save_tiny_checkpoint
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.moe.experts import RoutedExperts
from sglang.srt.model_loader.loader import build_model
from sglang.srt.model_loader.weight_source import LoadConfig
from sglang.srt.process.build import check_model_flags
from sglang.srt.server_args import ServerArgs
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=8, suite="base-a-test-cpu")


def args_of(path: Path, **fields: object) -> ServerArgs:
    return ServerArgs(model_path=str(path), tp_size=4, **fields).resolve()  # type: ignore[arg-type]


@pytest.mark.parametrize("family", FAMILIES)
def test_groups_with_experts_have_limits_and_no_others(tmp_path: Path, family: str) -> None:
    save_tiny_checkpoint(tmp_path, family)
    config = ModelConfig.from_path(str(tmp_path), dtype="float32")
    model = build_model(config, LoadConfig())
    has_experts = any(isinstance(module, RoutedExperts) for module in model.modules())
    assert config.has_experts == has_experts
    check_model_flags(args_of(tmp_path), config)
    check_model_flags(args_of(tmp_path, attn_dp_size=2), config)
    wide, drafts = (
        args_of(tmp_path, attn_dp_size=2, attn_cp_size=2),
        args_of(tmp_path, attn_dp_size=2, speculative_algorithm="NEXTN"),
    )
    whole = args_of(tmp_path, ep_size=4)
    check_model_flags(drafts, config)
    if not has_experts:
        check_model_flags(wide, config)
        with pytest.raises(ValueError, match=r"^--ep-size 4 has no effect on \w+, which has no"):
            check_model_flags(whole, config)
        return
    check_model_flags(whole, config)
    check_model_flags(args_of(tmp_path, ep_size=4, speculative_algorithm="NEXTN"), config)
    with pytest.raises(ValueError, match=r"^--attn-dp-size 2 does not work with --attn-cp-size 2"):
        check_model_flags(wide, config)
