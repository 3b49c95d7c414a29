"""Use of the cache by tenants: requests, reused tokens, held bytes, and evictions by each of them.

A tenant is the part of a request's key that `cache_salt` gave, or else `extra_key`. Its label is a
keyed hash: without the key nobody can test guesses, and labels of servers with other keys cannot be
compared. At most 32 labels exist at a time. The table remembers the last 1,024 tenants without a
label. Once in ten seconds, at most, one of them takes the label of a tenant with far fewer recent
requests. Random salts therefore grow nothing, and real tenants get labels beside them.

Source of the decayed counts: forward decay, Cormode et al., ICDE 2009, here in its simple
exponential form.

Threads: the scheduler's only.
"""

from __future__ import annotations

import hashlib
import math
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Final, NamedTuple, Protocol

from prometheus_client import CollectorRegistry

from sglang.srt.mem_cache.tree.hicache_metrics import Decision, DecisionLog
from sglang.srt.messages.cache_key import tenant_of
from sglang.srt.utils.metrics import MetricFactory

NO_KEY: Final = "none"
"""Label of the requests without `cache_salt` and `extra_key`."""
OTHERS: Final = "other"
"""Label of all tenants without a label of their own."""
MAX_LABELS: Final = 32
_MAX_REMEMBERED: Final = 1024
_CHANGE_S: Final = 10.0
"""Seconds between two labels that pass to another tenant: each is a new series for Prometheus."""
_HALF_LIFE_S: Final = 600.0
_FAR_MORE: Final = 2.0
_SHOWN_VICTIMS: Final = 3
SOURCES: Final = ("device", "host", "storage", "computed")


class Evictor(NamedTuple):
    """The cause of an eviction: a request or a copy that needs room."""

    request: str | None
    """Id of the request; None: pages that are copied in the background."""
    key: str | None
    """The key of `combine_extra_key`."""


class HeldPages(Protocol):
    """The part of a `PoolTier` that is read and set here."""

    held: dict[str | None, int]
    victims: dict[str | None, int] | None


@dataclass(slots=True)
class _Recent:
    """Requests of late: each counts half after ten minutes."""

    weight: float = 0.0
    at: float = 0.0

    def weight_at(self, now: float) -> float:
        return self.weight * math.exp2((self.at - now) / _HALF_LIFE_S)

    def add(self, now: float) -> float:
        self.weight, self.at = self.weight_at(now) + 1.0, now
        return self.weight


@dataclass(slots=True)
class _Use:
    """Counts since the start; tokens, unless a name says otherwise."""

    label: str
    tenant: str | None = None
    requests: int = 0
    hits: int = 0
    """Requests that reused a token or more."""
    tokens: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SOURCES, 0))
    evicted_own: int = 0
    evicted_others: int = 0
    """Tokens of other tenants that its requests evicted."""
    lost: int = 0
    """Its tokens that requests of other tenants evicted."""
    recent: _Recent = field(default_factory=_Recent)

    def take_over(self, other: _Use) -> None:
        """Add the counts of `other`."""
        for name in ("requests", "hits", "evicted_own", "evicted_others", "lost"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for source, tokens in other.tokens.items():
            self.tokens[source] += tokens


class TenantMetrics:
    """Metrics of tenants, by label."""

    def __init__(self, registry: CollectorRegistry | None) -> None:
        make = MetricFactory(registry)
        self.requests = make.counter("tenant_requests", "Requests, by tenant", "tenant")
        self.hits = make.counter(
            "tenant_hits", "Requests that reused cached tokens, by tenant", "tenant"
        )
        self.tokens = make.counter(
            "tenant_prompt_tokens",
            "Prompt tokens by tenant and where they came from",
            "tenant",
            "source",
        )
        self.held = make.gauge(
            "tenant_held_bytes", "Bytes of a tenant's pages, by tier", "tenant", "tier"
        )
        self.evicted = make.counter(
            "tenant_evicted_tokens",
            "Tokens that a tenant's requests evicted, by whose they were: own or others",
            "tenant",
            "of",
        )

    def clear(self) -> None:
        """Forget all labels."""
        for one in (self.requests, self.hits, self.tokens, self.held, self.evicted):
            one.clear()


class TenantUse:
    """Counts the use of one cache by tenants.

    Args:
        key: Secret of the labels; None: a new one.
        bytes_per_token: Bytes of a token's pages of all pools on this rank.

    Attributes:
        decisions: Gets evictions; None: nobody wants them.
    """

    def __init__(
        self,
        registry: CollectorRegistry | None = None,
        key: bytes | None = None,
        bytes_per_token: Fraction | int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.decisions: DecisionLog | None = None
        self._key = secrets.token_bytes(32) if key is None else key
        self._bytes_per_token = bytes_per_token
        self._clock = clock
        self._tiers: dict[str, HeldPages] = {}
        self._others = _Use(OTHERS)
        self._labelled: dict[str | None, _Use] = {None: _Use(NO_KEY)}
        self._remembered: OrderedDict[bytes, _Recent] = OrderedDict()
        self._changed = clock() - _CHANGE_S
        self._metrics = TenantMetrics(registry)

    def add_tier(self, name: str, tier: HeldPages) -> None:
        """Count what tenants hold in `tier`, which has pages."""
        self._tiers[name] = tier

    def count(self, key: str | None, prompt_tokens: int, found: tuple[int, int, int]) -> None:
        """Count a prompt that was scheduled for the first time.

        Args:
            key: The key of `combine_extra_key`.
            found: Reused tokens from L1, L2 and L3.
        """
        use = self._use_of(None if key is None else tenant_of(key))
        use.requests += 1
        use.hits += any(found)
        by_source = zip(SOURCES, (*found, prompt_tokens - sum(found)), strict=True)
        for source, tokens in by_source:
            use.tokens[source] += tokens

    def evict(
        self,
        tier: HeldPages,
        what: Decision,
        why: str,
        by: Evictor | None,
        evict: Callable[[], int],
    ) -> int:
        """Run `evict`, which frees slots of the pages of `tier`, and note who evicted whose.

        Args:
            by: None: the tokens that running requests generate.

        Returns:
            The freed slots.
        """
        victims: dict[str | None, int] = {}
        tier.victims = victims
        try:
            freed = evict()
        finally:
            tier.victims = None
        tenant = None if by is None else tenant_of(by.key)
        mine = None if by is None else self._known(tenant)
        if mine is not None:
            own = victims.get(tenant, 0)
            mine.evicted_own += own
            mine.evicted_others += sum(victims.values()) - own
        lost: dict[str, int] = {}
        for victim, tokens in victims.items():
            use = self._known(victim)
            lost[use.label] = lost.get(use.label, 0) + tokens
            if by is not None and victim != tenant:
                use.lost += tokens
        if self.decisions is not None:
            most = sorted(lost, key=lambda label: -lost[label])[:_SHOWN_VICTIMS]
            self.decisions.note(
                what,
                why,
                freed,
                request=None if by is None else by.request,
                tenant=None if mine is None else mine.label,
                of=tuple(sorted(most)),
            )
        return freed

    def latest(self) -> list[dict[str, Any]]:
        """The use by each label, most prompt tokens first. `held_tokens` and `held_bytes` are by
        tier; the rest counts since the start."""
        shown = []
        for use, held in self._with_held():
            shown.append(
                {
                    "tenant": use.label,
                    "requests": use.requests,
                    "hits": use.hits,
                    "tokens": dict(use.tokens),
                    "held_tokens": held,
                    "held_bytes": {name: self._bytes(count) for name, count in held.items()},
                    "evicted_others": use.evicted_others,
                    "lost": use.lost,
                }
            )
        return sorted(shown, key=lambda one: -sum(one["tokens"].values()))

    def read_metrics(self) -> None:
        """Set the metrics before they are read: series of labels that ended are gone then."""
        metrics = self._metrics
        metrics.clear()
        for use, held in self._with_held():
            label = use.label
            metrics.requests.labels(label).inc(use.requests)
            metrics.hits.labels(label).inc(use.hits)
            for source, tokens in use.tokens.items():
                metrics.tokens.labels(label, source).inc(tokens)
            for tier, tokens in held.items():
                metrics.held.labels(label, tier).set(self._bytes(tokens))
            metrics.evicted.labels(label, "own").inc(use.evicted_own)
            metrics.evicted.labels(label, "others").inc(use.evicted_others)

    def _bytes(self, tokens: int) -> int:
        return int(tokens * self._bytes_per_token)

    def _with_held(self) -> Iterator[tuple[_Use, Mapping[str, int]]]:
        """The use by each label, and the tokens that it holds by tier."""
        rest = {name: sum(tier.held.values()) for name, tier in self._tiers.items()}
        for tenant, use in self._labelled.items():
            held = {name: tier.held.get(tenant, 0) for name, tier in self._tiers.items()}
            for name, tokens in held.items():
                rest[name] -= tokens
            yield use, held
        if self._others.requests or any(rest.values()):
            yield self._others, rest

    def _known(self, tenant: str | None) -> _Use:
        return self._labelled.get(tenant, self._others)

    def _use_of(self, tenant: str | None) -> _Use:
        """Where a request of `tenant` counts. It may get a label by this request."""
        now = self._clock()
        use = self._labelled.get(tenant)
        if use is None and tenant is not None:
            use = self._admit(tenant, now)
        if use is None:
            return self._others
        use.recent.add(now)
        return use

    def _admit(self, tenant: str, now: float) -> _Use | None:
        """The counts of a tenant that gets a label; None: it gets none now."""
        digest = hashlib.blake2b(
            tenant.encode(errors="surrogatepass"), key=self._key, digest_size=6
        ).digest()
        if len(self._labelled) >= MAX_LABELS - 1:
            recent = self._remembered.setdefault(digest, _Recent())
            weight = recent.add(now)
            self._remembered.move_to_end(digest)
            if len(self._remembered) > _MAX_REMEMBERED:
                self._remembered.popitem(last=False)
            if now - self._changed < _CHANGE_S or not self._drop_one(weight, now):
                return None
            del self._remembered[digest]
            self._changed = now
            made = _Use(digest.hex(), tenant, recent=_Recent(weight - 1.0, now))
        else:
            made = _Use(digest.hex(), tenant)
        self._labelled[tenant] = made
        return made

    def _drop_one(self, weight: float, now: float) -> bool:
        """Take the label of the tenant with the fewest requests of late, if `weight` are far more.
        Its counts go to the others'."""
        keyed = [use for tenant, use in self._labelled.items() if tenant is not None]
        least = min(keyed, key=lambda use: use.recent.weight_at(now))
        if weight <= _FAR_MORE * least.recent.weight_at(now):
            return False
        self._others.take_over(least)
        del self._labelled[least.tenant]
        return True
