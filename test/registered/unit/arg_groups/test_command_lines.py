"""Command lines of SGLang, as its documentation has them: one answer says all that is to change."""

from __future__ import annotations

import dataclasses
import logging
import runpy
import shlex
from pathlib import Path
from typing import Any, Final

import pytest

from sglang.srt.arg_groups.cli import FlagErrors, flag_name
from sglang.srt.arg_groups.foreign_flags import SGLANG_FLAGS, Treatment, foreign_flags
from sglang.srt.server_args import ServerArgs, prepare_server_args
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="base-a-test-cpu")

DEEPSEEK: Final = "--model-path deepseek-ai/DeepSeek-V3.2 --trust-remote-code"
QWEN: Final = "--model Qwen/Qwen3-Next-80B-A3B-Instruct --tp 4"
DP: Final = "--tp 8 --dp 8 --enable-dp-attention"
MTP: Final = "--speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4"
COMMANDS: Final = {
    "DeepSeek, pure TP": f"{DEEPSEEK} --tp 8",
    "DeepSeek, DP attention": f"{DEEPSEEK} --ep 8 {DP} --tool-call-parser deepseekv32 "
    "--reasoning-parser deepseek-v3",
    "DeepSeek, MTP": f"{DEEPSEEK} {DP} --speculative-algorithm EAGLE {MTP}",
    "DeepSeek, context parallel": f"{DEEPSEEK} --tp 8 --ep 8 --dp 2 --enable-dp-attention "
    "--enable-nsa-prefill-context-parallel --max-running-requests 32",
    "Qwen3-Next": f"{QWEN} {MTP} --speculative-algo NEXTN",
    "Qwen3-Next, states": f"{QWEN} --max-mamba-cache-size 64 --mamba-ssm-dtype float16 "
    "--attention-backend fa3 --mamba-scheduler-strategy extra_buffer",
    "HiCache on 3FS": "--model-path /x/DeepSeek-R1/ --log-level info --tp 8 --port 10000 "
    "--enable-metrics --enable-cache-report --page-size 64 --mem-fraction-static 0.85 "
    "--enable-hierarchical-cache --hicache-ratio 2 --hicache-size 0 "
    "--hicache-mem-layout page_first --hicache-write-policy write_through "
    "--hicache-storage-backend hf3fs --hicache-storage-prefetch-policy wait_complete",
    "HiCache on Mooncake": "--model-path m --tp 8 --page-size 64 --enable-hierarchical-cache "
    "--hicache-ratio 2 --hicache-mem-layout page_first --hicache-io-backend kernel "
    "--hicache-storage-backend mooncake --hicache-write-policy write_through "
    "--hicache-storage-prefetch-policy timeout",
    "PD, Llama": "--model-path m --disaggregation-mode prefill --port 30000 "
    "--disaggregation-ib-device mlx5_roce0",
    "PD, NIXL": "--model-path m --disaggregation-mode decode --port 30001 --base-gpu-id 1 "
    "--disaggregation-transfer-backend nixl",
    "PD, DeepSeek on two nodes": "--model-path deepseek-ai/DeepSeek-V3-0324 "
    "--disaggregation-ib-device mlx5_0 --disaggregation-mode prefill --host 10.0.0.1 --port 30000 "
    "--trust-remote-code --dist-init-addr 10.0.0.1:5000 --nnodes 2 --node-rank 0 --tp-size 16 "
    "--dp-size 8 --enable-dp-attention --moe-a2a-backend deepep --mem-fraction-static 0.8",
    "PD, decode with offload": "--model-path m --tp 8 --port 10000 --enable-metrics "
    "--enable-cache-report --page-size 64 --hicache-ratio 2 --hicache-size 0 "
    "--hicache-io-backend direct --hicache-write-policy write_through "
    "--hicache-storage-backend hf3fs --hicache-storage-prefetch-policy wait_complete "
    "--disaggregation-decode-enable-offload-kvcache --disaggregation-ib-device mlx5_0 "
    "--disaggregation-mode decode --disaggregation-transfer-backend mooncake",
    "PD, DeepSeek by EP": "--model-path m --port 30000 --trust-remote --disable-radix-cache "
    "--disaggregation-ib-device mlx5_0,mlx5_1 --chunked-prefill-size 131072 --page-size 64 "
    "--ep-dispatch-algorithm dynamic --eplb-algorithm deepseek --enable-dp-lm-head "
    "--enable-dp-attention --dp-size 8 --moe-a2a-backend deepep --deepep-mode normal "
    "--disaggregation-mode decode --prefill-round-robin-balance --max-prefill-tokens 32768 "
    "--context-length 32768 --tp 8 --ep-num-redundant-experts 32 --moe-dense-tp-size 1 "
    "--max-running-requests 1024 --cuda-graph-bs 1 2 4 8 16 --decode-log-interval 1",
}
"""Commands of documentation pages and manifests."""
INSTEAD: Final = {"--hicache-storage-backend": "file", "--attention-backend": "flashinfer"}
"""Values for those that are refused with a choice of others."""
NO_SECRET: Final = "--disaggregation-allow-no-secret"
"""Flag that is missing where a line names it."""


def words(command: str) -> list[str]:
    return shlex.split(command)


def refused(line: str) -> list[str]:
    """The flags that a line is about: those that it begins with."""
    found = []
    for word in line.removeprefix("unknown flag ").split():
        if not word.startswith("--"):
            break
        found.append(word.strip(",:;"))
    return found


def changed(argv: list[str], lines: tuple[str, ...]) -> list[str]:
    """`argv` without the flags that the lines refuse and their values, or with other values."""
    remedies = [line for line in lines if NO_SECRET in line]
    flags = {flag for line in lines if line not in remedies for flag in refused(line)}
    for field in dataclasses.fields(ServerArgs):
        if flag_name(field.name) in flags:
            flags.update(field.metadata["aliases"])
    kept, keeps = [], True
    for word in argv:
        if word.startswith("--"):
            keeps = word not in flags
            if word in flags and word in INSTEAD:
                kept += [word, INSTEAD[word]]
        if keeps:
            kept.append(word)
    return [*kept, NO_SECRET] if remedies else kept


def answer(argv: list[str]) -> tuple[str, ...]:
    """The lines about a command line; none if it is accepted."""
    try:
        prepare_server_args(argv)
    except FlagErrors as errors:
        return errors.lines
    return ()


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_line_that_is_changed_as_the_answer_says_is_accepted(name: str) -> None:
    argv = words(COMMANDS[name])
    lines = answer(argv)
    assert not any("\n" in line for line in lines)
    assert answer(changed(argv, lines)) == ()


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("DeepSeek, pure TP", []),
        ("HiCache on Mooncake", []),
        ("DeepSeek, DP attention", []),
        ("Qwen3-Next", []),
        (
            "PD, DeepSeek on two nodes",
            [
                "--moe-a2a-backend: SGLang has it, this engine does not: expert parallelism in "
                "other ways than --ep-size; remove the flag",
                "--enable-dp-attention --dp-size 8 does not work with --nnodes 2 yet: leave one of "
                "them out",
                "--host 10.0.0.1 with --disaggregation-mode prefill needs a secret, the same on "
                "all servers of the deployment: give --disaggregation-secret-file or "
                "SGLANG_DISAGGREGATION_SECRET, or --disaggregation-allow-no-secret if only these "
                "servers can reach each other",
            ],
        ),
    ],
)
def test_all_refused_flags_are_named_at_once(name: str, lines: list[str]) -> None:
    assert list(answer(words(COMMANDS[name]))) == lines


def test_mistakes_of_all_kinds_are_named_at_once() -> None:
    argv = words(
        "stray --lora-paths a --pagesize 3 --page-size x --port 0 --dtype int8 --max-model-len 9 "
        "--log-requests true --hicache-size 64X --served-model-name '' --hicache-ratio 3 "
        "--log-level-http error --disable-custom-all-reduce --dp 1"
    )
    starts = [line.split(":")[0].split(";")[0] for line in answer(argv)]
    assert starts == [
        "--lora-paths",
        "unknown flag --pagesize",
        "unknown flag --max-model-len",
        "'stray' belongs to no flag",
        "--page-size",
        "'true' belongs to no flag",
        "--hicache-size",
        "--dtype int8",
        "--port 0",
        "--served-model-name is empty",
        "--hicache-ratio 3.0 has no effect without --enable-hierarchical-cache",
    ]


def test_a_malformed_value_is_not_held_against_others() -> None:
    (line,) = answer(words("--enable-hierarchical-cache --page-size x --chunked-prefill-size 100"))
    assert line.startswith("--page-size: invalid int value")
    (line,) = answer(words("--enable-metrics=true"))
    assert line == "--enable-metrics: takes no value; give it alone, or leave it out"
    assert len(answer(words("--disaggregation-mode both --disaggregation-ib-device a"))) == 1


@pytest.mark.parametrize(
    "flags",
    [
        "--dp 1 --dp-size 1 --data-parallel-size 1 --pp-size 1 --ep-size 1 --moe-a2a-backend none",
        "--moe-dp-size=1 --tokenizer-mode auto --model-impl auto",
        "--json-model-override-args {} --load-balance-method auto --gpu-id-step 1",
        "--disable-custom-all-reduce --disable-cuda-graph-padding --disable-chunked-prefix-cache",
        "--disable-outlines-disk-cache --flashinfer-mla-disable-ragged",
    ],
)
def test_flags_that_ask_for_nothing_are_accepted_in_silence(
    flags: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert prepare_server_args(words(flags)) == prepare_server_args([])
    assert not caplog.records


def test_flags_that_cannot_change_an_answer_get_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    flags = (
        "--log-level-http error --log-requests-level 2 --decode-log-interval=40 "
        "--skip-server-warmup --enable-p2p-check --cuda-graph-bs 1 2 4 --moe-runner-backend triton"
    )
    with caplog.at_level(logging.WARNING):
        assert prepare_server_args(words(flags)) == prepare_server_args([])
    (record,) = caplog.records
    assert record.message == (
        "no effect here, and none on answers: --log-level-http, --log-requests-level, "
        "--decode-log-interval, --skip-server-warmup, --enable-p2p-check, --cuda-graph-bs, "
        "--moe-runner-backend (docs/flags.md)"
    )


def test_an_engine_gets_the_same_judgement(caplog: pytest.LogCaptureFixture) -> None:
    nothing: dict[str, Any] = {"dp_size": 1, "enable_dp_attention": False, "quantization": None}
    ignored = {"decode_log_interval": 10, "cuda_graph_bs": [1, 2]}
    args = ServerArgs.from_kwargs(model_path="dummy", **nothing, **ignored)
    assert args == ServerArgs(model_path="dummy")
    assert "--decode-log-interval, --cuda-graph-bs" in caplog.text
    with pytest.raises(FlagErrors) as caught:
        ServerArgs.from_kwargs(pp_size=2, pagesize=3, **ignored)
    assert [line.split(":")[0] for line in caught.value.lines] == [
        "--pp-size", "unknown flag --pagesize; did you mean --page-size?",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "gigabytes"),
    [("64", 64.0), ("64G", 64.0), ("64GB", 64.0), ("1.5t", 1500.0), ("512mb", 0.512),
     ("2GiB", 2.147483648), ("0", 0.0), (".5", None), ("64X", None), ("-1", None)],
)  # fmt: skip
def test_sizes_are_read_as_gigabytes(text: str, gigabytes: float | None) -> None:
    argv = ["--enable-hierarchical-cache", "--hicache-size", text]
    if gigabytes is None:
        (line,) = answer(argv)
        assert line == f"--hicache-size: {text!r} is not a size; write GB or a unit, e.g. 64, " + (
            "64GB or 64GiB"
        )
    else:
        assert prepare_server_args(argv).hicache_size == gigabytes


def test_the_page_about_flags_follows_the_table() -> None:
    repo = Path(__file__).parents[4]
    script = runpy.run_path(str(repo / "scripts" / "update_flags.py"))
    page = (repo / "docs" / "flags.md").read_text(encoding="utf-8")
    assert page.endswith(script["tables"]()), "run scripts/update_flags.py"


def test_the_first_row_that_matches_is_meant() -> None:
    treatments = {
        "disable_fast_image_processor": Treatment.OFF,
        "mm_attention_backend": Treatment.NEVER,
        "disable_flashinfer_autotune": Treatment.OFF,
        "flashinfer_mxfp4_moe_precision": Treatment.NEVER,
        "moe_runner_backend": Treatment.IGNORED,
        "moe_dense_tp_size": Treatment.IGNORED,
        "weight_loader_disable_mmap": Treatment.OFF,
    }
    for name, treatment in treatments.items():
        row = foreign_flags(name)
        assert row is not None and row.treatment is treatment
    features = [row.feature for row in SGLANG_FLAGS]
    assert len(features) == len(set(features))
