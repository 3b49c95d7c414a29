"""Backends that the operator's key may attach over HTTP: no files of the server, no code."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from rigs.servers.fake_engine import FrontServer, front_server
from sglang.srt.messages.io_struct import AttachHiCacheStorageReqInput
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=4, suite="base-a-test-cpu")

PATH = "/hicache/storage-backend"
EXTRA = "hicache_storage_backend_extra_config_json"
DYNAMIC = json.dumps({"backend_name": "b", "module_path": "m", "class_name": "C"})


def attach(server: FrontServer, backend: str, extra: str | None = None) -> httpx.Response:
    body: dict[str, Any] = {"hicache_storage_backend": backend}
    if extra is not None:
        body[EXTRA] = extra
    headers = {"Authorization": "Bearer admin"}
    return httpx.put(server.url + PATH, json=body, headers=headers, timeout=20)


def attached(server: FrontServer) -> list[str]:
    received = server.scheduler.received
    return [
        one.hicache_storage_backend
        for one in received
        if isinstance(one, AttachHiCacheStorageReqInput)
    ]


@pytest.fixture(scope="module")
def server() -> Iterator[FrontServer]:
    with front_server(admin_api_key="admin") as running:
        yield running


@pytest.mark.parametrize("text", ["@{}", " \n@{}"])
def test_a_file_of_the_server_is_not_read(server: FrontServer, tmp_path: Path, text: str) -> None:
    secret = tmp_path / "secret.yaml"
    secret.write_text("s3cret: [")
    pipe = tmp_path / "pipe.json"
    os.mkfifo(pipe)
    for path in (secret, pipe, tmp_path / "absent.json"):
        answer = attach(server, "file", text.format(path))
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["param"] == EXTRA
        assert "send the JSON itself" in error["message"]
        assert "s3cret" not in answer.text
    assert attached(server) == []


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a": ' + "[" * 5000, "{", "[]", "1", '{"a": 1'])
def test_what_is_no_object_is_refused_before_the_scheduler_sees_it(
    server: FrontServer, text: str
) -> None:
    answer = attach(server, "file", text)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(EXTRA)
    assert len(answer.text) < 1000
    assert attached(server) == []


def test_code_is_not_run_for_a_request(server: FrontServer) -> None:
    answer = attach(server, "dynamic", DYNAMIC)
    assert answer.status_code == 403
    assert "--hicache-allow-dynamic-attach" in answer.json()["error"]["message"]
    assert attach(server, "dynamic").status_code == 403
    assert attached(server) == []


def test_code_is_run_where_the_command_line_allows_it() -> None:
    flags: dict[str, Any] = {"enable_hierarchical_cache": True, "admin_api_key": "admin"}
    with front_server(hicache_allow_dynamic_attach=True, **flags) as server:
        assert attach(server, "dynamic", DYNAMIC).status_code == 200
        assert attached(server) == ["dynamic"]


def test_policies_of_the_dynamic_backend_of_the_command_line_can_be_changed() -> None:
    flags: dict[str, Any] = {
        "admin_api_key": "admin",
        "hicache_storage_backend": "dynamic",
        "hicache_storage_backend_extra_config": DYNAMIC,
    }
    with front_server(**flags) as server:
        assert attach(server, "dynamic").status_code == 200
        assert attach(server, "dynamic", DYNAMIC).status_code == 403
        assert attached(server) == ["dynamic"]
