"""The result of one request, as seen by the client."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

TIERS = ("device", "host", "storage")


@dataclass(slots=True)
class RequestResult:
    """Times in seconds of the client's clock; lengths in tokens, as counted by the server."""

    error: str = ""
    """Empty if the request succeeded."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    ttft: float = 0.0
    """Seconds from sending the request to the first token."""
    latency: float = 0.0
    """Seconds from sending the request to the end of the stream."""
    itl: list[float] = field(default_factory=list)
    """Times between tokens. Tokens that arrive together share the time equally."""
    text: str = ""
    output_ids: list[int] = field(default_factory=list)
    """Empty if the endpoint does not report them."""
    cached_tokens: int = 0
    cached_details: dict[str, int] = field(default_factory=dict)
    """Cached tokens by tier; empty if the server does not report them."""

    @property
    def success(self) -> bool:
        return not self.error

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first; None with fewer than two tokens."""
        if self.completion_tokens < 2:
            return None
        return (self.latency - self.ttft) / (self.completion_tokens - 1)

    def note_cached(self, total: Any, details: Any) -> None:
        """Record the cached tokens that the server reported, unless they are malformed."""
        if isinstance(total, int):
            self.cached_tokens = total
        if isinstance(details, dict):
            self.cached_details = {
                tier: details[tier] for tier in TIERS if isinstance(details.get(tier), int)
            }
