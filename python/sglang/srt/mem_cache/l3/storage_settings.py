"""The part of the L3 extra config that the engine itself reads; backends read the rest."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from sglang.srt.mem_cache.storage.types import PrefetchTimeoutConfig


class OnUnreachable(StrEnum):
    """Reaction of a starting server to a store that it cannot reach."""

    EXIT = "exit"
    WAIT = "wait"
    """Retry for up to five minutes."""
    DEGRADE = "degrade"
    """Run without L3 until the store answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageSettings:
    """Thresholds and bounds of L3 reads, and the heads in an object."""

    prefetch_threshold: int = 256
    """Tokens. Shorter hits are computed instead."""
    timeout: PrefetchTimeoutConfig = field(default_factory=PrefetchTimeoutConfig)
    on_unreachable: OnUnreachable = OnUnreachable.EXIT
    pass_prefix_keys: bool = False
    tp_lcm_size: int | None = None
    """An object holds the heads that one of this many ranks would have, so that servers of other
    sizes find it; None: the heads of one rank of this server."""

    @classmethod
    def from_extra_config(cls, config: Mapping[str, Any]) -> StorageSettings:
        """Read the engine's keys; others are the backend's.

        Raises:
            ValueError: Names the key and what it takes.
        """
        defaults = PrefetchTimeoutConfig()
        word = config.get("on_unreachable", OnUnreachable.EXIT.value)
        try:
            on_unreachable = OnUnreachable(word)
        except ValueError:
            words = ", ".join(choice.value for choice in OnUnreachable)
            raise ValueError(f"extra config on_unreachable: {word!r} is none of {words}") from None
        pass_prefix_keys = config.get("hicache_storage_pass_prefix_keys", False)
        if not isinstance(pass_prefix_keys, bool):
            raise ValueError(
                "extra config hicache_storage_pass_prefix_keys: true or false, "
                f"not {pass_prefix_keys!r}"
            )
        return cls(
            prefetch_threshold=int(_number(config, "prefetch_threshold", 256)),
            timeout=PrefetchTimeoutConfig(
                base=_number(config, "prefetch_timeout_base", defaults.base),
                per_ki_token=_number(
                    config, "prefetch_timeout_per_ki_token", defaults.per_ki_token
                ),
                max=_number(config, "prefetch_timeout_max", defaults.max),
            ),
            on_unreachable=on_unreachable,
            pass_prefix_keys=pass_prefix_keys,
            tp_lcm_size=_tp_lcm_size(config),
        )

    def threshold_pages(self, page_size: int) -> int:
        """Shortest hit that is read, in pages; at least one."""
        return max(1, math.ceil(self.prefetch_threshold / page_size))


def _tp_lcm_size(config: Mapping[str, Any]) -> int | None:
    value = config.get("tp_lcm_size")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(
            f"extra config tp_lcm_size: a number of ranks, not {value!r}; give a common multiple "
            "of the sizes of all servers that share the store"
        )
    return value


def _number(config: Mapping[str, Any], name: str, default: float) -> float:
    value = config.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"extra config {name}: a number, not {value!r}")
    if not math.isfinite(value) or value < 0:
        raise ValueError(f"extra config {name}: 0 or more, not {value!r}")
    return value
