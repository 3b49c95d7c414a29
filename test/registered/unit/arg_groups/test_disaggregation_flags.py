"""Flags of prefill and decode servers: what takes effect, and what is refused by name."""

from __future__ import annotations

import dataclasses
import logging

import pytest

from sglang.srt.arg_groups.disaggregation import (
    overruled_variables,
    prefill_hosts,
    variables_of,
)
from sglang.srt.environ import envs
from sglang.srt.server_args import ServerArgs, prepare_server_args
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="base-a-test-cpu")

MODE = "--disaggregation-mode"
PORT = "--disaggregation-bootstrap-port"
DEVICE = "--disaggregation-ib-device"
BACKEND = "--disaggregation-transfer-backend"
RADIX = "--disaggregation-decode-enable-radix-cache"
HOSTS = "--disaggregation-prefill-hosts"
CHECKSUM = "--disaggregation-enable-kv-checksum"
OFFLOAD = "--disaggregation-decode-enable-offload-kvcache"
ALLOW = "--disaggregation-allow-no-secret"
TWO_MACHINES = ("--tp", "2", "--nnodes", "2", "--dist-init-addr", "a:1")
ON_LOOPBACK = (*TWO_MACHINES[:-1], "127.0.0.1:1")
ENGINE = "MOONCAKE_LOCAL_HOSTNAME"
SWITCH = "--enable-pd-role-switch"
KEY = ("--admin-api-key", "operator")
RETRACTION = "--disaggregation-decode-retraction-backup"
TIERED = "--enable-hierarchical-cache"
FILES = ("--hicache-storage-backend", "file")


def prepare(*argv: str) -> ServerArgs:
    return prepare_server_args(["--model-path", "dummy", *argv])


@pytest.mark.parametrize("mode", ["prefill", "decode"])
def test_roles_keep_the_features_of_a_whole_server(mode: str) -> None:
    args = prepare(MODE, mode, DEVICE, "mlx5_0", BACKEND, "mooncake", "--disable-radix-cache")
    assert args.disaggregation_mode == mode
    assert args.disaggregation_ib_device == "mlx5_0"
    assert args.disaggregation_bootstrap_port == 8998
    assert args.resolve() == args
    assert prepare(MODE, mode, "--tp-size", "4").tp_size == 4


def test_a_prefill_server_listens_where_it_is_told() -> None:
    assert prepare(MODE, "prefill", PORT, "9001").disaggregation_bootstrap_port == 9001
    assert prepare().disaggregation_mode == "null"
    assert prepare(MODE, "prefill", "--hicache-storage-backend", "file").enable_hierarchical_cache


def test_prefill_servers_may_split_prompts() -> None:
    args = prepare(MODE, "prefill", "--tp-size", "4", "--attn-cp-size", "2")
    assert (args.tp_size, args.attn_cp_size) == (4, 2)


def test_servers_of_two_machines_have_addresses_for_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = ("--host", "b", ALLOW)
    monkeypatch.delenv(ENGINE, raising=False)
    for rank in ("0", "1"):
        assert prepare(MODE, "prefill", *TWO_MACHINES, "--node-rank", rank, *own).nnodes == 2
        for mode in ("prefill", "decode"):
            prepare(MODE, mode, *ON_LOOPBACK, "--node-rank", rank)
            prepare(MODE, mode, *TWO_MACHINES, "--node-rank", rank, BACKEND, "fake")
    decode = (MODE, "decode", *TWO_MACHINES, HOSTS, "c,10.0.0.0/16")
    prepare(*decode, *own)
    monkeypatch.setenv(ENGINE, "10.0.0.1")
    prepare(*decode)
    with pytest.raises(ValueError, match=r"^--host 127\.0\.0\.1 with --nnodes 2"):
        prepare(MODE, "prefill", *TWO_MACHINES)
    monkeypatch.setenv(ENGINE, "localhost")
    for argv in (decode, (MODE, "prefill", *TWO_MACHINES)):
        with pytest.raises(ValueError, match=f"^{ENGINE}=localhost with --nnodes 2"):
            prepare(*argv, *own)
    prepare(*TWO_MACHINES)


def test_a_decode_server_reuses_prefixes_unless_told_not_to() -> None:
    for argv in ((), (RADIX,)):
        args = prepare(MODE, "decode", *argv)
        assert args.disaggregation_decode_enable_radix_cache
        assert args.resolve() == args
    args = prepare(MODE, "decode", "--disable-radix-cache")
    assert not args.disaggregation_decode_enable_radix_cache
    assert not prepare(MODE, "prefill").disaggregation_decode_enable_radix_cache


@pytest.mark.parametrize("argv", [(), (OFFLOAD,)])
def test_a_decode_server_may_have_tiers(argv: tuple[str, ...]) -> None:
    args = prepare(MODE, "decode", *argv, *FILES, "--hicache-write-policy", "write_back")
    assert args.enable_hierarchical_cache and args.hicache_storage_backend == "file"
    assert args.resolve() == args
    assert prepare(MODE, "decode", "--enable-hierarchical-cache").page_size == 64


@pytest.mark.parametrize("mode", ["prefill", "decode"])
def test_a_server_that_changes_takes_the_flags_of_both_roles(
    mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    both = (PORT, "9001", HOSTS, "a", RADIX, OFFLOAD, *FILES, RETRACTION, "host_pool")
    with caplog.at_level(logging.WARNING):
        args = prepare(MODE, mode, SWITCH, *KEY, *both)
    assert not caplog.records
    assert args.resolve() == args
    assert args.keeps_pages_alone and prefill_hosts(args, args.host) is not None
    other = "decode" if mode == "prefill" else "prefill"
    changed = args.in_role(other)
    assert changed.disaggregation_mode == other
    assert changed.in_role(mode) == args
    with pytest.raises(dataclasses.FrozenInstanceError):
        changed.port = 1


@pytest.mark.parametrize("argv", [FILES, (TIERED,)])
def test_retracted_requests_may_go_to_l2(argv: tuple[str, ...]) -> None:
    args = prepare(MODE, "decode", RETRACTION, "host_pool", *argv)
    assert args.disaggregation_decode_retraction_backup == "host_pool"
    assert prepare(MODE, "decode", *argv).disaggregation_decode_retraction_backup is None


def test_retracted_requests_go_nowhere_without_l2(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        prepare(MODE, "decode", RETRACTION, "host_pool")
    (record,) = caplog.records
    assert RETRACTION in record.getMessage() and "no effect" in record.getMessage()


@pytest.mark.parametrize("mode", ["prefill", "decode"])
def test_servers_that_move_nothing_need_no_secret(mode: str) -> None:
    args = prepare(MODE, mode, BACKEND, "fake", "--host", "0.0.0.0")
    assert prefill_hosts(args, args.host) is None


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ((PORT, "9001"), f"^{PORT} 9001 has no effect with {MODE} null$"),
        ((DEVICE, "mlx5_0"), f"^{DEVICE} mlx5_0 has no effect with {MODE} null$"),
        ((MODE, "prefill", PORT, "0"), f"^{PORT} 0: must be from 1 to 65535$"),
        ((MODE, "prefill", PORT, "65536"), f"^{PORT} 65536: must be from 1 to 65535$"),
        ((MODE, "prefill", PORT, "30000"), f"^{PORT} 30000 is --port too"),
        (
            (MODE, "decode", "--tp-size", "2", "--attn-cp-size", "2"),
            f"^--attn-cp-size 2 has no use with {MODE} decode, .*: use it on the prefill servers$",
        ),
        (
            (MODE, "prefill", *TWO_MACHINES),
            f"^--host 127.0.0.1 with --nnodes 2 {MODE} prefill: the other servers do not reach ",
        ),
        (
            (MODE, "decode", *TWO_MACHINES, "--host", "localhost", HOSTS, "a"),
            f"^--host localhost with --nnodes 2 {MODE} decode: the other servers do not reach ",
        ),
        (
            (MODE, "decode", *TWO_MACHINES, "--host", "b", ALLOW),
            f"^{HOSTS} is missing with --nnodes 2 {MODE} decode: .* look on its own machine$",
        ),
        (
            (MODE, "decode", *TWO_MACHINES, "--host", "b", ALLOW, HOSTS, "a,[::1]:8998"),
            f"^{HOSTS} names ::1 with --nnodes 2 {MODE} decode: .* own machine; give the address",
        ),
        (
            (MODE, "decode", *TWO_MACHINES, "--host", "b", ALLOW, HOSTS, "a b"),
            f"^{HOSTS}: 'a b' is no HOST, HOST:PORT or network[^\n]*$",
        ),
        ((MODE, "decode", OFFLOAD), f"^{OFFLOAD} needs --hicache-storage-backend"),
        (
            (MODE, "decode", OFFLOAD, "--enable-hierarchical-cache"),
            f"^{OFFLOAD} needs --hicache-storage-backend",
        ),
        (
            (MODE, "decode", OFFLOAD, *FILES, "--disable-radix-cache"),
            "^--disable-radix-cache contradicts the hierarchical cache",
        ),
        ((MODE, "prefill", OFFLOAD, *FILES), f"^{OFFLOAD} has no effect with {MODE} prefill$"),
        ((OFFLOAD, *FILES), f"^{OFFLOAD} has no effect with {MODE} null$"),
        ((SWITCH, *KEY), f"^{SWITCH} has no effect with {MODE} null$"),
        ((MODE, "decode", SWITCH), f"^{SWITCH} needs an operator's key, .*: give --admin-api-key"),
        (
            (MODE, "prefill", SWITCH, *KEY, "--tp", "2", "--attn-cp-size", "2"),
            "^--attn-cp-size 2 has no use with",
        ),
        (
            (
                MODE,
                "prefill",
                SWITCH,
                *KEY,
                "--tp",
                "2",
                "--nnodes",
                "2",
                "--dist-init-addr",
                "a:1",
            ),
            f"(?m)^{SWITCH} does not work with --nnodes above 1 yet: leave one of them out$",
        ),
        ((MODE, "decode", SWITCH, *KEY, PORT, "30000"), f"^{PORT} 30000 is --port too"),
        ((MODE, "prefill", SWITCH, *KEY, HOSTS, "a b"), f"^{HOSTS}: 'a b' is no HOST"),
        (
            (MODE, "decode", RETRACTION, "radix", TIERED),
            f"^{RETRACTION} radix: choose one of host_pool",
        ),
        (
            (MODE, "prefill", RETRACTION, "host_pool", TIERED),
            f"^{RETRACTION} host_pool has no effect with {MODE} prefill$",
        ),
        ((MODE, "prefill", RADIX), f"^{RADIX} has no effect with {MODE} prefill$"),
        (
            (MODE, "decode", RADIX, "--disable-radix-cache"),
            f"^{RADIX} contradicts --disable-radix-cache; drop one of them$",
        ),
        ((MODE, "prefill", HOSTS, "a"), f"^{HOSTS} a has no effect with {MODE} prefill$"),
        ((MODE, "decode", HOSTS, "a b"), f"^{HOSTS}: 'a b' is no HOST, HOST:PORT or network"),
        ((CHECKSUM,), f"^{CHECKSUM} has no effect with {MODE} null"),
        ((BACKEND, "mooncake_tcp"), f"^{BACKEND} mooncake_tcp has no effect with {MODE} null"),
        ((MODE, "prefill", BACKEND, "fake", CHECKSUM), f"^{CHECKSUM} has no effect with {MODE} "),
        ((MODE, "both"), f"^{MODE} both: choose one of null, prefill, decode"),
        (
            (MODE, "prefill", BACKEND, "carrier"),
            f"^{BACKEND} carrier: choose one of mooncake, mooncake_tcp, nixl, fake",
        ),
        (
            (MODE, "prefill", BACKEND, "fake", PORT, "9001"),
            f"^{PORT} 9001 has no effect with {MODE} prefill {BACKEND} fake$",
        ),
        (
            (MODE, "decode", BACKEND, "fake", HOSTS, "a"),
            f"^{HOSTS} a has no effect with {MODE} decode {BACKEND} fake$",
        ),
        (
            (MODE, "decode", BACKEND, "fake", DEVICE, "mlx5_0"),
            f"^{DEVICE} mlx5_0 has no effect with {MODE} decode {BACKEND} fake$",
        ),
        *(
            ((MODE, "prefill", BACKEND, name), f"^{BACKEND} {name}: SGLang has it, .*use mooncake$")
            for name in ("mori", "ascend")
        ),
    ],
)
def test_flags_that_contradict_or_do_nothing_are_refused(
    argv: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        prepare(*argv)


def test_flags_stand_for_variables_while_a_server_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MOONCAKE_PROTOCOL", "rdma")
    monkeypatch.delenv("SGLANG_HICACHE_CHECKED_SHARE", raising=False)
    args = prepare(MODE, "prefill", BACKEND, "mooncake_tcp", CHECKSUM)
    with variables_of(args):
        assert envs.MOONCAKE_PROTOCOL.get() == "tcp"
        assert envs.SGLANG_HICACHE_CHECKED_SHARE.get() == 1
    assert envs.MOONCAKE_PROTOCOL.get() == "rdma"
    assert not envs.SGLANG_HICACHE_CHECKED_SHARE.is_set()
    assert list(overruled_variables(args)) == [
        f"MOONCAKE_PROTOCOL=rdma has no effect: {BACKEND} mooncake_tcp makes it tcp"
    ]
    monkeypatch.setenv("MOONCAKE_PROTOCOL", "tcp")
    assert not list(overruled_variables(args))
    with variables_of(prepare(MODE, "prefill")):
        assert not envs.SGLANG_HICACHE_CHECKED_SHARE.is_set()
