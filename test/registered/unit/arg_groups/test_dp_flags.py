"""Flags of data-parallel attention: two ways to say it, sizes that fit, what does not go along."""

from __future__ import annotations

import pytest

from sglang.srt.arg_groups.cli import FlagErrors
from sglang.srt.arg_groups.kv_events_config import KVEventsConfig
from sglang.srt.server_args import ServerArgs, prepare_server_args
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=1, suite="base-a-test-cpu")


def refusals(flags: str) -> list[str]:
    """The lines about a command line; none if it is accepted."""
    try:
        prepare_server_args(flags.split())
    except FlagErrors as errors:
        return list(errors.lines)
    return []


@pytest.mark.parametrize(
    "flags",
    [
        "--attn-dp-size 4",
        "--attention-data-parallel-size 4",
        "--dp-size 4 --enable-dp-attention",
        "--dp 4 --enable-dp-attention --attn-dp-size 4 --enable-dp-lm-head",
    ],
)
def test_all_ways_to_ask_for_groups_mean_the_same(flags: str) -> None:
    args = prepare_server_args(f"--tp 8 --attn-cp-size 2 {flags}".split())
    assert (args.attn_dp_size, args.dp_size, args.enable_dp_attention) == (4, 4, True)
    assert args.resolve() == args


def test_without_the_flags_there_is_one_group() -> None:
    for flags in ("", "--attn-dp-size 1", "--dp-size 1", "--enable-dp-lm-head"):
        args = prepare_server_args(flags.split())
        assert (args.attn_dp_size, args.dp_size, args.enable_dp_attention) == (1, 1, False)
    (line,) = refusals("--dp-size 2")
    assert line.startswith("--dp-size 2: a server has 1.")


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (
            "--tp 8 --attn-dp-size 3",
            "--attn-dp-size 3 does not divide --tp-size 8, the ranks of all groups: give a "
            "multiple of 3 as --tp-size, or 2 or 4 or 8 groups",
        ),
        (
            "--tp 8 --dp-size 4 --enable-dp-attention --attn-cp-size 4",
            "--enable-dp-attention --dp-size 4 times --attn-cp-size 4 does not divide --tp-size 8, "
            "the ranks of all groups: give a multiple of 16 as --tp-size, or 2 groups",
        ),
        (
            "--attn-dp-size 2",
            "--attn-dp-size 2 does not divide --tp-size 1, the ranks of all groups: give a "
            "multiple of 2 as --tp-size",
        ),
        ("--tp 2 --attn-dp-size 0", "--attn-dp-size 0: must be at least 1"),
        (
            "--tp 4 --attn-dp-size 2 --dp-size 4 --enable-dp-attention",
            "--attn-dp-size 2 and --dp-size 4: give one of them, or both the same",
        ),
        (
            "--tp 2 --enable-dp-attention",
            "--enable-dp-attention has no effect without --attn-dp-size above 1",
        ),
        (
            "--tp 2 --load-balance-method total_tokens",
            "--load-balance-method total_tokens has no effect without --attn-dp-size above 1",
        ),
        (
            "--tp 2 --attn-dp-size 2 --load-balance-method follow_bootstrap_room",
            "--load-balance-method follow_bootstrap_room: it is for prefill servers, whose "
            "requests have rooms: add --disaggregation-mode prefill, or use another method",
        ),
        (
            "--tp 2 --attn-dp-size 2 --disaggregation-mode decode "
            "--load-balance-method follow_bootstrap_room",
            "--load-balance-method follow_bootstrap_room: it is for prefill servers, whose "
            "requests have rooms: add --disaggregation-mode prefill, or use another method",
        ),
        (
            "--tp 128 --attn-dp-size 128 --disaggregation-mode prefill",
            "--attn-dp-size 128: a prefill server has at most 64 groups, which decode servers ask: "
            "start several servers",
        ),
        (
            "--tp 128 --attn-dp-size 128 --disaggregation-mode decode --enable-pd-role-switch "
            "--admin-api-key key",
            "--attn-dp-size 128: a prefill server has at most 64 groups, which decode servers ask: "
            "start several servers",
        ),
        (
            "--tp 2 --attn-dp-size 2 --nnodes 2 --node-rank 1 --dist-init-addr a:1",
            "--attn-dp-size 2 does not work with --nnodes 2 yet: leave one of them out",
        ),
        (
            "--tp 2 --attn-dp-size 2 "
            "--remote-instance-weight-loader-start-seed-via-transfer-engine",
            "--attn-dp-size 2 does not work with weights that one server reads from another yet: "
            "leave one of them out",
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_what_does(flags: str, line: str) -> None:
    assert refusals(flags) == [line]


@pytest.mark.parametrize(
    "flags",
    [
        "--disaggregation-mode decode",
        "--disaggregation-mode prefill",
        "--disaggregation-mode prefill --load-balance-method follow_bootstrap_room",
        "--disaggregation-mode decode --load-balance-method follow_bootstrap_room "
        "--enable-pd-role-switch --admin-api-key key",
    ],
)
def test_prefill_and_decode_servers_have_groups(flags: str) -> None:
    assert prepare_server_args(f"--tp 2 --attn-dp-size 2 {flags}".split()).attn_dp_size == 2


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ('{"endpoint":"tcp://*:65534"}', "name a port from 1 to 65532"),
        ('{"endpoint":"tcp://*:*"}', "name a port from 1 to 65532"),
        (
            '{"endpoint":"tcp://*:5557","replay_endpoint":"tcp://*:5560"}',
            "at least 4 apart",
        ),
    ],
)
def test_groups_need_ports_for_their_events(config: str, words: str) -> None:
    flags = f"--tp 4 --attn-dp-size 4 --kv-events-config {config}"
    (line,) = refusals(flags)
    assert line.startswith("--kv-events-config") and words in line


def test_the_events_of_a_group_have_the_ports_after_the_first() -> None:
    config = KVEventsConfig(endpoint="tcp://*:5557", replay_endpoint="ipc:///run/replay")
    assert config.of_dp_rank(0) == config
    third = config.of_dp_rank(2)
    assert (third.endpoint, third.replay_endpoint) == ("tcp://*:5559", "ipc:///run/replay_dp2")
    assert config.describe(16, dp_size=3)["dp_size"] == 3


@pytest.mark.parametrize("flag", ["--ep-size", "--ep", "--expert-parallel-size"])
def test_experts_are_whole_on_all_ranks_or_on_none(flag: str) -> None:
    assert prepare_server_args(f"--tp 8 --attn-dp-size 4 {flag} 8".split()).ep_size == 8
    assert prepare_server_args(f"--tp 8 {flag} 1".split()).ep_size == 1
    assert refusals(f"--tp 8 {flag} 4") == [
        "--ep-size 4: experts are whole on all ranks or on none: give 1, or as many as --tp-size, 8"
    ]
    assert refusals(f"--tp 2 {flag} 0") == ["--ep-size 0: must be at least 1"]


@pytest.mark.parametrize(
    ("flags", "feature"),
    [
        ("--attn-cp-size 2", "--attn-cp-size 2"),
        (
            "--remote-instance-weight-loader-start-seed-via-transfer-engine",
            "weights that one server reads from another",
        ),
    ],
)
def test_whole_experts_are_refused_with_some_features(flags: str, feature: str) -> None:
    assert refusals(f"--tp 4 --ep 4 {flags}") == [
        f"--ep-size 4 does not work with {feature} yet: leave one of them out"
    ]


@pytest.mark.parametrize("flag", ["--moe-a2a-backend deepep", "--ep-num-redundant-experts 4"])
def test_other_ways_of_expert_parallelism_are_refused(flag: str) -> None:
    (line,) = refusals(f"--tp 4 --ep 4 {flag}")
    assert flag.split()[0] in line
    assert "expert parallelism in other ways than --ep-size" in line


def test_a_method_that_nobody_knows_is_refused() -> None:
    (line,) = refusals("--tp 2 --attn-dp-size 2 --load-balance-method best")
    assert line.startswith("--load-balance-method") and "round_robin" in line


def test_an_engine_takes_them_as_keywords() -> None:
    args = ServerArgs.from_kwargs(
        model_path="dummy", tp_size=4, dp_size=2, enable_dp_attention=True, enable_dp_lm_head=True
    ).resolve()
    assert args.attn_dp_size == 2
