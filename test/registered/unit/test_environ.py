"""Environment variables: parsing, defaults, overriding, and errors that name the variable."""

from __future__ import annotations

from fnmatch import fnmatchcase

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang.srt.arg_groups.foreign_variables import SGLANG_VARIABLES, warnings_about_variables
from sglang.srt.entrypoints.start_checks import check_start
from sglang.srt.environ import Envs, child_environment, envs, parse_size
from sglang.srt.server_args import ServerArgs
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=2, suite="base-a-test-cpu")


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("4096", 4096),
        ("512mb", 512 << 20),
        ("4gb", 4 << 30),
        ("1.5GiB", 3 << 29),
        (" 2 K ", 2048),
        ("1t", 1 << 40),
    ],
)
def test_sizes_are_read_with_units(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "gb", "-1", "4 gigs", "1e9", "0x10"])
def test_invalid_sizes_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a size"):
        parse_size(text)


@pytest.mark.parametrize(("text", "seconds"), [("5", 5), ("5.0", 5), (" 600.0 ", 600)])
def test_whole_seconds_are_read_as_sglang_writes_them(
    monkeypatch: pytest.MonkeyPatch, text: str, seconds: int
) -> None:
    field = envs.SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL
    monkeypatch.setenv(field.name, text)
    assert field.get() == seconds
    monkeypatch.setenv(field.name, "2.5")
    with pytest.raises(ValueError, match=r"HEARTBEAT_INTERVAL='2.5': expected a whole number"):
        field.get()


@pytest.mark.parametrize(
    ("text", "value"),
    [("", None), (" ", None), ("0", False), ("off", False), ("1", True), ("True", True)],
)
def test_switches_of_three_positions(
    monkeypatch: pytest.MonkeyPatch, text: str, value: bool | None
) -> None:
    field = envs.SGLANG_MOONCAKE_SEND_AUX_TCP
    monkeypatch.setenv(field.name, text)
    assert field.get() is value
    with field.override(value):
        assert field.get() is value
    monkeypatch.delenv(field.name)
    assert field.get() is None


@pytest.mark.parametrize(("text", "share"), [("0", 0.0), ("0.25", 0.25), (" 1 ", 1.0)])
def test_shares_are_read(monkeypatch: pytest.MonkeyPatch, text: str, share: float) -> None:
    monkeypatch.setenv("SGLANG_TEST_DISAGG_FAILURE_PROB", text)
    assert envs.SGLANG_TEST_DISAGG_FAILURE_PROB.get() == share


@pytest.mark.parametrize("text", ["", "-0.1", "1.1", "nan", "10%"])
def test_invalid_shares_are_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("SGLANG_TEST_DISAGG_FAILURE_PROB", text)
    with pytest.raises(ValueError, match=r"SGLANG_TEST_DISAGG_FAILURE_PROB.*from 0 to 1"):
        envs.SGLANG_TEST_DISAGG_FAILURE_PROB.get()


def test_unset_means_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MOONCAKE_PROTOCOL", raising=False)
    monkeypatch.delenv("MOONCAKE_MASTER", raising=False)
    monkeypatch.delenv("MOONCAKE_GLOBAL_SEGMENT_SIZE", raising=False)
    assert not envs.MOONCAKE_PROTOCOL.is_set()
    assert envs.MOONCAKE_PROTOCOL.get() == "rdma"
    assert envs.MOONCAKE_MASTER.get() is None
    assert envs.MOONCAKE_GLOBAL_SEGMENT_SIZE.get() == 4 << 30


def test_override_restores_unset_and_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MOONCAKE_PROTOCOL", raising=False)
    with envs.MOONCAKE_PROTOCOL.override("tcp"):
        assert envs.MOONCAKE_PROTOCOL.get() == "tcp"
        with envs.MOONCAKE_PROTOCOL.override("efa"):
            assert child_environment()["MOONCAKE_PROTOCOL"] == "efa"
        assert child_environment()["MOONCAKE_PROTOCOL"] == "tcp"
    assert not envs.MOONCAKE_PROTOCOL.is_set()


def test_override_restores_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONCAKE_CHECK_SERVER", "yes")

    def fail_inside() -> None:
        with envs.MOONCAKE_CHECK_SERVER.override(False):
            assert envs.MOONCAKE_CHECK_SERVER.get() is False
            raise KeyError

    with pytest.raises(KeyError):
        fail_inside()
    assert envs.MOONCAKE_CHECK_SERVER.get() is True


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("MOONCAKE_CHECK_SERVER", "perhaps"),
        ("MOONCAKE_MASTER_METRICS_PORT", "90o3"),
        ("MOONCAKE_GLOBAL_SEGMENT_SIZE", "big"),
    ],
)
def test_bad_value_names_the_variable(monkeypatch: pytest.MonkeyPatch, name: str, bad: str) -> None:
    monkeypatch.setenv(name, bad)
    with pytest.raises(ValueError, match=f"{name}='{bad}': expected .*; unset it"):
        Envs.fields()[name].get()


@pytest.mark.parametrize(
    ("name", "bad"),
    [("SGLANG_FORWARD_UNKNOWN_TOOLS", "maybe"), ("HICACHE_HOST_MEMORY_RESERVE_BYTES", "much")],
)
def test_a_malformed_variable_of_the_engine_is_found_at_the_start(
    monkeypatch: pytest.MonkeyPatch, name: str, bad: str
) -> None:
    envs.check_own()
    monkeypatch.setenv("GOMP_SPINCOUNT", "INFINITY")  # torch's OpenMP library takes that
    envs.check_own()
    monkeypatch.setenv(name, bad)
    with pytest.raises(ValueError, match=f"{name}='{bad}': expected .*; unset it"):
        check_start(ServerArgs(model_path="no such model"))


def warned_of(monkeypatch: pytest.MonkeyPatch, *names: str) -> list[str]:
    for name in (*Envs.others("SGLANG_"), *Envs.others("MOONCAKE_")):
        monkeypatch.delenv(name)
    for name in names:
        monkeypatch.setenv(name, "1")
    return list(warnings_about_variables())


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("MOONCAKE_PROTOCL", "; did you mean MOONCAKE_PROTOCOL?"),
        ("MOONCAKE_GLOBAL_SEGMENTSIZE", "; did you mean MOONCAKE_GLOBAL_SEGMENT_SIZE?"),
        (
            "SGLANG_DISAGGREGATION_BOOTSTRAP_TIME_OUT",
            "; did you mean SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT?",
        ),
        ("SGLANG_WHATEVER", ""),
    ],
)
def test_unknown_variables_are_named(monkeypatch: pytest.MonkeyPatch, name: str, hint: str) -> None:
    assert warned_of(monkeypatch, name, "MOONCAKE_MASTER") == [f"{name}: no such variable{hint}"]


def test_variables_of_sglang_are_named_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = warned_of(
        monkeypatch,
        "SGLANG_ENABLE_SPEC_V2",
        "SGLANG_SET_CPU_AFFINITY",
        "SGLANG_DISAGGREGATION_QUEUE_SIZE",
        "SGLANG_MORI_QP_PER_TRANSFER",
        "SGLANG_DISAGGREGATION_NIXL_BACKEND",
        "SGLANG_DSA_FUSE_TOPK",
        "SGLANG_HUGEPAGE_SIZE",
        "MOONCAKE_OFFLOAD_FSDIR",  # Mooncake's own.
        "MOONCAKE_BUCKET_EVICTION_POLICY",
        "SGLANG_API_KEY",
    )
    assert lines == [
        "no effect here: SGLANG_DISAGGREGATION_NIXL_BACKEND, SGLANG_DISAGGREGATION_QUEUE_SIZE, "
        "SGLANG_DSA_FUSE_TOPK, SGLANG_ENABLE_SPEC_V2, SGLANG_HUGEPAGE_SIZE, "
        "SGLANG_MORI_QP_PER_TRANSFER, SGLANG_SET_CPU_AFFINITY, which SGLang has and this engine "
        "does not"
    ]
    ours = [name.removeprefix("SGLANG_") for name in Envs.fields() if name.startswith("SGLANG_")]
    assert not [n for n in ours if any(fnmatchcase(n, p) for p in SGLANG_VARIABLES)]


def test_a_start_warns_of_them(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MOONCAKE_PROTOCL", "tcp")
    with pytest.raises(ValueError, match="no such model"):
        check_start(ServerArgs(model_path="no such model").resolve())
    assert "did you mean MOONCAKE_PROTOCOL?" in caplog.text


def test_export_default_yields_to_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    retries = envs.MC_STORE_CLIENT_SETUP_RETRIES
    monkeypatch.delenv(retries.name, raising=False)
    with retries.override(0):  # restores what was there, whatever happens inside
        retries.clear()
        retries.export_default()
        assert child_environment()[retries.name] == "1"
        retries.set(7)
        retries.export_default()
        assert retries.get() == 7


def test_every_variable_is_described_and_its_default_parses() -> None:
    fields = Envs.fields()
    assert len(fields) >= 15
    for name, field in fields.items():
        assert field.name == name
        assert len(field.doc) > 10
        assert field.parse(field.render(field.default)) == field.default


@given(st.integers(min_value=0, max_value=1 << 50))
def test_sizes_survive_a_round_trip(size: int) -> None:
    field = envs.MOONCAKE_LOCAL_BUFFER_SIZE
    assert field.parse(field.render(size)) == size
