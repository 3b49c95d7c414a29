"""The load test: workloads by seed, the figures by hand, and whole runs against a fake server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rigs.servers.fake_generate_server import FakeServer
from sglang.bench_serving import main, make_requests, parse_args
from sglang.benchmark.api_backends import BACKENDS, RequestResult, load_tokens
from sglang.benchmark.serving_metrics import LoadResult, summarize, table
from sglang.benchmark.workload import BenchRequest, arrival_times
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=1, suite="base-a-test-cpu")

ROOT = Path(__file__).parents[4]
EXCERPT = str(ROOT / "benchmark/data/mooncake_synthetic_excerpt.jsonl")
MODEL = str(ROOT / "python/sglang/builtin_model")
VOCABULARY = np.arange(10, 1010, dtype=np.uint32)


def requests_of(*flags: str) -> list[BenchRequest]:
    return make_requests(parse_args(flags), VOCABULARY)


def run(
    server: FakeServer, tmp_path: Path, *flags: str, expect: int = 0
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Run with small prompts. Returns the JSON line, and the bodies sent after the warm-up."""
    output = tmp_path / "out.jsonl"
    small = ["--random-input-len", "20", "--random-output-len", "5", "--random-range-ratio", "1"]
    names = ["--model", "m", "--tokenizer", MODEL, "--disable-tqdm"]
    args = ["--base-url", server.url, *names, *small, "--output-file", str(output), *flags]
    assert main(args) == expect
    return json.loads(output.read_text()), server.bodies[1:]


def test_random_lengths_keep_to_the_range() -> None:
    flags = ("--random-input-len", "40", "--random-output-len", "10", "--num-prompts", "200")
    requests = requests_of(*flags, "--random-range-ratio", "0.5")
    lengths = {len(one.prompt_ids) for one in requests}
    assert min(lengths) == 20 and max(lengths) == 40
    assert {one.output_len for one in requests} == set(range(5, 11))
    assert requests == requests_of(*flags, "--random-range-ratio", "0.5")
    assert requests != requests_of(*flags, "--random-range-ratio", "0.5", "--seed", "2")
    assert all(10 <= token < 1010 for one in requests for token in one.prompt_ids)


def test_sglangs_other_names_mean_the_same() -> None:
    assert requests_of("--dataset-name", "random-ids", "--tokenize-prompt") == requests_of()
    for backend, path in (
        ("sglang-native", "/generate"),
        ("vllm", "/v1/completions"),
        ("vllm-chat", "/v1/chat/completions"),
    ):
        assert BACKENDS[backend].path == path
    assert parse_args(["--model", "m", "--served-model-name", "s"]).model == "s"


def test_prompts_of_a_group_share_their_system_prompt() -> None:
    requests = requests_of(
        *("--dataset-name", "generated-shared-prefix", "--gsp-num-groups", "3"),
        *("--gsp-prompts-per-group", "4", "--gsp-system-prompt-len", "16"),
        *("--gsp-question-len", "8", "--gsp-output-len", "2"),
    )
    assert [len(one.prompt_ids) for one in requests] == [24] * 12
    groups: dict[tuple[int, ...], int] = {}
    for one in requests:
        system = tuple(one.prompt_ids[:16])
        groups[system] = groups.get(system, 0) + 1
    assert sorted(groups.values()) == [4, 4, 4]
    assert len({tuple(one.prompt_ids) for one in requests}) == 12


def test_a_trace_keeps_its_prefixes_and_its_times() -> None:
    requests = requests_of(
        *("--dataset-name", "mooncake", "--dataset-path", EXCERPT),
        *("--mooncake-length-scale", "0.125", "--mooncake-slowdown-factor", "0.5"),
    )
    lines = [json.loads(line) for line in Path(EXCERPT).read_text().splitlines()]
    assert len(requests) == len(lines)
    begin = lines[0]["timestamp"]
    times = [one.at_s for one in requests]
    assert times == [pytest.approx((one["timestamp"] - begin) / 2000) for one in lines]
    # Each whole block that two prompts share gives 64 equal tokens; no further tokens are equal.
    by_first: dict[int, int] = {}
    pairs = 0
    for index, line in enumerate(lines):
        other = by_first.setdefault(line["hash_ids"][0], index)
        if other == index:
            continue
        pairs += 1
        ours, theirs = requests[index].prompt_ids, requests[other].prompt_ids
        shared = common(line["hash_ids"], lines[other]["hash_ids"]) * 64
        assert common(ours, theirs) == min(shared, len(ours), len(theirs))
    assert pairs > 50


def common(left: list[int], right: list[int]) -> int:
    """Length of the common prefix."""
    count = 0
    for one, other in zip(left, right, strict=False):
        if one != other:
            break
        count += 1
    return count


def test_requests_arrive_by_their_rate() -> None:
    requests = [BenchRequest([1], 1, at_s=at) for at in (0.0, 0.5, 2.0)]
    assert arrival_times(requests, None, 1) == [0.0, 0.5, 2.0]
    assert arrival_times(requests, float("inf"), 1) == [0.0, 0.0, 0.0]
    poisson = arrival_times(requests * 500, 10.0, 1)
    assert poisson[0] == 0.0 and poisson == sorted(poisson)
    assert poisson[-1] == pytest.approx(150, rel=0.1)
    with pytest.raises(ValueError, match="--request-rate 0"):
        arrival_times(requests, 0.0, 1)


def test_figures_equal_those_by_hand() -> None:
    results = [
        RequestResult(
            prompt_tokens=100,
            completion_tokens=3,
            ttft=1.0,
            latency=2.0,
            itl=[0.4, 0.6],
            cached_tokens=60,
            cached_details={"device": 50, "host": 10, "storage": 0},
        ),
        RequestResult(prompt_tokens=50, completion_tokens=1, ttft=3.0, latency=3.0),
        RequestResult(error="HTTP 500", prompt_tokens=50, latency=9.0),
    ]
    got = summarize(LoadResult(results, duration=5.0, client_cpu_seconds=0.5))
    assert (got["completed"], got["failed"]) == (2, 1)
    assert (got["total_input_tokens"], got["total_output_tokens"]) == (150, 4)
    assert got["request_throughput"] == pytest.approx(0.4)
    assert got["input_throughput"] == pytest.approx(30)
    assert got["output_throughput"] == pytest.approx(0.8)
    assert got["mean_ttft_ms"] == got["median_ttft_ms"] == pytest.approx(2000)
    assert got["p99_ttft_ms"] == pytest.approx(2980)
    assert got["mean_tpot_ms"] == pytest.approx(500)  # of the one answer with a second token
    assert got["mean_itl_ms"] == pytest.approx(500) and got["max_itl_ms"] == pytest.approx(600)
    assert got["concurrency"] == pytest.approx(1.0)
    assert got["cached_tokens_details"] == {"device": 50, "host": 10, "storage": 0}
    assert got["cache_hit_rate"] == pytest.approx(0.4)
    assert got["client_cpu_share"] == pytest.approx(0.1)


def test_a_run_without_any_success_has_figures_too() -> None:
    failed = LoadResult([RequestResult(error="no")], duration=1.0, client_cpu_seconds=0.0)
    figures = summarize(failed)
    named = {"backend": "sglang", "request_rate": "inf", "max_concurrency": None}
    shown = table(figures | named)
    assert "Failed requests:                         1" in shown
    assert figures["mean_ttft_ms"] == 0.0


@pytest.mark.parametrize("backend", ["sglang", "sglang-oai", "sglang-oai-chat"])
def test_a_run_of_each_backend(
    backend: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with FakeServer(step_s=0.02) as server:
        flags = ("--backend", backend, "--num-prompts", "8", "--max-concurrency", "4")
        record, bodies = run(server, tmp_path, *flags, "--flush-cache", "--output-details")
    assert (record["completed"], record["failed"], record["total_input_tokens"]) == (8, 0, 160)
    assert record["total_output_tokens"] == 40 and record["output_lens"] == [5] * 8
    assert record["generated_texts"] == ["aaaaa"] * 8
    assert record["cached_tokens"] == 8 * 12
    assert record["cached_tokens_details"] == {"device": 64, "host": 24, "storage": 8}
    assert 20 <= record["median_ttft_ms"] < 200 and 15 <= record["mean_tpot_ms"] < 100
    assert all(len(gaps) == 4 for gaps in record["itls"])
    assert (server.flushes, server.most_running, len(bodies)) == (1, 4, 8)
    assert {"date", "command", "commit", "hardware"} <= record.keys()
    for body in bodies:
        assert body["stream"] is True
        params = body.get("sampling_params", body)
        assert params["ignore_eos"] is True and params["temperature"] == 0
    shown = capsys.readouterr().out
    for name in ("Request throughput (req/s):", "Median TTFT (ms):", "P99 ITL (ms):", "from host:"):
        assert name in shown


def test_failed_requests_are_counted_and_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with FakeServer(fail_every=3) as server:
        record, _ = run(server, tmp_path, "--num-prompts", "8", expect=1)
    assert (record["completed"], record["failed"]) == (5, 3)
    assert "3 requests failed: aborted: out of luck" in capsys.readouterr().err


def test_an_error_event_is_a_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with FakeServer(fail_every=2) as server:
        flags = ("--num-prompts", "1", "--backend", "sglang-oai")
        record, _ = run(server, tmp_path, *flags, expect=1)
    assert (record["completed"], record["failed"]) == (0, 1)
    assert "out of luck" in capsys.readouterr().err


def test_names_come_from_the_server(tmp_path: Path) -> None:
    info = {"model_path": "x", "tokenizer_path": MODEL, "served_model_name": "tiny"}
    with FakeServer(info=info) as server:
        common_flags = ("--base-url", server.url, "--disable-tqdm", "--num-prompts", "1")
        small = ("--random-input-len", "4", "--random-output-len", "2")
        assert main([*common_flags, *small, "--backend", "sglang-oai"]) == 0
        assert [body["model"] for body in server.bodies] == ["tiny", "tiny"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--base-url", "http://127.0.0.1:9"), "no usable server at http://127.0.0.1:9"),
        (("--random-input-len", "0"), "--random-input-len 0"),
        (("--tokenizer", "/nowhere", "--model", "m"), "'/nowhere' is not a directory"),
        (("--dataset-name", "mooncake", "--dataset-path", "/nowhere"), "/nowhere: No such file"),
    ],
)
def test_bad_arguments_give_one_line(
    flags: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with FakeServer(info={"tokenizer_path": MODEL}) as server:
        assert main(["--base-url", server.url, "--disable-tqdm", *flags]) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--output-file", "/nowhere/out.jsonl"), "/nowhere/out.jsonl: cannot be written: No such"),
        (("--extra-request-body", "{"), "'{' is not a JSON object"),
        (("--extra-request-body", "[1]"), "'[1]' is not a JSON object"),
    ],
)
def test_bad_flags_end_the_run_before_any_request(
    flags: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with FakeServer(info={"tokenizer_path": MODEL}) as server:
        with pytest.raises(SystemExit) as ended:
            main(["--base-url", server.url, *flags])
        assert not server.bodies
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_text_prompts_have_about_the_given_length() -> None:
    tokens = load_tokens(MODEL)
    printable = tokens.printable()
    assert len(printable) > 1000 and set(printable) < set(tokens.vocabulary)
    flags = ["--num-prompts", "20", "--random-range-ratio", "0.5", "--random-input-len", "200"]
    for one in make_requests(parse_args(flags), printable):
        text = tokens.as_text(one.prompt_ids)
        assert 0.9 < len(tokens.tokenizer.encode(text)) / len(one.prompt_ids) < 1.1
        assert text.startswith(tokens.as_text(one.prompt_ids[:50])[:-10])


def test_a_trace_needs_its_path(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--dataset-name", "mooncake"])
    assert ended.value.code == 2
    assert "--dataset-path" in capsys.readouterr().err
