"""The benchmark scripts as commands: small runs end and print the expected figures."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rigs.servers.forked_scripts import run_script
from rigs.servers.forked_servers import ForkedServer
from sglang.srt.environ import child_environment
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=60, suite="base-b-test-cpu")

BENCHMARK = Path(__file__).parents[3] / "benchmark"
EVIDENCE = {"date", "command", "commit", "hardware"}


def run(script: str, *flags: str, status: int = 0) -> list[dict[str, Any]]:
    """The JSON lines of a script that must exit with `status`."""
    done = run_script(BENCHMARK / script, *flags, timeout=240)
    assert done.returncode == status, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def test_simulate_trace(tmp_path: Path) -> None:
    plot, output = tmp_path / "hits.png", tmp_path / "hits.jsonl"
    small = ("--num-prompts", "150", "--fractions", "0.2", "1", "--policies", "lru", "lfu")
    files = ("--plot", str(plot), "--output-file", str(output))
    header, *records = run("hicache/simulate_trace.py", *small, *files)
    assert header.keys() >= EVIDENCE and header["requests"] == 150
    assert len(records) == 3 * 2 * 2
    for one in records:
        assert one["hit_rate"] <= one["belady_hit_rate"] <= header["unlimited_hit_rate"]
        assert one["behind_belady"] >= 0
    full = [one for one in records if one["arrangement"] == "one_tier" and one["fraction"] == 1]
    assert [one["of_unlimited"] for one in full] == [1.0, 1.0]
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert len(output.read_text().splitlines()) == 13


def test_simulate_turns_uses_the_queue() -> None:
    small = ("--num-clients", "6", "--num-rounds", "6", "--request-length", "256")
    setting = (*small, "--l1", "0.2", "--orders", "6:fifo", "--policies", "lru")
    _, *heeding, best = run("hicache/simulate_turns.py", *setting)
    _, *ignoring, _ = run("hicache/simulate_turns.py", *setting, "--ignore-queue")
    by_name = {one["arrangement"]: one for one in heeding}
    assert set(by_name) == {"one_tier", "write_through", "write_back"}
    # Clients in turn, so that recency alone keeps all pages except the needed ones.
    assert sum(one["host_hit_rate"] for one in ignoring) < by_name["write_through"]["host_hit_rate"]
    hits = [one["device_hit_rate"] + one["host_hit_rate"] for one in heeding]
    assert max(hits) <= best["best_hit_rates"]["both"]
    assert best["best_hit_rates"]["unlimited"] == pytest.approx(
        sum(4 * turn for turn in range(6)) / sum(4 * turn for turn in range(1, 7)), abs=1e-3
    )


def test_simulate_states(tmp_path: Path) -> None:
    output = tmp_path / "states.jsonl"
    small = (
        "--num-prompts",
        "60",
        "--copies",
        "2",
        "--fractions",
        "0.5",
        "1",
        "--alignments",
        "64",
    )
    memory = ("--state-pages", "16", "--memory-ratios", "0.3", "99")
    header, unlimited, *records = run(
        "hicache/simulate_states.py", *small, *memory, "--output-file", str(output)
    )
    assert header.keys() >= EVIDENCE and header["requests"] == 120
    best = unlimited["unlimited"]["hit_rate"]
    assert 0 < best <= header["dense_unlimited_hit_rate"]
    sizes, division = records[:4], records[4:]
    for one in sizes:
        assert one["part"] == "sizes"
        assert one["hit_rate"] <= min(best, one["dense_hit_rate"])
        assert one["fraction"] < 1 or one["hit_rate"] == best
    assert [one.get("fits", True) for one in division] == [True, False, True, False]
    assert len(output.read_text().splitlines()) == 10


def test_simulate_states_needs_pages_that_hold_the_longest_request() -> None:
    assert run("hicache/simulate_states.py", "--copies", "1", "--fractions", "0.01", status=2) == []


def test_simulate_snapshots_of_answers() -> None:
    small = ("--num-clients", "6", "--num-rounds", "4", "--request-length", "200")
    setting = (*small, "--output-length", "300", "--fractions", "0.5", "--state-pages", "4")
    header, none, often, *bounded = run(
        "hicache/simulate_snapshots.py", *setting, "--intervals", "0", "64"
    )
    assert header.keys() >= EVIDENCE
    assert none["unlimited"]["snapshots"] == 6 * 4 < often["unlimited"]["snapshots"]
    assert none["unlimited"]["hit_rate"] < often["unlimited"]["hit_rate"]
    assert [one["interval"] for one in bounded] == [0, 64]
    for one in bounded:
        assert one["states_evicted"] > 0 and one["hit_rate"] < one["dense_hit_rate"]


def test_simulate_store_divides_prompts_between_a_slow_store_and_the_device() -> None:
    _, none, *runs = run("hicache/simulate_store.py", "--read-gb-s", "2")
    seconds = {(one["store"], one["reads"]): one["seconds"] for one in runs}
    assert seconds["filled", "whole"] > 2 * none["seconds"]
    assert seconds["filled", "overtaken"] < none["seconds"]
    assert seconds["empty", "overtaken"] < seconds["empty", "whole"]
    assert [one["cut"] > 0 for one in runs] == [False, True, False, True]


def test_simulate_trace_stops_in_time() -> None:
    """Run as a typed command; the other scripts are forked."""
    done = subprocess.run(
        [
            *(sys.executable, str(BENCHMARK / "hicache/simulate_trace.py")),
            *("--fractions", "0.5", "--max-seconds", "0"),
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
        env=child_environment({"OMP_NUM_THREADS": "1"}),
    )
    assert done.returncode == 1, done.stderr[-2000:]
    assert len(done.stdout.splitlines()) == 1


def test_simulate_trace_needs_tiers_that_hold_the_longest_request() -> None:
    assert run("hicache/simulate_trace.py", "--fractions", "0.001", "1", status=2) == []


def test_simulate_trace_refuses_a_policy_that_needs_priorities() -> None:
    assert run("hicache/simulate_trace.py", "--policies", "priority", status=2) == []


@pytest.mark.parametrize("store", [(), ("--no-store",)])
def test_bench_keys(store: tuple[str, ...], tmp_path: Path) -> None:
    output = tmp_path / "keys.jsonl"
    small = ("--pages", "8", "--rounds", "3", "--output-file", str(output))
    header, *records = run("hicache/bench_keys.py", *small, *store)
    assert header.keys() >= EVIDENCE
    assert len(records) == 4 * 3 * 2
    asked = [one["pools"] for one in records if "keys_of_question" in one]
    assert asked == ([] if store else ["kv", "kv, indexer", "kv, mamba"] * 4)
    for one in records:
        assert min(one["hash_us"], one["name_us"], one["combine_us"], one["digest_us"]) > 0
    assert len(output.read_text().splitlines()) == 1 + len(records)


@pytest.mark.parametrize("backend", ["file", "mooncake"])
def test_bench_storage(backend: str) -> None:
    small = ("--mib", "8", "--repeat", "1", "--layers", "4", "--page-sizes", "16")
    layouts = ("--layouts", "layer_first", "page_first")
    records = run("hicache/bench_storage.py", "--backends", backend, *layouts, *small)
    assert [one["layout"] for one in records] == ["layer_first", "page_first"]
    for one in records:
        assert one.keys() >= EVIDENCE
        assert one["pages"] * one["page_bytes"] == 8 << 20
        for figure in ("put_bare_gb_s", "get_checksum_on_gb_s", "memory_copy_gb_s"):
            assert one[figure] > 0
        for direction in ("put", "get"):
            assert [len(one["raw"][direction][way]) for way in ("checksum_on", "bare")] == [1, 1]


def test_against_a_real_server(tmp_path: Path) -> None:
    plot, output = tmp_path / "rounds.png", tmp_path / "load.jsonl"
    with ForkedServer("--page-size", "16") as server:
        talk = ("--num-clients", "3", "--num-rounds", "3", "--request-length", "64")
        short = ("--output-length", "8", "--base-url", server.url, "--plot", str(plot))
        pace = ("--request-rate", "inf", "--max-parallel", "2")
        rounds = run("hicache/bench_multiturn.py", *talk, *short, *pace)
        load = subprocess.run(
            [
                *(sys.executable, "-m", "sglang.bench_serving", "--base-url", server.url),
                *("--num-prompts", "6", "--random-input-len", "64", "--random-output-len", "8"),
                *("--random-range-ratio", "1", "--backend", "sglang-oai-chat"),
                *("--output-file", str(output)),
            ],
            capture_output=True,
            text=True,
            check=False,
            timeout=240,
            env=child_environment(),
        )
    assert [one["failed"] for one in rounds] == [0, 0, 0]
    # Each round has 64 new tokens and an answer of 8, whose last token has no KV; pages of 16.
    assert [one["prompt_tokens"] for one in rounds] == [3 * 64, 3 * 136, 3 * 208]
    assert [one["cached_tokens"] for one in rounds] == [0, 3 * 64, 3 * 128]
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert load.returncode == 0, load.stderr[-2000:]
    record = json.loads(output.read_text())
    assert (record["completed"], record["total_output_tokens"]) == (6, 48)
    assert 5 * 64 < record["total_input_tokens"] < 8 * 64 + 6 * 20


@pytest.mark.parametrize("script", ["bench_radix_tree.py", "bench_scheduler_step.py"])
def test_micro_benchmarks(script: str) -> None:
    flags = {
        "bench_radix_tree.py": ("--tokens", "1024", "--prompts", "8", "--repeat", "10"),
        "bench_scheduler_step.py": ("--running", "4", "--input-len", "32", "--steps", "10"),
    }
    records = run(f"micro/{script}", *flags[script])
    assert len(records) == 3 and all(one.keys() >= EVIDENCE for one in records)


def test_context_parallel_counts_what_is_expected() -> None:
    small = ("--tokens", "256", "--layers", "2", "--hidden", "64", "--steps", "2", "--repeat", "1")
    (record,) = run("bench_context_parallel.py", *small, "--sizes", "4x2")
    assert record.keys() >= EVIDENCE
    expected, prefill, decode = (record[what] for what in ("expected", "prefill", "decode"))
    assert prefill["tokens_of_ranks"] == [expected["prefill"]["tokens_per_rank"]] * 4 == [128] * 4
    for step in ("prefill", "decode"):
        for group in ("cp", "tp"):
            assert record[step][group]["collectives"] == expected[step][group], (step, group)
    assert decode["tp"]["mb_given"] == expected["decode"]["tp_mb_given"]
    # The keys and values of two layers, and a last hidden state of 64 numbers.
    kv = 2 * expected["prefill"]["kv_mb_given_per_layer"]
    assert prefill["cp"]["mb_given"] == pytest.approx(kv + 64 * 4 / 1e6, abs=2e-4)


def test_gpu_pages_without_gpus() -> None:
    small = ("--device", "cpu", "--protocol", "tcp", "--layers", "2", "--tokens", "512")
    copies, *reads = run("gpu_pages.py", *small, "--unit-mib", "128")
    assert copies["copies"] == "one unit" and all(one.keys() >= EVIDENCE for one in reads)
    assert {one["way"] for one in reads} == {"direct", "packed", "chosen"}
    # K and V of two layers are 4 buffers. 512 tokens are 8 pages, which lie together in a run.
    blocks = {"run": 4, "scattered": 8 * 4}
    assert {one["pages"] for one in reads} == set(blocks)
    assert [one["blocks"] for one in reads] == [blocks[one["pages"]] for one in reads]


def test_rank_collectives() -> None:
    _, *records = run("micro/bench_rank_collectives.py", "--ranks", "2", "3", "--ticks", "25")
    cases, ways = records[:6] + records[11:17], records[6:11] + records[17:]
    assert [one["ranks"] for one in cases] == [2] * 6 + [3] * 6
    for one in cases:
        messages = 1 if one["case"] == "an empty tick" else 2
        assert one["collectives_per_tick"] == messages + one["tick sync"], one
        assert (one["rank_0_tick_sync_us_p10_p50_p90_p99"] is not None) == one["tick sync"]
    assert [one["way"] for one in ways[:5]] == [one["way"] for one in ways[5:]]
    assert all(one["us_p10_p50_p90_p99"][0] > 0 for one in ways)


def test_unused_tiers() -> None:
    (record,) = run(
        "micro/bench_unused_tiers.py", "--rounds", "1", "--warm-rounds", "0", "--disable-tqdm"
    )
    with_tiers, without = (record["cpu_us_a_request"][name] for name in ("with", "without"))
    assert with_tiers["hicache-write"] > 0 and "hicache-write" not in without
    assert with_tiers["scheduler in the forward"] > 0


def test_http_path() -> None:
    (record,) = run("micro/bench_http_path.py", "--seconds", "0.5", "--repeat", "1")
    assert record["echo_req_s"] > 0 and record["engine_req_s"] > 0
    spent = record["cpu_us_per_request"]
    assert spent["engine"].keys() == {"server", "scheduler", "detokenizer", "client"}
    # The clocks count nanoseconds, and each process handled all these requests.
    assert min(spent["engine"].values()) > 0 and spent["echo"]["echo"] > 0


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
