"""Digests of a running server's weights, which show that another server has the same."""

from __future__ import annotations

from typing import Any

from sglang.srt.arg_groups.remote_weights import SEED_PATH
from sglang.srt.utils.network import wait_until
from sglang.test.servers.engine_server import EngineServer


def weight_digest(server: EngineServer, timeout_s: float = 60.0) -> Any:
    """Identity and checksums of the weights of rank 0, which it computes when it is first asked.

    Raises:
        AssertionError: They are not there after `timeout_s`.
    """
    told: list[Any] = []

    def has_digest() -> bool:
        told.append(server.request("GET", f"{SEED_PATH}?rank=0").body["weights"]["digest"])
        return told[-1] is not None

    assert wait_until(has_digest, timeout_s), "the weights were not hashed in time"
    return told[-1]
