"""Recorded traces: what they have, what they do not, their bounds, and who reads them."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any, Final

import httpx
import numpy as np
import pytest

from rigs.servers.fake_engine import front_server
from sglang.benchmark.workload import read_trace
from sglang.srt.constants import TRACE_BLOCK_TOKENS
from sglang.srt.mem_cache.tree.radix_key import TokenArray, token_array
from sglang.srt.observability import trace_recorder
from sglang.srt.observability.trace_recorder import TraceRecorder
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.network import wait_until
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="base-a-test-cpu")

SECRET: Final = "the password is swordfish"


def prompt(seed: int, length: int) -> TokenArray:
    return token_array(np.random.default_rng(seed).integers(0, 30_000, length).tolist())


def test_equal_prefixes_have_equal_ids_and_others_have_not(tmp_path: Path) -> None:
    one, two = (TraceRecorder(str(tmp_path / name), 1.0, 1) for name in ("a", "b"))
    ids = prompt(1, 3 * TRACE_BLOCK_TOKENS + 7)
    found = one.blocks(ids, None)
    assert found is not None and len(found) == 4
    longer = token_array([*ids[: 2 * TRACE_BLOCK_TOKENS].tolist(), *prompt(2, 600).tolist()])
    other = one.blocks(longer, None)
    assert other is not None
    assert (other[:2], other[2] != found[2]) == (found[:2], True)
    moved = one.blocks(token_array([5, *ids[1:].tolist()]), None)
    assert moved is not None and not set(moved) & set(found), "ids stand for all tokens before"
    keyed = one.blocks(ids, "tenant")
    assert keyed is not None and not set(keyed) & set(found)
    guessed = two.blocks(ids, None)
    assert guessed is not None and not set(guessed) & set(found), "each server has a key"
    assert all(0 <= number < 2**52 for number in found)
    for recorder in (one, two):
        recorder.close()


def test_a_share_has_whole_families_of_prompts(tmp_path: Path) -> None:
    recorder = TraceRecorder(str(tmp_path / "trace"), 0.25, 1)
    families = [prompt(seed, TRACE_BLOCK_TOKENS).tolist() for seed in range(400)]
    taken = []
    for begin in families:
        members = [
            recorder.blocks(token_array([*begin, *prompt(seed, 50).tolist()]), None) is not None
            for seed in range(3)
        ]
        assert len(set(members)) == 1, "all of a family, or none"
        taken.append(members[0])
    assert 60 < sum(taken) < 140
    recorder.close()


def test_the_file_has_its_bound_and_belongs_to_its_owner_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    path = tmp_path / "trace"
    recorder = TraceRecorder(str(path), 1.0, 1)
    blocks = [2**51] * 2000
    for _ in range(200):
        recorder.record(time.monotonic(), 2000 * TRACE_BLOCK_TOKENS, 1, blocks)
        time.sleep(0)
    assert wait_until(lambda: recorder._has_ended, 30)
    assert 900_000 < path.stat().st_size <= 1 << 20
    assert "the file has its 1 MiB, and ends" in caplog.text
    assert path.stat().st_mode & 0o777 == 0o600
    recorder.record(time.monotonic(), 1, 1, [1])
    assert recorder.blocks(prompt(1, 5), None) is None, "nothing is hashed for nothing"
    assert all(len(one.hash_ids) == 2000 for one in read_trace(path))
    recorder.close()


@pytest.mark.parametrize(("share", "more"), [(1.0, {}), (0.25, {"share": 0.25})])
def test_a_line_has_milliseconds_and_the_share(
    tmp_path: Path, share: float, more: dict[str, float]
) -> None:
    path = tmp_path / "trace"
    recorder = TraceRecorder(str(path), share, 1)
    recorder.record(recorder._begin + 1.25, 700, 9, [5, 6])
    recorder.close()
    assert json.loads(path.read_text()) == {
        "timestamp": 1250, "input_length": 700, "output_length": 9, "hash_ids": [5, 6], **more,
    }  # fmt: skip


def test_a_slow_disk_loses_lines_and_a_failing_one_ends_the_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("sglang.srt.observability.trace_recorder.os.write", fail)
    recorder = TraceRecorder(str(tmp_path / "trace"), 1.0, 1)
    recorder.record(time.monotonic(), 5, 1, [1])
    assert wait_until(lambda: recorder._has_ended, 30)
    assert "--record-trace ends: No space left on device" in caplog.text
    recorder._has_ended = False
    for _ in range(trace_recorder._MOST_WAITING + 5):
        recorder.record(time.monotonic(), 5, 1, [1])
    assert "the disk is too slow" in caplog.text
    recorder.close()


def test_files_and_flags_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "there"
    path.touch()
    with pytest.raises(ValueError, match=r"--record-trace .*there: the file exists"):
        TraceRecorder(str(path), 1.0, 1)
    with pytest.raises(ValueError, match=r"--record-trace .*: No such file or directory"):
        TraceRecorder(str(tmp_path / "no" / "folder"), 1.0, 1)
    for fields, words in (
        ({"record_trace": "x", "record_trace_share": 0.0}, "--record-trace-share 0.0: must be"),
        ({"record_trace": "x", "record_trace_mb": 0}, "--record-trace-mb 0: must be from 1"),
        ({"record_trace_mb": 5}, "--record-trace-mb 5 has no effect without --record-trace"),
    ):
        with pytest.raises(ValueError, match=words):
            ServerArgs(model_path="dummy", **fields).resolve()


def test_a_server_records_all_endpoints_and_no_text(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    long = SECRET * 4
    with (
        front_server(record_trace=str(path)) as server,
        httpx.Client(base_url=server.url, timeout=20) as client,
    ):
        chat = {"messages": [{"role": "user", "content": long}], "max_tokens": 2}
        for endpoint, body in (
            ("/generate", {"text": long, "sampling_params": {"max_new_tokens": 3}}),
            ("/generate", {"text": long, "sampling_params": {"max_new_tokens": 3, "n": 2}}),
            ("/v1/completions", {"prompt": long, "max_tokens": 2, "cache_salt": SECRET}),
            ("/v1/chat/completions", chat),
            ("/v1/messages", chat),
            ("/v1/responses", {"input": long, "max_output_tokens": 2}),
        ):
            assert client.post(endpoint, json=body).status_code == 200
        client.get("/health_generate")
    lines = path.read_text()
    assert "swordfish" not in lines
    assert all(
        line.keys() == {"timestamp", "input_length", "output_length", "hash_ids"}
        for line in map(json.loads, lines.splitlines())
    )
    trace = read_trace(path)
    assert len(trace) == 6, "samples of a prompt are one request, and a probe is none"
    plain = [one for one in trace if one.hash_ids == trace[0].hash_ids]
    assert len(plain) == 2, "a salt and a template make other prompts"
    assert {one.output_length for one in trace} == {2, 3}
    assert os.stat(path).st_size == len(lines)
