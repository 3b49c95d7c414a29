"""`python -m sglang.bench_one_batch` as a command, on the built-in model."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

import sglang
from rigs.servers.engine_server import EXACT
from rigs.servers.forked_benchmarks import run_forked
from rigs.servers.forked_servers import forking_engines
from sglang import bench_one_batch
from sglang.bench_one_batch import PROMPTS, main, parse_args
from sglang.benchmark.one_batch import (
    BatchTimes,
    Limits,
    decode_work,
    least_seconds,
    measure_limits,
    prefill_work,
)
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.constants import BUILTIN_MODEL_DIR
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=9, suite="base-b-test-cpu")

FIGURES = (
    "prefill_latency prefill_throughput median_decode_latency median_decode_throughput "
    "total_latency overall_throughput".split()
)


def bench(*flags: str, cwd: Path) -> str:
    """Output of a successful run of the tool."""
    done = run_forked("sglang.bench_one_batch", "--device", "cpu", *flags, cwd=cwd)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_each_combination_of_sizes_gets_a_record(tmp_path: Path) -> None:
    printed = bench(
        *("--batch-size", "1", "3", "--input-len", "40", "--output-len", "1", "6"),
        *("--run-name", "small", "--page-size", "16", "--log-decode-step", "2"),
        cwd=tmp_path,
    )
    text = (tmp_path / "result.jsonl").read_text(encoding="utf-8")
    records = [json.loads(line) for line in text.splitlines()]
    sizes = [(one["batch_size"], one["input_len"], one["output_len"]) for one in records]
    assert sizes == [(1, 40, 1), (1, 40, 6), (3, 40, 1), (3, 40, 6)]
    for one in records:
        count, new, out = one["batch_size"], one["input_len"], one["output_len"]
        assert one["run_name"] == "small"
        limit_s = one["prefill_of_limit"] * one["prefill_latency"]
        assert 0 < one["prefill_limit"] == pytest.approx(limit_s)
        assert one["prefill_throughput"] == pytest.approx(count * new / one["prefill_latency"])
        if out == 1:
            assert one["median_decode_latency"] is one["median_decode_throughput"] is None
            assert one["total_latency"] == one["prefill_latency"]
            continue
        assert all(one[name] > 0 for name in FIGURES)
        assert one["prefill_latency"] + 2 * one["median_decode_latency"] < one["total_latency"]
        assert one["overall_throughput"] == pytest.approx(
            count * (new + out) / one["total_latency"]
        )
        assert one["median_decode_of_limit"] > 0
    # Steps 0, 2 and 4 of the two settings that decode, without those of the warm-up.
    assert printed.count("decode step") == 6


BARE_TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


def correctness_test(cwd: Path, *flags: str) -> list[dict[str, Any]]:
    """The JSON lines of `--correctness-test`, which has no other output."""
    lines = bench(
        *("--correctness-test", "--output-len", "12", "--page-size", "16", *EXACT, *flags), cwd=cwd
    )
    return [json.loads(line) for line in lines.splitlines()]


@pytest.fixture(scope="module")
def continued(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The answers with a template that adds nothing."""
    folder: Path = tmp_path_factory.mktemp("bare")
    bare = folder / "bare.jinja"
    bare.write_text(BARE_TEMPLATE)
    return correctness_test(folder, "--chat-template", str(bare))


def test_answers_are_those_of_a_chat(tmp_path: Path, continued: list[dict[str, Any]]) -> None:
    answers = correctness_test(tmp_path)
    assert [one["prompt"] for one in answers + continued] == [*PROMPTS, *PROMPTS]
    # The second prompt asks for this code.
    assert answers[1]["text"].startswith("7391")
    as_chats = [f"<|im_start|>user\n{x}<|im_end|>\n<|im_start|>assistant\n" for x in PROMPTS]
    greedy = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
    with forking_engines():
        made = sglang.Engine(max_total_tokens=4096, device="cpu", dtype="float32")
    with made as engine:
        wanted = engine.generate([*as_chats, *PROMPTS], greedy)
    got = [one["output_ids"] for one in answers + continued]
    assert got == [one["output_ids"] for one in wanted]


def test_a_model_without_a_template_continues_the_plain_prompts(
    tmp_path: Path, continued: list[dict[str, Any]]
) -> None:
    model = tmp_path / "model"
    shutil.copytree(BUILTIN_MODEL_DIR, model, ignore=shutil.ignore_patterns("*.jinja"))
    assert correctness_test(tmp_path, "--model-path", str(model)) == continued


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--profile"], "--profile: SGLang has it, this tool does not"),
        (["--profile-record-shapes"], "--profile-record-shapes: SGLang has it"),
        (["--port", "3000"], "--port has no effect here"),
        (["--hicache-ratio", "3"], "--hicache-ratio"),
        (["--batch-size", "4", "0"], "--batch-size 0: must be at least 1"),
        (["--log-decode-step", "-1"], "--log-decode-step -1"),
        (["--batchsize", "4"], "unknown flag --batchsize"),
        (["--tp-size", "2"], "--tp-size has no effect here"),
    ],
)
def test_unusable_flags_are_refused(flags: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_args(["--device", "cpu", *flags])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--input-len", "16380", "--output-len", "6"], "do not fit .* context of 16384"),
        (["--batch-size", "8", "--max-total-tokens", "512"], "holds 512 tokens .* needs 8312"),
        (["--batch-size", "8", "--max-running-requests", "4"], "--max-running-requests 4"),
        (["--model-path", "/nonexistent"], "/nonexistent"),
    ],
)
def test_sizes_that_do_not_fit_give_one_line(
    flags: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Measuring takes seconds, and comes first because it needs memory that pools would take.
    monkeypatch.setattr(bench_one_batch, "measure_limits", lambda *_: Limits(1e9, 1e9))
    sizes = ["--device", "cpu", "--result-filename", "", "--log-level", "error"]
    assert main([*sizes, *flags]) == 2
    (line,) = (x for x in capsys.readouterr().err.splitlines() if x.startswith("bench_one_batch"))
    assert re.search(message, line), line


def test_figures_follow_from_the_times_of_steps() -> None:
    times = BatchTimes(4, 100, 4, prefill=2.0, decode_steps=[0.5, 1.0, 0.25])
    figures = times.figures()
    assert [figures[name] for name in FIGURES] == [2.0, 200.0, 0.5, 8.0, 3.75, 416 / 3.75]


def test_limits_count_the_bytes_and_products_of_a_step() -> None:
    """Hand count: 4 layers of 192 x (192 + 64) x 2 and 3 x 192 x 512 weights, head 2,176 x 192."""
    model = ModelConfig.from_path(str(BUILTIN_MODEL_DIR), dtype="float32")
    kv, other, head = 192 * 128, 192 * 384 + 3 * 192 * 512, 2176 * 192
    body = 4 * (kv + other)
    slow_memory = Limits(copy_bytes_per_s=1e3, product_flop_per_s=1e15)
    read = least_seconds(model, decode_work(2, 100, 1024), slow_memory)
    assert read == pytest.approx((4 * (body + head) + 200 * 1024) / 1e3)
    rounded = ModelConfig.from_path(str(BUILTIN_MODEL_DIR), dtype="float32", quantization="fp8")
    read = least_seconds(rounded, decode_work(2, 100, 1024), slow_memory)
    assert read == pytest.approx((body + 4 * head + 200 * 1024) / 1e3)
    slow_arithmetic = Limits(copy_bytes_per_s=1e15, product_flop_per_s=1e3)
    # In the last layer, 18 of the 20 tokens need only keys and values.
    flops = 2 * (body - other) * 20 + 2 * (other + head) * 2 + 4 * 192 * (3 * 2 * 55 + 2 * 10)
    computed = least_seconds(model, prefill_work(2, 10), slow_arithmetic)
    assert computed == pytest.approx(flops / 1e3)


def test_this_machine_has_limits() -> None:
    limits = measure_limits("cpu", ModelConfig.from_path(str(BUILTIN_MODEL_DIR)).dtype)
    assert 1e8 < limits.copy_bytes_per_s < 1e13
    assert 1e8 < limits.product_flop_per_s < 1e14
