"""DP groups would have to share experts: models that have some are refused, no others."""

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


@pytest.mark.parametrize("family", FAMILIES)
def test_models_with_experts_are_refused_and_no_others(tmp_path: Path, family: str) -> None:
    save_tiny_checkpoint(tmp_path, family)
    config = ModelConfig.from_path(str(tmp_path), dtype="float32")
    model = build_model(config, LoadConfig())
    has_experts = any(isinstance(module, RoutedExperts) for module in model.modules())
    assert config.has_experts == has_experts
    args = ServerArgs(model_path=str(tmp_path), tp_size=2, attn_dp_size=2).resolve()
    if has_experts:
        with pytest.raises(ValueError, match=r"^--attn-dp-size 2 does not work with experts yet"):
            check_model_flags(args, config)
    else:
        check_model_flags(args, config)
    check_model_flags(ServerArgs(model_path=str(tmp_path), tp_size=2).resolve(), config)
