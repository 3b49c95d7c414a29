"""The report of a request on its cached prefix: which tier had how much, and why each one ended.

A request asks for it with `return_cache_report`. The code that decides notes its reason when it
decides; nothing is guessed afterwards. Reasons of L3 are words of `NoRead` and `CacheOutcome`,
reasons of a load from L2 are words of `NoLoad`, and all others are words of `CutReason`.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

import msgspec


class CutReason(StrEnum):
    """Reason of the prefix tree or the scheduler why a prompt's cached prefix ends."""

    NO_PAGE = "no_page"
    """The tier has no page there."""
    EVICTED = "evicted"
    """The tree had the page after the request's arrival, and lost it before it was scheduled."""
    NO_STATE = "no_state"
    """A tier has the pages, but no recurrent state continues them."""
    OTHER_NAMESPACE = "other_namespace"
    """Equal tokens are cached under another `extra_key`."""
    DISABLED = "disabled"
    """The server keeps no prefixes."""
    PARTIAL_PAGE = "partial_page"
    """The rest of the prompt is no whole page."""
    LAST_TOKEN = "last_token"
    """The whole prompt is cached; its last token is computed for the logits."""
    LOGPROBS = "logprobs"
    """The request asks for logprobs of the tokens after it."""


class Tier(StrEnum):
    DEVICE = "device"
    HOST = "host"
    STORAGE = "storage"


class CacheCut(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A place in a prompt where the contribution of a tier ended."""

    tier: Tier | None
    """The tier that contributed no more, or None if no tier could have contributed more."""
    at: int
    """Tokens of the prompt before the place."""
    reason: str
    detail: str | None = None
    """The difference, for `CutReason.OTHER_NAMESPACE`."""


class Span(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A stage of a traced request, in seconds of this machine's `time.monotonic()`."""

    name: str
    """`match`, `l3_read`, `load` or `prefill`."""
    begin: float
    end: float
    tokens: int = 0
    """Tokens that the stage found, moved or computed."""
    outcome: str | None = None
    """Why an L3 read brought no more; None: it brought all that was awaited."""


MAX_SPANS: Final = 128
"""Most spans of a report; later ones are left out."""


class CacheReport(msgspec.Struct, kw_only=True):
    """Tokens of a prompt that the tiers had. `CachedTokensDetails` counts the used ones. Counts are
    tokens."""

    on_arrival: int
    """Tokens that L1 and L2 had when the request arrived; its read from L3 began there."""
    device: int = 0
    """Tokens that L1 had when the request was scheduled."""
    host: int = 0
    """Tokens after those that L2 had then; pages that L3 brought meanwhile are among them."""
    storage: int | None = None
    """Tokens after `on_arrival` that L3 said it had; None: there is no L3."""
    cuts: list[CacheCut] = []
    """In order of `at`, from the upper tier down; at most one for each tier and one without."""

    spans: list[Span] | None = None
    """Stages, in order of their ends; None: the request is not traced."""

    def add_span(
        self, name: str, begin: float, end: float, tokens: int, outcome: str | None = None
    ) -> None:
        """Note a stage, if the request is traced."""
        if self.spans is not None and len(self.spans) < MAX_SPANS:
            span = Span(name=name, begin=begin, end=end, tokens=tokens, outcome=outcome)
            self.spans.append(span)

    def cut(self, tier: Tier | None, at: int, reason: str, detail: str | None = None) -> None:
        """Note the end of a tier. The first place counts."""
        others = [cut for cut in self.cuts if cut.tier != tier]
        known = [cut for cut in self.cuts if cut.tier == tier and cut.at <= at]
        new = CacheCut(tier=tier, at=at, reason=reason, detail=detail)
        self.cuts = sorted([*others, *(known or [new])], key=_place)


def _place(cut: CacheCut) -> tuple[int, int]:
    """Order of cuts in a report; at the same token from the upper tier down."""
    return cut.at, len(Tier) if cut.tier is None else list(Tier).index(cut.tier)
