"""`tie_word_embeddings: true` beside a head in the files: the files decide, as in transformers."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from rigs.caches.memory_ranks import PlaceInGroup
from rigs.drafts.draft_driver import DraftDriver
from rigs.models.model_oracle import assert_logits_of_batches, prompt
from rigs.models.quantized_checkpoints import awq, write_quantized
from rigs.models.tiny_models import FAMILIES, StepDriver, save_tiny_checkpoint
from rigs.models.weight_rig import weight_rig
from sglang.hicache_plan import main, weights_by_ranks
from sglang.planning.model_costs import config_of_files
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.model_loader.loader import build_model, get_model
from sglang.srt.model_loader.weight_source import LoadConfig
from sglang.srt.models.llama import LlamaForCausalLM
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=10, suite="base-a-test-cpu")

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
UNTIED = ("kimi_linear", "nemotron_h", "deepseek_v4")
"""transformers never ties the heads of the first two, and saves them beside the embedding. The
third is refused with tied heads."""
CASES = ("differs", "equal", "alone", "absent")


def names_of(family: str) -> tuple[str, str]:
    """Names of head and embedding in a file."""
    if family.startswith("kimi_k25"):
        return f"language_model.{HEAD}", f"language_model.{EMBEDDING}"
    if is_part(family):
        return HEAD, EMBEDDING.replace("model", "model.language_model")
    return HEAD, EMBEDDING


def is_part(family: str) -> bool:
    """True if the text model is a part of another."""
    return "vision" in family or family == "glm5_next"


def tied_checkpoint(path: Path, family: str, case: str, *, mtp: bool = False) -> Path:
    """A checkpoint whose config.json ties the head to the embedding. `case` says which of the two
    tensors the file has, and whether they are equal."""
    save_tiny_checkpoint(path, family, tie_word_embeddings=True, mtp=mtp)
    file = path / "model.safetensors"
    tensors = load_file(file)
    head, embedding = names_of(family)
    assert head not in tensors and embedding in tensors
    if case != "absent":
        tensors[head] = tensors[embedding].clone()
    if case == "differs":
        tensors[head][-1, -1] += 1.0
    if case == "alone":
        del tensors[embedding]
    save_file(tensors, file, metadata={"format": "pt"})
    return path


def loaded(path: Path, rank: int = 0, size: int = 1, load_format: str = "auto") -> LlamaForCausalLM:
    load_config = LoadConfig(
        load_format=load_format, tp_group=PlaceInGroup(rank, size), show_progress=False
    )
    model = get_model(ModelConfig.from_path(str(path)), load_config)
    assert isinstance(model, LlamaForCausalLM)
    return model


def head_of(model: LlamaForCausalLM) -> torch.Tensor:
    return (model.lm_head or model.model.embed_tokens).weight


@pytest.mark.half
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("family", [one for one in FAMILIES if one not in UNTIED])
def test_head_and_embedding_are_those_of_transformers(
    tmp_path: Path, family: str, case: str
) -> None:
    path = tied_checkpoint(tmp_path, family, case)
    auto = AutoModelForImageTextToText if is_part(family) else AutoModelForCausalLM
    oracle: Any = auto.from_pretrained(path)
    want = [
        layer.weight for layer in (oracle.get_input_embeddings(), oracle.get_output_embeddings())
    ]
    model = loaded(path)
    assert (model.lm_head is not None) == (want[0] is not want[1]) == (case == "differs")
    for got, wanted in zip((model.model.embed_tokens.weight, head_of(model)), want, strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5_vision"])
def test_logits_are_those_of_transformers(tmp_path: Path, family: str) -> None:
    path = tied_checkpoint(tmp_path, family, "differs")
    auto = AutoModelForImageTextToText if is_part(family) else AutoModelForCausalLM
    assert_logits_of_batches(auto.from_pretrained(path), StepDriver(path, page_size=4))


def test_the_log_says_that_config_json_is_not_followed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        loaded(tied_checkpoint(tmp_path, "qwen3", "equal"))
        assert "tie_word_embeddings" not in caplog.text
        loaded(tied_checkpoint(tmp_path, "qwen3", "differs"))
    assert f"tie_word_embeddings=true is not followed: {tmp_path} has a {HEAD}" in caplog.text


@pytest.mark.parametrize("case", CASES)
def test_each_rank_has_its_part(tmp_path: Path, case: str) -> None:
    path = tied_checkpoint(tmp_path, "llama", case)
    ranks = [loaded(path, rank, 2) for rank in range(2)]
    assert torch.equal(torch.cat([head_of(model) for model in ranks]), head_of(loaded(path)))


@pytest.mark.parametrize("case", CASES)
def test_pickled_files_decide_too(tmp_path: Path, case: str) -> None:
    path = tied_checkpoint(tmp_path, "llama", case)
    want = loaded(path)
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    for number, name in enumerate((HEAD, EMBEDDING)):
        if name in tensors:
            torch.save({name: tensors.pop(name)}, path / f"pytorch_model-{number}.bin")
    torch.save(tensors, path / "pytorch_model-9.bin")
    got = loaded(path, load_format="pt")
    for name, weight in want.named_parameters():
        assert torch.equal(got.get_parameter(name), weight)


def test_heads_are_compared_in_the_dtype_of_the_model(tmp_path: Path) -> None:
    path = tied_checkpoint(tmp_path, "llama", "equal")
    file = path / "model.safetensors"
    tensors = load_file(file)
    tensors[HEAD] = tensors[HEAD].to(torch.bfloat16)
    save_file(tensors, file)
    for dtype, is_own in (("bfloat16", False), ("float32", True)):
        config = ModelConfig.from_path(str(path), dtype=dtype)
        model = build_model(config, LoadConfig(show_progress=False))
        assert isinstance(model, LlamaForCausalLM)
        assert (model.lm_head is not None) is is_own


def test_a_quantized_head_is_one_of_its_own(tmp_path: Path) -> None:
    plain = tied_checkpoint(tmp_path / "tied", "llama", "absent")
    path = write_quantized(plain, tmp_path, awq())
    file = path / "model.safetensors"
    tensors = load_file(file)
    values = tensors[EMBEDDING].flip(0).numpy()
    encoded, want = awq().encode(HEAD, values)
    save_file({**tensors, **{name: one.contiguous() for name, one in encoded.items()}}, file)
    model = loaded(path)
    assert torch.equal(model.model.embed_tokens.weight, tensors[EMBEDDING])
    assert torch.equal(head_of(model), torch.from_numpy(want))


@pytest.mark.parametrize("name", [HEAD, EMBEDDING])
def test_one_of_them_twice_is_refused(tmp_path: Path, name: str) -> None:
    path = tied_checkpoint(tmp_path, "llama", "equal")
    save_file({name: torch.zeros(160, 96)}, path / "a.safetensors")
    with pytest.raises(ValueError, match=rf"tensor '{name}' is there twice"):
        loaded(path)


def test_a_head_of_another_shape_is_refused(tmp_path: Path) -> None:
    path = tied_checkpoint(tmp_path, "llama", "equal")
    file = path / "model.safetensors"
    save_file({**load_file(file), HEAD: torch.zeros(159, 96)}, file)
    with pytest.raises(ValueError, match=rf"'{HEAD}' has shape \[159, 96\], config.json asks for"):
        loaded(path)


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_5"])
def test_drafts_have_the_same_head(tmp_path: Path, family: str) -> None:
    """The logits of drafts change with the head, and only with it."""
    logits = []
    for case in ("absent", "differs"):
        path = tied_checkpoint(tmp_path / case, family, case, mtp=True)
        if case == "differs":
            file = path / "model.safetensors"
            tensors = load_file(file)
            save_file({**tensors, HEAD: 2.0 * tensors[EMBEDDING]}, file)
        logits.append(DraftDriver(path).run([(0, prompt(30, 1))]).logits)
    torch.testing.assert_close(logits[1], 2.0 * logits[0])


@pytest.mark.parametrize("case", ["differs", "equal"])
def test_a_server_that_reads_weights_has_the_head_of_its_seed(
    on_a_cpu_over_tcp: None, tmp_path: Path, case: str
) -> None:
    path = tied_checkpoint(tmp_path, "llama", case)
    with weight_rig(path) as rig:
        source = rig.source()
        assert source.has_own_head(HEAD, EMBEDDING) is (case == "differs")
        (path / "model.safetensors").rename(tmp_path / "elsewhere")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("sglang.srt.model_loader.loader._make_source", lambda *_: source)
            model, _ = rig.read()
        assert isinstance(model, LlamaForCausalLM)
        assert isinstance(rig.seed_model, LlamaForCausalLM)
        assert torch.equal(head_of(model), head_of(rig.seed_model))


@pytest.mark.parametrize("case", CASES)
def test_the_planner_counts_the_head_of_the_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    path = tied_checkpoint(tmp_path, "qwen3", case)
    config = config_of_files(ModelConfig.from_path(str(path)))
    (row,) = weights_by_ranks(config)
    want = StepDriver(path).runner.weight_bytes()
    assert row["bytes"][1] == want
    assert main(["--model-path", str(path), "--weights-only", "--json"]) == 0
    assert f'"1": {want}' in capsys.readouterr().out
