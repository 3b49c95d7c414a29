"""Warnings about servers and ports that other machines can reach."""

from __future__ import annotations

import logging

import pytest

from sglang.srt.utils.network import warn_of_open_server
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=1, suite="base-a-test-cpu")

logger = logging.getLogger(__name__)


@pytest.mark.parametrize(
    ("host", "has_key", "warns"),
    [
        ("127.0.0.1", False, False),
        ("127.8.0.1", False, False),
        ("::1", False, False),
        ("localhost", False, False),
        ("0.0.0.0", False, True),
        ("::", False, True),
        ("10.0.0.1", False, True),
        ("a-name", False, True),
        ("0.0.0.0", True, False),
    ],
)
def test_a_reachable_server_without_a_key_causes_a_warning(
    host: str, has_key: bool, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    warn_of_open_server(logger, host, has_key=has_key)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == warns
    assert all(f"--host {host} without an API key" in line for line in lines)
