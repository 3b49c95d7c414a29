"""How a decode server finds the ranks of a prefill server."""

from __future__ import annotations

from sglang.srt.disaggregation.common.remote_prompt import RoomFailed


def find_endpoint(host: str, port: int) -> str:
    """The control endpoint of the prefill server whose bootstrap server is at `host`:`port`."""
    raise RoomFailed(f"no bootstrap client yet: {host}:{port}")
