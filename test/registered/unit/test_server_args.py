"""ServerArgs: the command line, refusals with their messages, and `resolve`."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from sglang.srt.arg_groups.cli import Heading
from sglang.srt.arg_groups.extra_config import parse_extra_config
from sglang.srt.arg_groups.foreign_flags import foreign_flags, other_name, refused_choice
from sglang.srt.server_args import FIRST_FLAGS, ServerArgs, prepare_server_args
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=2, suite="base-a-test-cpu")

HOSTS = ("--tp", "2", "--nnodes", "2", "--dist-init-addr", "host:1")
EXTRA = "--hicache-storage-backend-extra-config"


def prepare(*argv: str) -> ServerArgs:
    return prepare_server_args(["--model-path", "dummy", *argv])


def test_defaults_need_neither_disk_nor_hardware() -> None:
    args = ServerArgs(model_path="dummy").resolve()
    assert args.model_path == args.tokenizer_path == args.served_model_name == "dummy"
    assert (args.page_size, args.device, args.attention_backend) == (1, "auto", None)
    assert (args.host, args.port, args.chunked_prefill_size) == ("127.0.0.1", 30000, None)
    assert not args.enable_hierarchical_cache


def test_the_built_in_model_is_the_default() -> None:
    args = prepare_server_args([])
    assert args.model_path is not None
    assert Path(args.model_path).name == "builtin_model"
    assert args.served_model_name == "sglang-builtin"


def test_command_line_equals_constructor() -> None:
    argv = ["--tp", "1", "--page-size=16", "--log-requests", "--hicache-ratio", "1.5"]
    want = ServerArgs(
        model_path="dummy",
        page_size=16,
        log_requests=True,
        hicache_ratio=1.5,
        enable_hierarchical_cache=True,
    )
    assert prepare(*argv, "--enable-hierarchical-cache") == want.resolve()


def test_resolve_is_idempotent_and_frozen() -> None:
    args = prepare("--hicache-storage-backend", "file")
    assert args.resolve() == args
    with pytest.raises(dataclasses.FrozenInstanceError):
        args.port = 1


@pytest.mark.parametrize(
    ("device", "backend", "chunk"),
    [("cpu", "torch_native", 2048), ("cuda", "triton", 8192), ("npu", "torch_native", 8192)],
)
def test_defaults_that_depend_on_the_device(device: str, backend: str, chunk: int) -> None:
    want = (device, backend, chunk)
    open_ = prepare("--page-size", "64")
    for args in (open_.on_device(device), prepare("--device", device, "--page-size", "64")):
        assert (args.device, args.attention_backend, args.chunked_prefill_size) == want
        assert args.resolve() == args == args.on_device(device)
    named = prepare("--attention-backend", "torch_native", "--chunked-prefill-size", "-1")
    args = named.on_device(device)
    assert (args.attention_backend, args.chunked_prefill_size) == ("torch_native", -1)
    assert prepare("--page-size", "10000").on_device(device).chunked_prefill_size == 10000


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--attention-backend", "triton"], "triton does not run on {}; use torch_native"),
        (["--attention-backend", "flashinfer"], "flashinfer does not run on {}; use torch_native"),
        (["--attention-backend", "flashmla"], "flashmla does not run on {}; use torch_native"),
    ],
)
def test_settings_that_need_a_gpu_are_refused_on_a_cpu(argv: list[str], message: str) -> None:
    prepare(*argv).on_device("cuda")
    prepare(*argv, "--device", "cuda")
    for device, title in (("cpu", "a CPU"), ("npu", "an NPU")):
        with pytest.raises(ValueError, match=message.format(title)):
            prepare(*argv, "--device", device)
        with pytest.raises(ValueError, match=message.format(title)):
            prepare(*argv).on_device(device)


def test_fp8_state_is_refused_on_an_npu() -> None:
    argv = ("--kv-cache-dtype", "fp8_e4m3")
    prepare(*argv).on_device("cpu")
    with pytest.raises(ValueError, match="fp8_e4m3 does not work on an NPU; use auto or"):
        prepare(*argv).on_device("npu")


def test_what_needs_a_package_is_left_to_who_looks_for_it() -> None:
    args = prepare("--device", "npu", "--attention-backend", "ascend")
    assert (args.device, args.attention_backend) == ("npu", "ascend")
    with pytest.raises(ValueError, match="ascend does not run on a GPU; use triton or flashinfer"):
        prepare("--attention-backend", "ascend").on_device("cuda")


def test_no_unknown_device_is_taken_for_another() -> None:
    with pytest.raises(ValueError, match="device 'xpu' is not supported; use cuda or npu or cpu"):
        prepare().on_device("xpu")


@pytest.mark.parametrize(
    "flags", [[], ["--enable-prefill-context-parallel"], ["--enable-nsa-prefill-context-parallel"]]
)
def test_a_size_of_context_parallelism_implies_that_prefills_are_split(flags: list[str]) -> None:
    sizes = ["--tp-size", "4", "--attn-cp-size", "2"]
    args = prepare_server_args([*sizes, *flags])
    assert args.attn_cp_size == 2 and args.enable_prefill_context_parallel
    assert args.resolve() == args
    assert not prepare_server_args(["--tp-size", "4"]).enable_prefill_context_parallel


def test_storage_implies_the_hierarchical_cache_and_logs_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO):
        args = ServerArgs(model_path="dummy", hicache_storage_backend="file").resolve()
    assert args.enable_hierarchical_cache
    assert args.page_size == 64
    assert "implies --enable-hierarchical-cache" in caplog.text


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--pagesize", "3"], "unknown flag --pagesize; did you mean --page-size?"),
        (["--zzz"], "unknown flag --zzz; --help lists"),
        (["--log-requests", "true"], "'true' belongs to no flag"),
        (["--lora-paths", "x"], "--lora-paths: SGLang has it, this engine does not: LoRA"),
        (["--speculative-algorithm=NGRAM"], "NGRAM: SGLang has it, .* use NEXTN, whose"),
        (["--dp-size", "2"], "python -m sglang_router.launch_server starts several"),
        (["--torchao-config", "int4wo-128"], "does not: quantization at load"),
        (["--quantization", "bitsandbytes"], "bitsandbytes: SGLang has it, .* leave the flag out"),
        (
            ["--constrained-json-whitespace-pattern", " "],
            "does not yet: a whitespace pattern for constrained JSON",
        ),
        (["--skip-tokenizer-init"], "does not: a server without a tokenizer"),
        (["--hicache-storage-backend", "nixl"], "nixl: SGLang has it, .* use mooncake or file"),
        (["--hicache-storage-backend", "hf3fs"], "hf3fs: SGLang has it, .* use mooncake or file"),
        (["--hicache-storage-backend", "redis"], "redis: choose one of file, mooncake, dynamic"),
        (["--attention-backend", "fa3"], "fa3: SGLang has it, .* leave the flag out"),
        (["--grammar-backend", "outlines"], "--grammar-backend outlines: SGLang has it"),
        (["--tool-call-parser", "pythonic"], "pythonic: SGLang has it, .* or leave the flag out"),
        (["--tool-call-parser", "kimi_k3"], "kimi_k3: SGLang has it, .* use auto"),
        (["--reasoning-parser", "kimi"], "kimi: SGLang has it, .* use auto"),
        (["--quantization", "w4afp8"], "w4afp8: SGLang has it, .* leave the flag out"),
        (["--kv-cache-dtype", "nvfp4"], "nvfp4: SGLang has it, .* use bfloat16 or fp8_e4m3"),
        (["--load-balance-method", "shortest_queue"], "SGLang has it, .* use total_requests or"),
        (["--device", "xpu"], "xpu: SGLang has it, .* use cuda, npu or cpu"),
        (["--max-queued-requests", "0"], "--max-queued-requests 0: must be at least 1"),
        (["--kv-events-config", "5557"], "--kv-events-config: Expected `object`, got `int`: give"),
        (["--kv-events-config", '{"port": 1}'], "unknown field `port`: give .*endpoint"),
        (["--kv-events-config", '{"endpoint": "x"}'], r"`\$.endpoint`: give"),
        (["--kv-events-config", '{"hwm": 0}'], r"`int` >= 1 - at `\$.hwm`"),
        (["--kv-events-config", '{"format": "vllm"}'], "format 'vllm' is not .*leave the field"),
        (["--kv-events-config", "{}", "--disable-radix-cache"], "no block is kept: leave one"),
        (["--pdlb-url", "http://a"], "does not: servers that announce themselves to a router"),
        (["--tp-size", "0"], "--tp-size 0: must be at least 1"),
        (["--tp-size", "4", "--attn-cp-size", "3"], "3 does not divide --tp-size 4"),
        (["--enable-prefill-context-parallel"], "parallel needs --attn-cp-size N, .* at least 2"),
        (["--tp", "2", "--enable-nsa-prefill-context-parallel"], "parallel needs --attn-cp-size"),
        (
            ["--tp", "3", "--nnodes", "2", "--dist-init-addr", "h:1"],
            "--nnodes 2 does not divide --tp-size 3",
        ),
        (["--tp", "2", "--nnodes", "2"], "--nnodes 2 needs --dist-init-addr HOST:PORT"),
        (["--node-rank", "1"], "--node-rank 1: with --nnodes 1 it is from 0 to 0"),
        (["--base-gpu-id", "-1"], "--base-gpu-id -1: must be 0 or more"),
        (["--dist-init-addr", "a:1"], "--dist-init-addr .* no effect with --tp-size 1"),
        (["--tp", "2", "--dist-init-addr", "host"], "--dist-init-addr host: must be HOST:PORT"),
        (["--tp", "2", "--dist-init-addr", "h:0"], "--dist-init-addr h:0: must be HOST:PORT"),
        (["--gpu-id-step", "2"], "does not yet: placement of ranks"),
        (["--cuda-graph-max-bs", "0"], "--cuda-graph-max-bs 0: must be at least 1"),
        (["--device", "tpu"], "--device tpu: choose one of auto, cpu, cuda, npu"),
        (["--schedule-policy", "LPM"], "--schedule-policy LPM: choose one of fcfs, lpm"),
        (["--hicache-mem-layout", "page_first_kv_spilt"], r"did you mean page_first_kv_split\?$"),
        (["--page-size", "x"], "--page-size: invalid int value"),
        (["--page-size", "0"], "--page-size 0: must be at least 1"),
        (["--port", "70000"], "--port 70000: must be from 1 to 65535"),
        (["--mem-fraction-static", "1.5"], "must be between 0 and 1"),
        (["--watchdog-timeout", "nan"], "must be a number above 0"),
        (["--served-model-name", ""], "--served-model-name is empty"),
        (["--page-size", "64", "--chunked-prefill-size", "100"], "multiple of --page-size 64"),
        (
            ["--page-size", "64", "--max-prefill-tokens", "63"],
            "--max-prefill-tokens 63 is less than --page-size 64, .* at least 64, .* -1$",
        ),
        (["--page-size", "64", "--max-total-tokens", "63"], "63 is less than one page, --page-siz"),
        (["--max-total-tokens", "1"], "--max-total-tokens 1: must be at least 2"),
        (["--context-length", "1"], "--context-length 1: must be at least 2"),
        (["--hicache-size", "1"], "no effect without --enable-hierarchical-cache"),
        (["--enable-hierarchical-cache", EXTRA, "{}"], "without --hicache-storage-backend"),
        (["--disable-radix-cache", "--schedule-policy", "lpm"], "with --disable-radix-cache"),
        (["--disable-radix-cache", "--mamba-track-interval", "64"], "with --disable-radix-cache"),
        (
            ["--mamba-scheduler-strategy", "no_buffer", "--mamba-track-interval", "64"],
            "with --mamba-scheduler-strategy no_buffer",
        ),
        (["--mamba-max-states-per-path", "0"], "must be -1 or at least 1"),
        (["--disable-radix-cache", "--mamba-max-states-per-path", "2"], "--disable-radix-cache"),
        (["--mamba-track-interval", "0"], "--mamba-track-interval 0: must be at least 1"),
        (["--disable-radix-cache", "--enable-hierarchical-cache"], "contradicts"),
        (["--hicache-storage-prefetch-retry-max-attempts", "-1"], "-1: must be from 0 to 1000"),
        (["--hicache-storage-prefetch-retry-poll-interval", "0"], "0: must be from 1 to 1000"),
        (["--hicache-storage-prefetch-retry-max-attempts", "4"], "without --enable-hierarchical"),
        (["--hicache-host-memory-fraction", "0.8"], "without --enable-hierarchical-cache"),
        (["--hicache-host-memory-fraction", "1.5"], "1.5: must be above 0, at most 1"),
        (["--hicache-host-memory-fraction", "0"], "0.0: must be above 0, at most 1"),
        (
            [*HOSTS, "--enable-hicache", "--hicache-host-memory-fraction", "0.8"],
            "fraction does not work with --nnodes 2, .* give --hicache-size",
        ),
    ],
)
def test_refusals_name_the_flag_and_the_remedy(argv: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        prepare(*argv)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("flag", "remedy"),
    [
        ("--max-model-len", "use --context-length"),
        ("--max-num-seqs", "use --max-running-requests"),
        ("--gpu-memory-utilization", "use --mem-fraction-static"),
        ("--max-num-batched-tokens", "use --max-prefill-tokens .* --chunked-prefill-size"),
        ("--enable-prefix-caching", "reused unless --disable-radix-cache is given; remove"),
        ("--no-enable-prefix-caching", "use --disable-radix-cache"),
        ("--block-size", "use --page-size"),
        ("--swap-space", "use --enable-hierarchical-cache"),
        ("--enforce-eager", "use --disable-cuda-graph"),
        ("--disable-log-requests", "not logged unless --log-requests"),
        ("--tokenizer", "use --tokenizer-path"),
        ("--seed", "use --random-seed"),
    ],
)
def test_flags_of_vllm_are_refused_with_the_equivalent_flag(flag: str, remedy: str) -> None:
    for argv in ([flag, "1"], [f"{flag}=1"]):
        with pytest.raises(ValueError, match=f"unknown flag {flag}: .*{remedy}"):
            prepare(*argv)


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        (
            "--enable-radix-cache",
            "the default unless --disable-radix-cache is given; remove",
        ),
        ("--disable-metrics", "the default unless --enable-metrics is given; remove"),
        ("--no-enable-metrics", "the default unless --enable-metrics is given; remove"),
        ("--no-log-requests", "the default unless --log-requests is given; remove"),
        (
            "--constrained-json-any-whitespace",
            "the default unless --constrained-json-disable-any",
        ),
        ("--enable-cuda-graphs", "unless --disable-cuda-graph is given; remove"),
        ("--disable-cuda-graphs", "did you mean --disable-cuda-graph?"),
        ("--min-running-requests", "--help lists"),
    ],
)
def test_the_opposite_is_never_suggested(flag: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"unknown flag {flag}.*{re.escape(message)}"):
        prepare(flag)


def test_flags_of_other_engines_are_not_flags_of_this_one() -> None:
    ours = {f.name for f in dataclasses.fields(ServerArgs)}
    assert not [name for name in ours if other_name(name)]
    for field in dataclasses.fields(ServerArgs):
        assert not [c for c in field.metadata["choices"] if refused_choice(field.name, c)]


def test_help_lists_every_field(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_status:
        prepare("--help")
    assert exit_status.value.code == 0
    text = capsys.readouterr().out
    for field in dataclasses.fields(ServerArgs):
        is_named = "--" + field.name.replace("_", "-") in text.replace(",", " ").split()
        assert is_named is field.metadata["is_shown"]
    assert len(text.splitlines()) < 85, "the other flags are names alone"
    # The flags to begin with come first, in their order, and are explained.
    first = [line.split()[0].rstrip(",") for line in text.splitlines() if line.startswith("  --")]
    assert first[:10] == ["--" + name.replace("_", "-") for name in FIRST_FLAGS]
    assert [text.count(f"\n{one}:\n") for one in Heading] == [1] * len(Heading)
    with pytest.raises(SystemExit, match=r"^0$"):
        prepare("--help=all")
    whole = " ".join(capsys.readouterr().out.split())
    for field in dataclasses.fields(ServerArgs):
        said = " ".join(field.metadata["help"].split()).replace("-", "")
        assert (said in whole.replace("- ", "").replace("-", "")) is field.metadata["is_shown"]


def test_each_class_of_flags_begins_a_group() -> None:
    """Otherwise its flags belong to the group of another class."""
    for one in ServerArgs.__mro__:
        own = [f for f in dataclasses.fields(one) if f.name in vars(one).get("__annotations__", {})
               and f.metadata.get("is_shown")] if dataclasses.is_dataclass(one) else []  # fmt: skip
        assert not own or own[0].metadata["heading"] is not None, one


def test_no_flag_of_ours_is_in_the_table_of_refusals() -> None:
    assert not [f.name for f in dataclasses.fields(ServerArgs) if foreign_flags(f.name)]


def test_from_kwargs_explains_unknown_names() -> None:
    assert ServerArgs.from_kwargs(model_path="dummy") == ServerArgs(model_path="dummy")
    with pytest.raises(ValueError, match="did you mean --page-size"):
        ServerArgs.from_kwargs(pagesize=4)
    with pytest.raises(ValueError, match="does not: LoRA"):
        ServerArgs.from_kwargs(lora_paths=["x"])


def test_secrets_are_not_shown() -> None:
    public = ServerArgs(model_path="dummy", api_key="hunter2").to_public_dict()
    assert public["api_key"] == "***"
    assert public["admin_api_key"] is None
    assert "hunter2" not in repr(public)
    assert "hunter2" not in repr(ServerArgs(model_path="dummy", api_key="hunter2"))


def test_secrets_of_a_storage_backend_are_not_shown() -> None:
    config = {
        "backend_name": "mine", "Password": "hunter2", "prefetch_timeout_per_ki_token": 0.5,
        "options": {"access_key": "hunter2", "nodes": ["redis://me:hunter2@host:1/0"]},
    }  # fmt: skip
    args = ServerArgs(model_path="dummy", hicache_storage_backend_extra_config=json.dumps(config))
    shown = json.loads(args.to_public_dict()["hicache_storage_backend_extra_config"])
    assert shown == {
        "backend_name": "mine", "Password": "***", "prefetch_timeout_per_ki_token": 0.5,
        "options": {"access_key": "***", "nodes": ["redis://***@host:1/0"]},
    }  # fmt: skip
    assert "hunter2" not in repr(args)
    for text in (None, "@settings.json"):
        public = ServerArgs(model_path="dummy", hicache_storage_backend_extra_config=text)
        assert public.to_public_dict()["hicache_storage_backend_extra_config"] == text


CONFIG = {"prefetch_threshold": 128, "protocol": "tcp", "check_server": True}
SPELLINGS = {
    "c.json": json.dumps(CONFIG),
    "c.yaml": "prefetch_threshold: 128\nprotocol: tcp\ncheck_server: true\n",
    "c.toml": 'prefetch_threshold = 128\nprotocol = "tcp"\ncheck_server = true\n',
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_extra_config_is_read_from_a_file(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text(SPELLINGS[name])
    args = prepare("--hicache-storage-backend", "mooncake", EXTRA, f"@{path}")
    assert args.extra_config() == CONFIG


def test_extra_config_inline_and_absent() -> None:
    args = prepare("--hicache-storage-backend", "mooncake", EXTRA, json.dumps(CONFIG))
    assert args.extra_config() == CONFIG
    assert prepare("--hicache-storage-backend", "file").extra_config() == {}


def test_events_are_published_only_if_that_is_asked_for() -> None:
    assert prepare().kv_events() is None
    assert prepare("--kv-events-config", '{"publisher": "null"}').kv_events() is None
    config = prepare("--kv-events-config", '{"hwm": 5}').kv_events()
    assert config is not None and (config.hwm, config.topic) == (5, "")


@pytest.mark.parametrize(
    ("backend", "text", "message"),
    [
        ("mooncake", '{"protocl": "tcp"}', "knows no 'protocl'; did you mean 'protocol'"),
        ("file", '{"protocol": "tcp"}', "backend file knows no 'protocol'"),
        ("file", "[1]", "expected an object"),
        ("file", "{", "cannot read its value"),
        ("file", "@/nonexistent.json", "cannot read @/nonexistent.json"),
        ("file", "@/etc/hostname", "unknown suffix"),
        ("file", "[" * 60_000, "cannot read its value: maximum recursion depth"),
        ("file", '{"a":' * 10_000, "cannot read its value: maximum recursion depth"),
        ("file", "[" * 100_000, "at most 65536 bytes"),
        ("file", '{"a": "' + "b" * 70_000 + '"}', "at most 65536 bytes"),
        ("dynamic", '{"a": ' + "[" * 40 + "]" * 40 + "}", "'a': nested more than 32 deep"),
        ("dynamic", json.dumps({"a": [0] * 10_001}), "'a': more than 10000 values"),
        ("dynamic", json.dumps({"a": {"b": 2**64}}), "'a': 18446744073709551616 has more than 64"),
        ("dynamic", '{"a": [1e999]}', "'a': inf is not a finite number"),
        ("dynamic", '{"a": NaN}', "'a': nan is not a finite number"),
        ("dynamic", '{"a": "\\ud800"}', "'a': a text with a lone surrogate"),
        ("dynamic", '{"\\ud800": 1}', "a text with a lone surrogate"),
        ("file", '{"prefetch_threshold": ' + "9" * 5000 + "}", "cannot read its value: Exceeds"),
    ],
)
def test_bad_extra_config_is_refused(backend: str, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        prepare("--hicache-storage-backend", backend, EXTRA, text)
    assert "\n" not in str(error.value)
    assert EXTRA in str(error.value)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        # Opening it for reading would wait for a writer.
        pytest.param(os.mkfifo, "not a regular file", id="fifo"),
        pytest.param(lambda path: path.symlink_to("/dev/zero"), "not a regular file", id="device"),
        pytest.param(Path.mkdir, "Is a directory", id="folder"),
        pytest.param(lambda path: path.write_text(" " * 70_000), "at most 65536 bytes", id="long"),
    ],
)
def test_extra_config_comes_from_a_regular_file_of_bounded_size(
    tmp_path: Path, make: Callable[[Path], object], words: str
) -> None:
    path = tmp_path / "config.json"
    make(path)
    with pytest.raises(ValueError, match=words) as error:
        parse_extra_config(f"@{path}")
    assert str(error.value).startswith(f"{EXTRA}: cannot read @{path}: ")


def test_recursive_and_exploding_yaml_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("a: &a [*a]\n")
    with pytest.raises(ValueError, match="'a': nested more than 32 deep"):
        parse_extra_config(f"@{path}")
    levels = [
        f"{name}: &{name} [{', '.join([f'*{below}'] * 9)}]" for below, name in pairwise("abcdefgh")
    ]
    path.write_text("a: &a [1]\n" + "\n".join(levels))
    with pytest.raises(ValueError, match="more than 10000 values"):
        parse_extra_config(f"@{path}")
    path.write_text("day: 2026-01-01\n")
    with pytest.raises(ValueError, match="'day': a value of type date"):
        parse_extra_config(f"@{path}")


def test_a_dynamic_backend_accepts_any_key() -> None:
    config: dict[str, Any] = {"backend_name": "b", "module_path": "m", "anything": [1]}
    args = prepare("--hicache-storage-backend", "dynamic", EXTRA, json.dumps(config))
    assert args.extra_config() == config


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ('{"architectures": ["DeepseekV4ForCausalLM"]}', 256),
        ('{"architectures": ["LlamaForCausalLM"]}', 1),
        ('{"architectures": []}', 1),
        ('{"architectures": {"a": 1}}', 1),
        ("no JSON", 1),
    ],
)
def test_a_model_with_groups_of_tokens_has_larger_pages(
    tmp_path: Path, text: str, size: int
) -> None:
    (tmp_path / "config.json").write_text(text)
    path = str(tmp_path)
    assert ServerArgs(model_path=path).resolve().page_size == size
    assert ServerArgs(model_path=path, page_size=16).resolve().page_size == 16
    hierarchical = ServerArgs(model_path=path, enable_hierarchical_cache=True).resolve()
    assert hierarchical.page_size == max(size, 64)
    chunk = ServerArgs(model_path=path, chunked_prefill_size=256).resolve()
    assert chunk.chunked_prefill_size == 256
