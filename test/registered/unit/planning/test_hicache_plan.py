"""The command `sglang.hicache_plan`: figures by hand, files, and refusals."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, Final

import pytest

from rigs.models.published_configs import PUBLISHED
from sglang.hicache_plan import main
from sglang.planning.plan_text import WIDTH
from sglang.srt.constants import GB
from sglang.srt.mem_cache.storage.page_trailer import TRAILER_BYTES
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=4, suite="base-a-test-cpu")

EXCERPT: Final = Path(__file__).parents[4] / "benchmark/data/mooncake_synthetic_excerpt.jsonl"
TOKEN: Final = 36 * 2 * 8 * 128 * 2
"""Bytes of a token of Qwen3-8B."""
LAYERS: Final = 7
"""Layers of DeepSeek-V3.2 here. It is published with 61, and a plan builds each one."""


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(PUBLISHED["Qwen3-8B"].write(tmp_path_factory.mktemp("qwen")))


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> str:
    published = PUBLISHED["DeepSeek-V3.2"]
    short = dataclasses.replace(published, config=published.config | {"num_hidden_layers": LAYERS})
    return str(short.write(tmp_path_factory.mktemp("deepseek")))


def plan(capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, Any]:
    assert main([*flags, "--machine", "h200", "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def refusal(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    assert main(flags) == 2
    return capsys.readouterr().err


def test_figures_equal_those_by_hand(qwen: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = plan(
        capsys, "--model-path", qwen, "--host-memory", "101", "--l3-size", "1000",
        "--prefill-tokens-s", "10000", "--l3-gb-s", "1.0",
    )  # fmt: skip
    (pool,) = found["pools"]
    assert pool["rank_bytes"] == TOKEN
    assert pool["store_bytes"] == TOKEN + TRAILER_BYTES / 64
    device, host, store = found["tiers"]
    # 88% of 141 GB less the weights and 0.5 GiB and logits for graphs.
    graphs = (512 << 20) + 256 * 8 * 151936
    room = 0.88 * 141 * GB - found["weight_bytes"] - graphs
    assert device["tokens"] == pytest.approx(room / TOKEN, abs=128)
    kv = (device["tokens"] + found["page_size"]) * TOKEN
    weights = found["weight_bytes"]
    assert found["memory"] == {"weights": weights, "kv": kv, "graphs": graphs, "exchange": 0}
    assert host["rank_bytes"] == pytest.approx(0.9 * (101 * GB - (1 << 30)), rel=1e-6)
    assert host["tokens"] == pytest.approx(host["rank_bytes"] / TOKEN, rel=1e-3)
    assert store["tokens"] == int(1000 * GB / (TOKEN + TRAILER_BYTES / 64))
    reads = found["reads"]
    assert (reads["prefill"], reads["load"]) == (10000, pytest.approx(55 * GB / TOKEN))
    assert reads["break_even_bytes_per_s"] == 10000 * TOKEN
    # n / 6781 = 1.25 n / 10000 + 0.01 s, and the same with a factor of 2: never.
    assert reads["longest_kept"] == pytest.approx(0.01 / (TOKEN / GB - 1.25e-4), abs=5)
    assert reads["longest_begun"] is None
    assert found["flags"] == ["--enable-hierarchical-cache", "--hicache-size 89"]


@pytest.mark.parametrize(
    ("flags", "readable"),
    [
        (("--max-total-tokens", "30720", "--hicache-ratio", "1.5"), "23,040"),
        (("--max-total-tokens", "30720", "--hicache-ratio", "2"), None),
        (("--max-total-tokens", "81920", "--hicache-ratio", "1"), None),
        (("--hicache-host-memory-mode", "buffer_only", "--hicache-storage-backend", "file"), None),
    ],
)
def test_an_l2_that_cannot_take_the_longest_prompt_is_told(
    qwen: str, flags: tuple[str, ...], readable: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    """The model takes 40,960 tokens, L1 30,720 or 81,920."""
    notes = " ".join(plan(capsys, "--model-path", qwen, "--host-memory", "101", *flags)["notes"])
    assert ("in parts" in notes) == (readable is not None)
    if readable is not None:
        assert f"prompts have up to 30,720 tokens, and L3 brings {readable} of them" in notes


def test_speculation_adds_a_layer(
    deepseek: str, qwen: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--model-path", deepseek, "--tp-size", "8")
    plans = [plan(capsys, *flags, *more) for more in ((), ("--speculative-algorithm", "NEXTN"))]
    for pool, drafting in zip(plans[0]["pools"], plans[1]["pools"], strict=True):
        assert drafting["rank_bytes"] * LAYERS == pool["rank_bytes"] * (LAYERS + 1)
    assert plans[1]["weight_bytes"] > plans[0]["weight_bytes"]
    line = refusal(capsys, "--model-path", qwen, "--speculative-algorithm", "NEXTN")
    assert "Qwen3ForCausalLM has no layer that drafts tokens" in line


def test_groups_have_whole_attention_and_room_to_exchange_tokens(
    deepseek: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--model-path", deepseek, "--tp-size", "8", "--kv-cache-dtype", "fp8_e4m3")
    layouts = ((), ("--ep-size", "8"), ("--attn-dp-size", "8", "--ep-size", "8"))
    split, whole, groups = (plan(capsys, *flags, *more) for more in layouts)
    assert whole["weight_bytes"] == pytest.approx(split["weight_bytes"], rel=1e-3)
    assert [one["memory"]["exchange"] for one in (split, whole)] == [0, 0]
    # Each of 8 groups prefills 8,192 tokens: their sums, the padded ones, and a group's own.
    exchange = 8192 * (2 * 8 + 1) * 7168 * 2
    assert groups["memory"]["exchange"] == exchange
    more = groups["weight_bytes"] - split["weight_bytes"]
    # Layers of 128 heads: queries, keys, values and the output, in fp8 blocks; 7 of 8 parts.
    heads = LAYERS * 128 * (1536 * 192 + 512 * 256 + 7168 * 128)
    assert more > 0.87 * heads
    lost = groups["tiers"][0]["rank_bytes"] - split["tiers"][0]["rank_bytes"]
    assert -lost == pytest.approx(more + exchange, rel=0.001)
    assert groups["flags"][:3] == ["--tp-size 8", "--attn-dp-size 8", "--ep-size 8"]


def test_ranks_share_the_host_and_divide_the_heads(
    qwen: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = plan(capsys, "--model-path", qwen, "--tp-size", "4", "--host-memory", "401")
    assert found["pools"][0]["rank_bytes"] == TOKEN / 4
    assert found["pools"][0]["store_bytes"] == TOKEN + 4 * TRAILER_BYTES / 64
    assert found["tiers"][1]["rank_bytes"] == pytest.approx(0.9 / 4 * (401 * GB - (1 << 30)))
    assert found["flags"][0] == "--tp-size 4"


@pytest.mark.parametrize("ratio", ["1.5", "2"])
def test_a_ratio_that_is_given_counts(
    qwen: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], ratio: str
) -> None:
    """A server's default ratio counts too if it is given, though the plan has another default."""
    file = tmp_path / "flags.yaml"
    file.write_text(f"hicache-ratio: {ratio}\n")
    for flags in (("--hicache-ratio", ratio), ("--config", str(file))):
        device, host, _ = plan(capsys, "--model-path", qwen, "--host-memory", "900", *flags)[
            "tiers"
        ]
        assert host["tokens"] == int(float(ratio) * device["tokens"])
        assert host["reason"] == f"--hicache-ratio {ratio}"


def test_a_buffer_adds_no_tokens_to_l1(qwen: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--model-path", qwen, "--host-memory", "200", "--max-total-tokens", "200000"]
    flags += ["--hicache-storage-backend", "file", "--trace", str(EXCERPT)]
    buffer = plan(capsys, *flags, "--hicache-host-memory-mode", "buffer_only")
    assert buffer["tiers"][1]["rank_bytes"] == pytest.approx(512 * 64 * TOKEN, rel=0.01)
    shares = {row["tier"]: row["hit_rate"] for row in buffer["trace"]["by_tier"]}
    assert shares["L2"] == 0 and shares["L1"] > 0.2
    assert "--hicache-host-memory-mode buffer_only" in buffer["flags"]
    cache = plan(capsys, *flags)["trace"]
    assert buffer["trace"]["unlimited_hit_rate"] == cache["unlimited_hit_rate"]


def test_a_trace_gives_shares_by_tier_and_both_kinds_of_plot(
    qwen: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--model-path", qwen, "--host-memory", "200", "--max-total-tokens", "200000"]
    for name, begin in (("p.png", b"\x89PNG"), ("p.svg", b"<svg ")):
        plot = tmp_path / name
        trace = plan(capsys, *flags, "--trace", str(EXCERPT), "--plot", str(plot))["trace"]
        assert plot.read_bytes().startswith(begin)
    shares = {row["tier"]: row["hit_rate"] for row in trace["by_tier"]}
    assert 0.2 < shares["L1"] < 0.4 and shares["L2"] > 0.1
    assert sum(shares.values()) + trace["stored_but_computed"] == pytest.approx(
        trace["unlimited_hit_rate"]
    )
    assert trace["stored_but_computed"] > 0.01, "a store over TCP is slower than a GPU"
    rates = [row["hit_rate"] for row in trace["by_size"]]
    assert rates == sorted(rates) and rates[-1] == trace["unlimited_hit_rate"]
    assert plot.read_text().count("<circle") == len(rates)


def test_a_recorded_trace_says_what_more_l2_brings(
    qwen: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Prompts of 512 tokens in turn: L2 has all of them or, as the list is LRU, none."""
    rounds, prompts = 10, 150
    lines = [
        {"timestamp": number, "input_length": 513, "output_length": 1,
         "hash_ids": [number % prompts, 1000 + number]}
        for number in range(rounds * prompts)
    ]  # fmt: skip
    file = tmp_path / "trace.jsonl"
    flags = ["--model-path", qwen, "--max-total-tokens", "16384", "--hicache-ratio", "2"]
    file.write_text("".join(json.dumps(line) + "\n" for line in reversed(lines)))
    trace = plan(capsys, *flags, "--trace", str(file))["trace"]
    rates = [row["hit_rate"] for row in trace["by_l2"]]
    assert [row["factor"] for row in trace["by_l2"]] == [1, 2, 4]
    assert trace["by_l2"][0]["by_tier"] == {
        row["tier"]: row["hit_rate"] for row in trace["by_tier"]
    }
    # Each prompt takes 512 tokens: 77,000 are more than 32,768 and 65,536, and less than 131,072.
    in_l2 = [row["by_tier"]["L2"] for row in trace["by_l2"]]
    assert in_l2[:2] == [0, 0]
    assert in_l2[2] == pytest.approx((rounds - 1) / rounds, abs=0.01)
    assert rates == sorted(rates)
    # A tenth of the prompts, in a tenth of the room.
    file.write_text("".join(json.dumps({**line, "share": 0.1}) + "\n" for line in lines))
    tenth = plan(capsys, *flags, "--trace", str(file))["trace"]
    assert tenth["by_l2"][2]["by_tier"]["L2"] == 0, "all prompts take 770,000 tokens"
    assert main([*flags, "--machine", "h200", "--trace", str(file)]) == 0
    text = capsys.readouterr().out
    assert "a sample of 10.0% of the prompts" in text
    assert [line.split()[:2] for line in text.splitlines() if line.startswith("  x ")] == [
        ["x", "1"], ["x", "2"], ["x", "4"],
    ]  # fmt: skip
    file.write_text(json.dumps({**lines[0], "share": 0.1}) + "\n" + json.dumps(lines[1]) + "\n")
    assert "samples of different shares" in refusal(
        capsys, *flags, "--machine", "h200", "--trace", str(file)
    )


@pytest.mark.parametrize(
    ("flags", "is_read"),
    [
        (("--hicache-storage-prefetch-policy", "wait_complete"), True),
        (("--l3-gb-s", "40"), True),
        (("--l3-gb-s", "40", "--prefill-tokens-s", "1000000"), False),
        (
            (
                "--hicache-storage-prefetch-policy",
                "wait_complete",
                "--hicache-storage-backend",
                "file",
                "--hicache-storage-backend-extra-config",
                '{"prefetch_threshold": 1000000}',
            ),
            False,
        ),
    ],
)
def test_a_trace_reads_from_l3_as_the_settings_say(
    qwen: str, flags: tuple[str, ...], capsys: pytest.CaptureFixture[str], *, is_read: bool
) -> None:
    sizes = ("--model-path", qwen, "--host-memory", "200", "--max-total-tokens", "200000")
    trace = plan(capsys, *sizes, "--trace", str(EXCERPT), *flags)["trace"]
    read = trace["by_tier"][2]["hit_rate"]
    assert (read > 0.01) == is_read
    assert (trace["stored_but_computed"] > 0.01) != is_read


def test_the_text_has_every_table(qwen: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model-path", qwen, "--machine", "h100", "--trace", str(EXCERPT)]) == 0
    text = capsys.readouterr().out
    for word in ("8.19 billion", "copies from host memory", "by --tp-size", "147,456", "L3"):
        assert word in text
    assert "give --host-memory" in text and "found in" in text
    assert "the store has" in text and "under best_effort" not in text


def test_the_text_counts_small_models_in_millions(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--machine", "h100"]) == 0
    assert "1.99 million parameters, 1.58 million for" in capsys.readouterr().out


@pytest.mark.parametrize(
    "flags", [("--machine", "h100", "--trace", str(EXCERPT)),
              ("--tp-size", "2", "--device", "cpu", "--mem-fraction-static", "0.5")],
)  # fmt: skip
def test_the_text_fits_100_columns(capsys: pytest.CaptureFixture[str], flags: list[str]) -> None:
    """The line of flags is to be copied, and stays whole."""
    assert main(flags) == 0
    text, _, last = capsys.readouterr().out.rpartition("\n\n")
    assert last.startswith("flags: ")
    long = [line for line in text.splitlines() if len(line) > WIDTH]
    assert WIDTH == 100 and not long
    if "--mem-fraction-static" in flags:
        why = "--mem-fraction-static 0.5 of"
        assert "for each of 2 ranks, less" in " ".join(text[text.index(why) :].split())


def test_this_machine_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--machine", "here", "--device", "cpu", "--json"]) == 0
    machine = json.loads(capsys.readouterr().out)["machine"]
    for field in ("device_bytes", "host_bytes", "l2_bytes_per_s", "flop_per_s"):
        assert machine[field]["source"] == "measured" and machine[field]["value"] > 1e6, field


def test_a_device_that_is_not_here_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--device npu: " in refusal(capsys, "--machine", "here", "--device", "npu")


def test_weights_alone_are_counted(qwen: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model-path", qwen, "--weights-only"]) == 0
    assert "16.38" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--machine", "h1000"], "--machine h1000: use here or one of a100"),
        (["--l3-gb-s", "0"], "--l3-gb-s 0.0: must be a number above 0"),
        (["--plot", "x.png"], "give --trace FILE too"),
        (["--trace", str(EXCERPT), "--plot", "x.pdf"], "must end in .png or .svg"),
        (["--machine", "h200", "--trace", "/none.jsonl"], "/none.jsonl: No such file"),
        (["--machine", "h200", "--tp-siz", "2"], "did you mean --tp-size?"),
        (["--machine", "h200", "--device-memory", "10"], "use a larger --tp-size"),
        (["--machine", "h200", "--hicache-size", "900"], "give --host-memory"),
    ],
)
def test_refusals_name_the_flag_and_the_remedy(
    qwen: str, flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert words in refusal(capsys, "--model-path", qwen, *flags)
