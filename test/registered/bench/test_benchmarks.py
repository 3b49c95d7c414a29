"""The benchmarks as commands: small runs end and give the expected figures."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Final

import pytest

from rigs.nightly_cases import nightly
from rigs.servers.forked_benchmarks import run, run_forked
from rigs.servers.forked_servers import ForkedServer
from sglang.srt.environ import child_environment
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=83, suite="base-b-test-cpu")

ROOT = Path(__file__).parents[3]


def test_no_policy_beats_belady_or_an_unlimited_cache(tmp_path: Path) -> None:
    plot = tmp_path / "hits.png"
    small = ("--num-prompts", "150", "--fractions", "0.2", "1", "--policies", "lru", "lfu")
    trace, *replays = run("simulate", "trace", *small, "--plot", str(plot))
    assert trace["requests"] == 150
    assert len(replays) == 3 * 2 * 2
    for one in replays:
        assert one["hit_rate"] <= one["belady_hit_rate"] <= trace["unlimited_hit_rate"]
        assert one["behind_belady"] >= 0
    full = [one for one in replays if one["arrangement"] == "one_tier" and one["fraction"] == 1]
    assert [one["of_unlimited"] for one in full] == [1.0, 1.0]
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_simulate_turns_uses_the_queue() -> None:
    small = ("--num-clients", "6", "--num-rounds", "6", "--request-length", "256")
    setting = (*small, "--l1", "0.2", "--orders", "6:fifo", "--policies", "lru")
    heeding, ignoring = (
        run("simulate", "turns", *setting, *flags) for flags in ((), ("--ignore-queue",))
    )
    best = {one["size"]: one["belady_hit_rate"] for one in heeding[3:]}
    by_name = {one["arrangement"]: one for one in heeding[:3]}
    assert set(by_name) == {"one_tier", "write_through", "write_back"}
    # Clients in turn, so that recency alone keeps all pages except the needed ones.
    from_host = sum(one["host_hit_rate"] for one in ignoring[:3])
    assert from_host < by_name["write_through"]["host_hit_rate"]
    hits = [one["device_hit_rate"] + one["host_hit_rate"] for one in by_name.values()]
    assert max(hits) <= best["both"] + 1e-6
    assert best["unlimited"] == pytest.approx(
        sum(4 * turn for turn in range(6)) / sum(4 * turn for turn in range(1, 7)), abs=1e-3
    )


def test_no_number_of_states_beats_dense_hits() -> None:
    small = ("--num-prompts", "60", "--copies", "2", "--fractions", "0.5", "1")
    memory = ("--alignments", "64", "--state-pages", "16", "--memory-ratios", "0.3", "99")
    trace, dense, *replays = run("simulate", "states", *small, *memory)
    assert trace["requests"] == 120
    unlimited, sizes, division = replays[0], replays[1:5], replays[5:]
    best = unlimited["hit_rate"]
    assert 0 < best <= dense["dense_hit_rate"]
    for one in sizes:
        assert one["part"] == "sizes"
        assert one["hit_rate"] <= min(best, one["dense_hit_rate"])
        assert one["fraction"] < 1 or one["hit_rate"] == best
    assert [one["fits"] for one in division] == [True, False, True, False]


def test_simulate_snapshots_of_answers() -> None:
    small = ("--num-clients", "6", "--num-rounds", "4", "--request-length", "200")
    setting = (*small, "--output-length", "300", "--fractions", "0.5", "--state-pages", "4")
    _, none, often, dense, _, *bounded = run(
        *("simulate", "snapshots", *setting, "--intervals", "0", "64"),
        *("--max-states-per-path", "-1", "1"),
    )
    assert none["snapshots"] == 6 * 4 < often["snapshots"]
    assert none["hit_rate"] < often["hit_rate"]
    cases = [(one["interval"], one["per_path"]) for one in bounded]
    assert cases == [(0, -1), (0, 1), (64, -1), (64, 1)]
    for one in bounded:
        assert one["states_evicted"] > 0 and one["hit_rate"] < dense["dense_hit_rate"]


def test_simulate_rounds_finds_more_with_an_l2() -> None:
    """L1 holds all that four clients ask in two rounds."""
    *_, plain, _, _, _, _, tiered = run("simulate", "rounds", "--quick")
    assert (plain["server"], tiered["server"]) == ("GPU only", "+ L2")
    assert plain["round"] == tiered["round"] == "all"
    assert plain["cached_from_host"] == 0 < tiered["cached_from_host"]
    assert plain["hit_rate"] < tiered["hit_rate"]
    assert tiered["duration"] < plain["duration"]
    assert tiered["mean_ttft"] < plain["mean_ttft"]


def test_simulate_store_divides_prompts_between_a_slow_store_and_the_device() -> None:
    none, *runs = run("simulate", "store", "--quick")
    seconds = {(one["store"], one["reads"]): one["duration"] for one in runs}
    assert seconds["filled", "whole"] > 2 * none["duration"]
    assert seconds["filled", "overtaken"] < none["duration"]
    assert seconds["empty", "overtaken"] < seconds["empty", "whole"]
    assert [one["cut"] > 0 for one in runs] == [False, True, False, True]


def test_simulate_groups_finds_most_by_prefix() -> None:
    runs = run("simulate", "groups", "--groups", "4", "--fractions", "1")
    by_case = {one["case"]: one for one in runs}
    rates = {case: one["hit_rate"] for case, one in by_case.items()}
    assert 1.3 * max(rates["round_robin"], rates["total_tokens"]) < rates["auto"] <= rates["bound"]
    assert by_case["auto"]["first_token"] < by_case["total_tokens"]["first_token"]
    known = [one["hit_rate"] + one["l3"] for one in runs]
    assert max(known) - min(known) < 0.02, "L3 has what any group had"


def test_simulate_agents_finds_most_with_a_store() -> None:
    runs = run("simulate", "agents", "--quick")
    assert {one["with_l3_hit_rate"] for one in runs} == {runs[0]["with_l3_hit_rate"]}
    for one in runs:
        assert one["list_hit_rate"] == pytest.approx(one["device_hit_rate"], abs=0.03)
        assert one["device_hit_rate"] + one["host_hit_rate"] < one["with_l3_hit_rate"]


def test_simulate_trace_stops_in_time(tmp_path: Path) -> None:
    """Run as a typed command; the other benchmarks are forked."""
    output = tmp_path / "hits.jsonl"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "benchmark", "simulate", "trace"),
            *("--fractions", "0.5", "--max-seconds", "0", "--output-file", str(output)),
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
        cwd=ROOT,
        env=child_environment({"OMP_NUM_THREADS": "1"}),
    )
    assert done.returncode == 1, done.stderr[-2000:]
    assert "benchmark simulate trace: stopped after --max-seconds" in done.stderr
    metrics = [json.loads(line)["metric"] for line in output.read_text().splitlines()]
    assert metrics[-1] == "unlimited_hit_rate"


@pytest.mark.parametrize(
    "words",
    [
        # Caches that do not hold the longest request.
        ("simulate", "states", "--copies", "1", "--fractions", "0.01"),
        ("simulate", "trace", "--fractions", "0.001", "1"),
        # A policy that needs priorities, which the trace does not have.
        ("simulate", "trace", "--policies", "priority"),
        ("simulate", "turns", "--orders", "4:often"),
        ("storage", "keys", "--repeats", "0"),
    ],
)
def test_options_that_cannot_be_measured_are_refused(words: tuple[str, ...]) -> None:
    assert run(*words, status=2) == []


@pytest.mark.parametrize("store", [(), ("--no-store",)])
def test_keys_are_timed_for_each_set_of_pools(store: tuple[str, ...]) -> None:
    cases = run("storage", "keys", "--pages", "8", "--repeats", "3", *store)
    assert len(cases) == 4 * 3 * 2
    asked = [one["pools"] for one in cases if "keys_of_question" in one]
    assert asked == ([] if store else ["kv", "kv, indexer", "kv, mamba"] * 4)
    for one in cases:
        assert min(one["hash"], one["name"], one["combine"], one["digest"]) > 0


@pytest.mark.parametrize("backend", ["file", "mooncake"])
def test_backends_are_timed_with_and_without_checksums(backend: str) -> None:
    small = ("--mib", "8", "--repeats", "1", "--layers", "4", "--page-sizes", "16")
    layouts = ("--layouts", "layer_first", "page_first")
    cases = run("storage", "backends", "--backends", backend, *layouts, *small)
    assert [one["layout"] for one in cases] == ["layer_first", "page_first"]
    for one in cases:
        assert one["pages"] * one["page"] == 8 << 20
        for figure in ("put_bare", "get_checksum_on", "memory_copy", "memory_hash"):
            assert one[figure] > 0
        for direction in ("put", "get"):
            raw = [one["details"][f"{direction}_{way}"]["raw"] for way in ("checksum_on", "bare")]
            assert list(map(len, raw)) == [1, 1]


LENGTH_SCALE: Final = 1 / 8
"""A block of the trace has 64 tokens then."""


def few_that_share(path: Path) -> tuple[Path, int]:
    """A trace of eight short requests of the excerpt that begin like others, at `path`; and the
    tokens of whole blocks that came before, scaled."""
    lines = (ROOT / "benchmark/data/mooncake_synthetic_excerpt.jsonl").read_text().splitlines()
    requests = [json.loads(line) for line in lines]
    firsts = Counter(one["hash_ids"][0] for one in requests)
    shared = [one for one in requests if firsts[one["hash_ids"][0]] > 1]
    few = sorted(
        sorted(shared, key=lambda one: one["input_length"])[:8], key=lambda one: one["timestamp"]
    )
    path.write_text("".join(json.dumps(one) + "\n" for one in few))
    seen: set[int] = set()
    blocks = 0
    for one in few:
        whole = one["hash_ids"][: one["input_length"] // 512]
        blocks += sum(block in seen for block in whole)
        seen.update(whole)
    return path, blocks * 64


def test_load_generators_measure_a_real_server(tmp_path: Path) -> None:
    plot, output, replayed = (tmp_path / name for name in ("rounds.png", "load", "replay"))
    trace, shared_tokens = few_that_share(tmp_path / "trace")
    with ForkedServer("--page-size", "16") as server:
        talk = ("--num-clients", "3", "--num-rounds", "3", "--request-length", "64")
        short = ("--output-length", "8", "--base-url", server.url, "--plot", str(plot))
        pace = ("--request-rate", "inf", "--max-parallel", "2")
        _, *rounds = run("multiturn", *talk, *short, *pace)
        load = run_forked(
            *("sglang.bench_serving", "--base-url", server.url, "--num-prompts", "6"),
            *("--random-input-len", "64", "--random-output-len", "8"),
            *("--random-range-ratio", "1", "--backend", "sglang-oai-chat"),
            *("--output-file", str(output)),
        )
        replay = run_forked(
            *("sglang.benchmark.serving", "--base-url", server.url, "--dataset-name", "mooncake"),
            *("--dataset-path", str(trace), "--mooncake-length-scale", str(LENGTH_SCALE)),
            *("--mooncake-output-scale", "0.01", "--mooncake-slowdown-factor", "0"),
            *("--max-concurrency", "1", "--output-file", str(replayed)),
        )
    assert replay.returncode == 0, replay.stderr[-2000:]
    record = json.loads(replayed.read_text())
    assert (record["completed"], record["failed"]) == (8, 0)
    assert record["cached_tokens"] == shared_tokens > 1000
    assert [one["failed"] for one in rounds] == [0, 0, 0]
    # Each round has 64 new tokens and an answer of 8, whose last token has no KV; pages of 16.
    assert [one["prompt_tokens"] for one in rounds] == [3 * 64, 3 * 136, 3 * 208]
    assert [one["cached_tokens"] for one in rounds] == [0, 3 * 64, 3 * 128]
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert load.returncode == 0, load.stderr[-2000:]
    record = json.loads(output.read_text())
    assert (record["completed"], record["total_output_tokens"]) == (6, 48)
    assert 5 * 64 < record["total_input_tokens"] < 8 * 64 + 6 * 20


@pytest.mark.parametrize("part", ["tree", "scheduler"])
def test_costs_of_the_cache_and_of_the_scheduler(part: str) -> None:
    assert len(run("cpu-costs", part, "--quick")) == 3


def test_context_parallel_counts_what_is_expected() -> None:
    small = ("--tokens", "256", "--layers", "2", "--hidden", "64", "--steps", "2", "--repeats", "1")
    (one,) = run("ranks", "context-parallel", *small, "--sizes", "4x2")
    expected = one["expected"]
    assert one["details"]["prefill_tokens"]["of_ranks"] == [128] * 4
    assert expected["prefill_tokens"] == 128
    for step in ("prefill", "decode"):
        for group in ("cp", "tp"):
            metric = f"{step}_{group}_collectives"
            assert one[metric] == expected[metric] is not None, metric
    assert one["decode_tp_given"] == pytest.approx(expected["decode_tp_given"])
    # The keys and values of two layers, and a last hidden state of 64 numbers.
    kv = expected["prefill_cp_given"]
    assert one["prefill_cp_given"] == pytest.approx(kv + 64 * 4 / 1e6, abs=2e-4)


def test_quick_reads_between_ranks_need_no_gpu() -> None:
    copies, *reads = run("gpu-pd", "pages", "--quick")
    assert copies["copies"] == "one unit" and copies["pack"] > 0
    assert {one["way"] for one in reads} == {"direct", "packed", "chosen"}
    # K and V of two layers are 4 buffers. 512 tokens are 8 pages, which lie together in a run.
    blocks = {"run": 4, "scattered": 8 * 4}
    assert {one["pages"] for one in reads} == set(blocks)
    assert [one["blocks"] for one in reads] == [blocks[one["pages"]] for one in reads]


@pytest.mark.nightly
def test_each_tick_of_ranks_counts_its_collectives() -> None:
    cases = run("ranks", "collectives", "--ranks", "2", "3", "--ticks", "25")
    ticks = [one for one in cases if "tick" in one]
    assert [one["ranks"] for one in ticks] == [2] * 6 + [3] * 6
    for one in ticks:
        messages = 1 if one["tick"] == "an empty tick" else 2
        assert one["collectives"] == messages + one["tick_sync"], one
        assert ("tick_sync_of_rank_0_p50" in one) == one["tick_sync"]
    ways = [[one for one in cases if "way" in one and one["ranks"] == size] for size in (2, 3)]
    assert [one["way"] for one in ways[0]] == [one["way"] for one in ways[1]] and ways[0]
    assert all(one["p10"] > 0 for of_size in ways for one in of_size)


def test_costs_are_told_with_and_without_tiers() -> None:
    *both, _ = run("cpu-costs", "unused", "--quick")
    with_tiers, without = sorted(both, key=lambda one: str(one["tiers"]))
    assert (with_tiers["tiers"], without["tiers"]) == ("with", "without")
    assert with_tiers["hicache-write"] > 0 and "hicache-write" not in without
    assert with_tiers["scheduler in the forward"] > 0


@pytest.mark.nightly
def test_costs_of_the_http_path_are_told_by_process() -> None:
    speeds, echo, engine = run("cpu-costs", "http-path", "--quick")
    assert speeds["echo"] > 0 and speeds["engine"] > 0
    processes = {"server", "scheduler", "detokenizer", "client"}
    assert engine.keys() >= processes and engine["cpu_time_with"] == "engine"
    # The clocks count nanoseconds, and each process handled all these requests.
    assert min(engine[name] for name in processes) > 0 and echo["echo"] > 0


@pytest.mark.parametrize(
    "words",
    [
        "cpu-costs first-token",
        "cpu-costs kv-events",
        "transfer engine",
        nightly("transfer heads"),
        nightly("transfer limits"),
        "gpu-ranks kernels",
    ],
)
def test_small_runs_have_figures(words: str) -> None:
    """All that a CPU can measure without servers, and that no test above runs."""
    cases = run(*words.split(), "--quick")
    assert cases and all(one["details"] for one in cases)
