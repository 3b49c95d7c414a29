"""Each flag of SGLang's newest release: acted on, accepted, ignored with a warning, or refused."""

from __future__ import annotations

import logging

import pytest

from rigs.flags_of_sglang import (
    ACCEPTED,
    ACTED_ON,
    ALL_FLAGS,
    IGNORED,
    REFUSED,
    SglangFlag,
)
from sglang.srt.arg_groups import foreign_flags
from sglang.srt.arg_groups.cli import FlagErrors
from sglang.srt.server_args import ServerArgs, prepare_server_args
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="base-a-test-cpu")

ACTED = {flag.name for flag in ACTED_ON}


def answer(*argv: str) -> list[str]:
    """The lines about a command line; none if it is accepted."""
    try:
        prepare_server_args(argv)
    except FlagErrors as errors:
        return list(errors.lines)
    return []


def names(flags: tuple[SglangFlag, ...]) -> list[str]:
    return [flag.name for flag in flags]


def test_the_list_has_each_flag_once() -> None:
    assert len(ALL_FLAGS) == len(set(names(ALL_FLAGS))) == 168


@pytest.mark.parametrize("flag", ACCEPTED, ids=names(ACCEPTED))
def test_a_flag_that_turns_off_what_is_not_there_is_accepted_in_silence(
    flag: SglangFlag, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert prepare_server_args(flag.words()) == prepare_server_args([])
    assert not caplog.records


@pytest.mark.parametrize("flag", IGNORED, ids=names(IGNORED))
def test_a_flag_that_cannot_change_an_answer_is_ignored_with_one_warning(
    flag: SglangFlag, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert prepare_server_args(flag.words()) == prepare_server_args([])
    (record,) = caplog.records
    assert record.getMessage() == (
        f"no effect here, and none on answers: {flag.name} (docs/flags.md)"
    )


@pytest.mark.parametrize("feature", REFUSED)
def test_a_flag_is_refused_with_the_name_of_its_feature(feature: str) -> None:
    for flag in REFUSED[feature]:
        (line,) = answer(*flag.words())
        assert line.startswith(f"{flag.name}: SGLang has it, this engine does not")
        assert feature in line, line
    flags = REFUSED[feature]
    (line,) = answer(*(word for flag in flags for word in flag.words()))
    assert line.startswith(", ".join(names(flags)))


def test_no_flag_is_refused_at_its_default(caplog: pytest.LogCaptureFixture) -> None:
    argv = [f"{one.name}={one.default}" for one in ALL_FLAGS if one.default is not None]
    assert len(argv) > 40
    for one in argv:
        if one.partition("=")[0] not in ACTED:
            assert answer(one) == []


def test_no_hint_names_the_flag_of_another_feature(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flags that SGLang gets later are unknown as these would be without their rows."""
    monkeypatch.setattr(foreign_flags, "SGLANG_FLAGS", ())
    for flag in ALL_FLAGS:
        if flag.name not in ACTED:
            assert answer(flag.name) == [f"unknown flag {flag.name}; --help lists what there is"]


@pytest.mark.parametrize(
    ("flags", "setting"),
    [
        ("--enable-hicache", {"enable_hierarchical_cache": True}),
        (
            "--enable-hicache --hicache-host-memory-fraction 0.8",
            {"enable_hierarchical_cache": True, "hicache_host_memory_fraction": 0.8},
        ),
        (
            "--tp 4 --attn-cp-size 2 --enable-prefill-cp --cp-strategy zigzag",
            {"attn_cp_size": 2, "enable_prefill_context_parallel": True},
        ),
        ("--attn-dp-size 1 --dcp-size 1 --dwdp-size 1.0", {"dp_size": 1}),
        ("--cuda-graph-max-bs-decode 32", {"cuda_graph_max_bs": 32}),
        ("--cuda-graph-backend-decode disabled", {"disable_cuda_graph": True}),
        ("--disable-decode-cuda-graph", {"disable_cuda_graph": True}),
        ("--mamba-radix-cache-strategy extra_buffer_lazy", {"mamba_scheduler_strategy":
            "extra_buffer"}),
        ("--dtype half", {"dtype": "float16"}),
        ("--dtype float", {"dtype": "float32"}),
        ("--kv-cache-dtype bf16", {"kv_cache_dtype": "bfloat16"}),
        ("--enable-session-radix-cache", {"keep_session_share": 0.25}),
        ("--model-loader-extra-config {}", {"load_format": "auto"}),
        (
            "--disaggregation-mode decode --disaggregation-transfer-backend mooncake_tcp "
            "--disaggregation-enable-kv-checksum",
            {"disaggregation_transfer_backend": "mooncake_tcp",
                "disaggregation_enable_kv_checksum": True},
        ),
    ],
)  # fmt: skip
def test_another_name_sets_what_is_here(
    flags: str, setting: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        args = prepare_server_args(flags.split())
    assert not caplog.records
    assert {name: getattr(args, name) for name in setting} == setting


def test_an_engine_takes_the_other_names_too(caplog: pytest.LogCaptureFixture) -> None:
    args = ServerArgs.from_kwargs(
        enable_hicache=True,
        cuda_graph_max_bs_decode=8,
        mamba_radix_cache_strategy="extra_buffer_lazy",
        dtype="half",
        attn_dp_size=1,
        media_url_max_file_size_mb=64.0,
        asr_max_buffer_seconds=60,
    )
    assert args == ServerArgs(
        enable_hierarchical_cache=True,
        cuda_graph_max_bs=8,
        mamba_scheduler_strategy="extra_buffer",
        dtype="float16",
    )
    assert ServerArgs.from_kwargs(cuda_graph_backend_decode="disabled").disable_cuda_graph
    assert not caplog.records


@pytest.mark.parametrize("keys", ['{"enable_multithread_load": true}', '{"num_threads": 8}'])
def test_loading_with_threads_is_ignored(keys: str, caplog: pytest.LogCaptureFixture) -> None:
    flag = "--model-loader-extra-config"
    assert prepare_server_args([flag, keys]) == prepare_server_args([])
    assert f"none on answers: {flag} " in caplog.text
    ServerArgs.from_kwargs(model_loader_extra_config={"num_threads": 8})
    for other in ('{"load_format": "x", "num_threads": 8}', "[1]", "{", "3"):
        (line,) = answer(flag, other)
        assert line.endswith("does not: settings of other loaders of weights; remove the flag")


@pytest.mark.parametrize(
    ("flags", "ignored"),
    [
        ("--device cpu --cuda-graph-max-bs 8", ["--cuda-graph-max-bs"]),
        ("--device npu --cuda-graph-max-bs 8", ["--cuda-graph-max-bs"]),
        ("--device cuda --cuda-graph-max-bs 8", []),
        ("--cuda-graph-max-bs 8", []),
        ("--disable-cuda-graph --cuda-graph-max-bs 8", ["--cuda-graph-max-bs"]),
        (
            "--device cpu --cuda-graph-max-bs 8 --cuda-graph-bs 1 2",
            ["--cuda-graph-bs", "--cuda-graph-max-bs"],
        ),
        (
            "--disaggregation-mode decode --disaggregation-bootstrap-port 9001",
            ["--disaggregation-bootstrap-port"],
        ),
        ("--disaggregation-mode prefill --disaggregation-bootstrap-port 9001", []),
        ("--tp 4 --attn-cp-size 2 --moe-dp-size 2", ["--moe-dp-size"]),
    ],
)
def test_flags_of_this_engine_that_change_nothing_here_are_in_the_warning(
    flags: str, ignored: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        prepare_server_args(flags.split())
    wanted = [f"no effect here, and none on answers: {', '.join(ignored)} (docs/flags.md)"]
    assert [one.getMessage() for one in caplog.records] == (wanted if ignored else [])


def test_a_device_that_is_found_later_is_judged_then(caplog: pytest.LogCaptureFixture) -> None:
    args = prepare_server_args(["--cuda-graph-max-bs", "8"])
    args.on_device("cuda")
    assert not caplog.records
    args.on_device("cpu")
    assert "none on answers: --cuda-graph-max-bs" in caplog.text
    caplog.clear()
    prepare_server_args(["--cuda-graph-max-bs", "8", "--device", "cpu"]).on_device("cpu")
    assert len(caplog.records) == 1
