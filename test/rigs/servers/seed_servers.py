"""Servers whose weights others read: the readers' flags, and digests that show equal bits."""

from __future__ import annotations

from typing import Any

from rigs.servers.engine_server import EngineServer
from sglang.embedded_mooncake import LOOPBACK
from sglang.srt.arg_groups.remote_weights import SEED_PATH
from sglang.srt.utils.network import wait_until


def remote_flags(seed: EngineServer) -> tuple[str, ...]:
    """Flags of a server on the same host that reads the weights of a seed."""
    return (
        "--load-format", "remote_instance",
        "--remote-instance-weight-loader-seed-instance-ip", LOOPBACK,
        "--remote-instance-weight-loader-seed-instance-service-port", seed.url.rpartition(":")[2],
    )  # fmt: skip


def weight_digest(
    server: EngineServer, rank: int = 0, *, path: str = SEED_PATH, timeout_s: float = 60.0
) -> dict[str, Any]:
    """Identity and checksums of a rank's weights, which it computes when it is first asked.

    Raises:
        AssertionError: They are not there after `timeout_s`.
    """
    told: list[dict[str, Any]] = []

    def has_digest() -> bool:
        told.append(server.request("GET", f"{path}?rank={rank}").body["weights"]["digest"])
        return told[-1] is not None

    assert wait_until(has_digest, timeout_s), "the weights were not hashed in time"
    return told[-1]
