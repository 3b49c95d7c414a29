"""The built-in hybrid's MTP layer: its names, its chain beside transformers' layer, acceptance."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from safetensors import safe_open
from transformers import AutoTokenizer

from rigs.models.heldout_question import HeldoutQuestion
from rigs.models.model_oracle import assert_close
from rigs.recall.recall_text import UNKNOWN
from sglang.srt.constants import BUILTIN_HYBRID_MODEL_DIR
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=8, suite="base-a-test-cpu")

SCRIPTS: Final = Path(__file__).resolve().parents[4] / "scripts" / "builtin_model"
TOKENIZER: Any = AutoTokenizer.from_pretrained(BUILTIN_HYBRID_MODEL_DIR, local_files_only=True)
QUESTIONS: Final = 8
TOKENS_PER_VERIFY: Final = 3.3


@pytest.fixture(scope="module")
def mtp_model() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SCRIPTS)
        yield importlib.import_module("mtp_model")


@pytest.fixture(scope="module")
def train_mtp(mtp_model: Any) -> Any:
    return importlib.import_module("train_mtp")


@pytest.fixture(scope="module")
def trunk(mtp_model: Any) -> Any:
    return mtp_model.load_trunk(BUILTIN_HYBRID_MODEL_DIR)


@pytest.fixture(scope="module")
def layer(mtp_model: Any, trunk: Any) -> Any:
    return mtp_model.load_layer(trunk, BUILTIN_HYBRID_MODEL_DIR).requires_grad_(False)


def test_the_names_are_those_of_qwen3_5(mtp_model: Any, layer: Any, trunk: Any) -> None:
    with safe_open(BUILTIN_HYBRID_MODEL_DIR / "model.safetensors", framework="pt") as tensors:
        names = list(tensors.keys())
        shapes = {name: tuple(tensors.get_slice(name).get_shape()) for name in names}
    drafts = {name for name in shapes if name.startswith("mtp.")}
    # The weights of a trunk layer that has attention too.
    block = {name for name in shapes if name.startswith("model.layers.1.")}
    norms = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    own = {f"mtp.{name}.weight" for name in ("fc", *norms)}
    assert drafts == own | {name.replace("model.layers.1.", "mtp.layers.0.") for name in block}
    for name in block:
        assert shapes[name.replace("model.layers.1.", "mtp.layers.0.")] == shapes[name]
    assert shapes["mtp.fc.weight"] == (192, 384)
    assert {shapes[f"mtp.{name}.weight"] for name in norms} == {(192,)}
    assert trunk.config.mtp_num_hidden_layers == 1
    written = mtp_model.checkpoint_weights(layer)
    assert set(written) == drafts
    with safe_open(BUILTIN_HYBRID_MODEL_DIR / "model.safetensors", framework="pt") as tensors:
        for name, value in written.items():
            assert torch.equal(value, tensors.get_tensor(name)), name


def test_a_chain_is_what_transformers_compute(mtp_model: Any, trunk: Any, layer: Any) -> None:
    """Step by step, the anchor's prefix first, with the keys of the chain behind it."""
    ids = torch.randint(3, 2176, (2, 40), generator=torch.Generator().manual_seed(3))
    hidden = trunk.model(input_ids=ids, use_cache=False).last_hidden_state
    anchors = torch.tensor([[39, 20], [7, 31]])
    chains = mtp_model.draft(trunk, layer, ids, hidden, anchors)
    for row in range(2):
        for index, anchor in enumerate(anchors[row].tolist()):
            tokens, entering = ids[row : row + 1, 1 : anchor + 1], hidden[row : row + 1, :anchor]
            for step in range(mtp_model.NUM_STEPS):
                output = _whole(trunk, layer, tokens, entering)[:, -1:]
                logits = trunk.lm_head(output)
                assert_close(chains.hidden[step, row, index], output[0, 0])
                assert_close(chains.logits[step, row, index], logits[0, 0])
                tokens = torch.cat([tokens, logits.argmax(-1)], dim=1)
                entering = torch.cat([entering, output], dim=1)


def _whole(trunk: Any, layer: Any, tokens: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """Run transformers' `MtpLayer` on positions 1 and above, without a cache."""
    embedded = trunk.model.embed_tokens(tokens)
    positions = torch.arange(1, tokens.shape[1] + 1)[None]
    output: torch.Tensor = layer(
        embedded,
        hidden,
        position_embeddings=trunk.model.rotary_emb(embedded, position_ids=positions),
        attention_mask=torch.ones(1, 1, *2 * tokens.shape[1:], dtype=torch.bool).tril(),
        position_ids=positions,
        cache=None,
    )
    return output


@pytest.mark.parametrize("context_tokens", [272])
def test_drafts_at_codes_are_accepted(
    mtp_model: Any, train_mtp: Any, trunk: Any, layer: Any, context_tokens: int
) -> None:
    """The prompt's pass gives the first digit; the others and the end need verify steps."""
    asked = (HeldoutQuestion.of(seed, context_tokens) for seed in itertools.count(1000))
    told = (question for question in asked if question.answer != UNKNOWN)
    questions = list(itertools.islice(told, QUESTIONS))
    end = TOKENIZER.eos_token_id
    answers = [[*TOKENIZER(question.answer).input_ids, end] for question in questions]
    begins = torch.tensor([len(question.ids) for question in questions])[:, None]
    # After the answer the trunk repeats the end token.
    ids = torch.full((QUESTIONS, int(begins.max()) + 2 * len(answers[0])), end)
    for row, (question, answer) in enumerate(zip(questions, answers, strict=True)):
        ids[row, : len(question.ids) + len(answer)] = torch.tensor(question.ids + answer)
    hidden = trunk.model(input_ids=ids, use_cache=False).last_hidden_state
    says = trunk.lm_head(hidden).argmax(-1)
    anchors = begins + torch.arange(len(answers[0]) - 1)
    assert says.gather(1, anchors - 1).tolist() == [answer[:-1] for answer in answers]
    targets = torch.stack([says.gather(1, anchors + step) for step in range(mtp_model.NUM_STEPS)])
    drafts = mtp_model.draft(trunk, layer, ids, hidden, anchors)
    accepted = train_mtp.accepted(drafts.logits, targets).tolist()
    verifies = sum(train_mtp.verify_steps(counts) for counts in accepted)
    assert QUESTIONS * (len(answers[0]) - 1) / verifies > TOKENS_PER_VERIFY, accepted


def test_verify_steps_follow_the_accepted_drafts(train_mtp: Any) -> None:
    assert train_mtp.verify_steps([3, 0, 0, 0]) == 1
    assert train_mtp.verify_steps([1, 0, 3, 0]) == 2
    assert train_mtp.verify_steps([0, 0, 0, 0]) == 4
    logits = torch.nn.functional.one_hot(torch.tensor([[[5, 6]], [[1, 7]], [[2, 8]]]), 10)
    # The second draft of the first chain is wrong, so its third is not accepted.
    assert train_mtp.accepted(logits, torch.tensor([[[5, 6]], [[3, 7]], [[2, 8]]])).tolist() == [
        [1, 3]
    ]
