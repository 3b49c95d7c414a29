"""Flags of speculation: what takes effect, and what is refused by name, with the remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from rigs.models.tiny_models import save_tiny_checkpoint
from sglang.srt.arg_groups.speculative import num_draft_tokens
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.server_args import ServerArgs, prepare_server_args
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=5, suite="base-a-test-cpu")

NEXTN = ("--speculative-algorithm", "NEXTN")
STEPS = "--speculative-num-steps"
TOPK = "--speculative-eagle-topk"
TOKENS = "--speculative-num-draft-tokens"


def prepare(*argv: str) -> ServerArgs:
    return prepare_server_args(["--model-path", "dummy", *argv])


@pytest.mark.parametrize(
    ("argv", "tokens"),
    [
        ((), 1),
        (NEXTN, 4),
        (("--speculative-algo", "EAGLE"), 4),
        ((*NEXTN, STEPS, "1"), 2),
        ((*NEXTN, STEPS, "5", TOPK, "1", TOKENS, "6"), 6),
        ((*NEXTN, "--disaggregation-mode", "decode"), 4),
        ((*NEXTN, "--tp-size", "4"), 4),
        ((*NEXTN, "--tp-size", "4", "--attn-cp-size", "2"), 4),
    ],
)
def test_flags_set_a_steps_tokens(argv: tuple[str, ...], tokens: int) -> None:
    args = prepare(*argv)
    assert num_draft_tokens(args) == tokens
    assert args.resolve() == args


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ((STEPS, "3"), "--speculative-num-steps 3 has no effect without --speculative-algorithm"),
        ((*NEXTN, STEPS, "0"), "--speculative-num-steps 0 must be from 1 to 8"),
        ((*NEXTN, STEPS, "9"), "--speculative-num-steps 9 must be from 1 to 8"),
        ((*NEXTN, TOPK, "4"), "--speculative-eagle-topk 4: only chains are supported, so give 1"),
        ((*NEXTN, STEPS, "3", TOKENS, "8"), "--speculative-num-draft-tokens 8 .* give 4"),
        ((*NEXTN, "--speculative-draft-model-path", "x"), "--speculative-draft-model-path: SGLang"),
        (
            (*NEXTN, "--speculative-accept-threshold-single", "0.5"),
            "--speculative-accept-threshold-single: SGLang has it, this engine does not",
        ),
        (("--speculative-algorithm", "STANDALONE"), "STANDALONE: SGLang has it.* use NEXTN"),
    ],
)
def test_refusals_name_the_flag_and_the_remedy(argv: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        prepare(*argv)


def test_thresholds_at_their_defaults_are_accepted() -> None:
    args = prepare(*NEXTN, "--speculative-accept-threshold-single", "1.0")
    assert num_draft_tokens(args) == 4


def test_a_model_without_the_layer_is_refused(tmp_path: Path) -> None:
    save_tiny_checkpoint(tmp_path, "qwen3")
    with pytest.raises(ValueError, match="Qwen3ForCausalLM has no layer that drafts tokens"):
        ModelConfig.from_path(str(tmp_path), has_draft_layer=True)


def test_a_checkpoint_without_the_layer_is_refused(tmp_path: Path) -> None:
    save_tiny_checkpoint(tmp_path, "glm4_moe", num_nextn_predict_layers=0)
    with pytest.raises(ValueError, match="remove --speculative-algorithm"):
        ModelConfig.from_path(str(tmp_path), has_draft_layer=True)
