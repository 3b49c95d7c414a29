"""Which settings the runs have: few configurations in which each pair of settings occurs."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

LATENT: Final = ("deepseek_v3", "glm_moe_dsa", "kimi_linear")
STATES: Final = ("deepseek_v4", "glm5_next", "gpt_oss", "kimi_linear", "qwen3_next")
GROUPED: Final = ("deepseek_v4", "glm5_next")
DRAFTING: Final = ("deepseek_v3", "glm_moe_dsa", "qwen3_next")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """The settings of a run."""

    family: str
    """A family of `tiny_models.py`."""
    kv_cache_dtype: str
    num_drafts: int
    max_requests: int
    tiers: int
    is_buffer: bool
    """True if L2 is a buffer before L3."""
    damages_l2: bool
    """True if pages of L2 change their bytes now and then."""
    is_small: bool
    """True if L1 has too few slots for the requests that run."""
    overlap: bool
    page_size: int
    chunk_tokens: int
    eviction: str

    @property
    def is_possible(self) -> bool:
        """False if the engine refuses it, or if there is nothing to damage."""
        if self.num_drafts and self.family not in DRAFTING:
            return False
        if self.kv_cache_dtype != "auto" and self.family not in LATENT:
            return False  # A CPU keeps keys and values of heads as the model computes them.
        if self.is_buffer and self.tiers < 3:
            return False
        return not self.damages_l2 or self.tiers > 1

    def pairs(self) -> Iterator[frozenset[tuple[str, Any]]]:
        """Each two of the settings. L3 behind a cache and L3 behind a buffer count as two values of
        one setting. Models with groups of tokens meet the former with a large L1 too: few states
        leave a small one apart from their pages."""
        settings = dataclasses.asdict(self)
        settings["tiers"] = (self.tiers, settings.pop("is_buffer"))
        for two in itertools.combinations(settings.items(), 2):
            yield frozenset(two)
        if self.family in GROUPED and settings["tiers"] == (3, False):
            yield frozenset((name, settings[name]) for name in ("family", "tiers", "is_small"))


LEVELS: Final[dict[str, Sequence[Any]]] = {
    "family": (*DRAFTING, "kimi_linear", "nemotron_h", "gpt_oss", "deepseek_v4", "glm5_next"),
    "kv_cache_dtype": ("auto", "fp8_e4m3"),
    "num_drafts": (0, 3, 8),
    "max_requests": (8, 68),
    "tiers": (1, 2, 3),
    "is_buffer": (False, True),
    "damages_l2": (False, True),
    "is_small": (False, True),
    "overlap": (True, False),
    "page_size": (4, 16),
    "chunk_tokens": (-1, 32),
    "eviction": ("lru", "priority"),
}
"""Values of each field of `Mix`. The families are each kind of state once: latent rows, these with
indexer keys, recurrent states of delta nets, of Mamba-2 and, beside latent rows, of KDA;
windows with sinks; windows beside compressed rows; and KDA beside keys of groups of tokens."""


@cache
def all_mixes() -> tuple[Mix, ...]:
    """Every possible configuration."""
    values = itertools.product(*LEVELS.values())
    mixes = (Mix(**dict(zip(LEVELS, one, strict=True))) for one in values)
    return tuple(mix for mix in mixes if mix.is_possible)


@cache
def covering_mixes() -> tuple[Mix, ...]:
    """Configurations in which each possible pair of settings occurs.

    Greedy: each has the most pairs that none before it has, which gives little more than the
    least number (Cohen et al., The AETG system, 1997). Equals are decided for the pairs that were
    chosen least: no setting has its first value wherever any would do.
    """
    number: dict[frozenset[tuple[str, Any]], int] = {}
    pairs_of = {
        mix: sum(1 << number.setdefault(pair, len(number)) for pair in mix.pairs())
        for mix in all_mixes()
    }
    missing = (1 << len(number)) - 1
    chosen: list[Mix] = []
    times: Counter[frozenset[tuple[str, Any]]] = Counter()
    while missing:
        new = {mix: (pairs & missing).bit_count() for mix, pairs in pairs_of.items()}
        most = max(new.values())
        equals = (mix for mix, count in new.items() if count == most)
        best = min(equals, key=lambda mix: sum(times[pair] for pair in mix.pairs()))
        times.update(best.pairs())
        missing &= ~pairs_of[best]
        chosen.append(best)
    return tuple(chosen)
