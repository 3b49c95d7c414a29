"""What a client saw of one request."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

TIERS = ("device", "host", "storage")


@dataclass(slots=True)
class RequestResult:
    """Times in seconds by the client's clock; lengths in tokens, as the server counted them."""

    error: str = ""
    """Empty where the request succeeded."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    ttft: float = 0.0
    """From sending until the first token came."""
    latency: float = 0.0
    """From sending until the stream ended."""
    itl: list[float] = field(default_factory=list)
    """Between tokens; tokens that came together share the time equally."""
    text: str = ""
    output_ids: list[int] = field(default_factory=list)
    """Where the endpoint tells them."""
    cached_tokens: int = 0
    cached_details: dict[str, int] = field(default_factory=dict)
    """By tier; empty where the server does not tell."""

    @property
    def success(self) -> bool:
        return not self.error

    @property
    def tpot(self) -> float | None:
        """Seconds a token after the first; None with fewer than two tokens."""
        if self.completion_tokens < 2:
            return None
        return (self.latency - self.ttft) / (self.completion_tokens - 1)

    def note_cached(self, total: Any, details: Any) -> None:
        """Take over what the server said about cached tokens, as far as it is well formed."""
        if isinstance(total, int):
            self.cached_tokens = total
        if isinstance(details, dict):
            self.cached_details = {
                tier: details[tier] for tier in TIERS if isinstance(details.get(tier), int)
            }
