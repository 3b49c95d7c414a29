"""Completes the cache report of a request when it is scheduled: how L1 and L2 ended, and why."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from sglang.srt.messages.cache_key import split_extra_key
from sglang.srt.messages.cache_report import CacheReport, CutReason, Tier

if TYPE_CHECKING:
    from sglang.srt.mem_cache.radix_cache import RadixCache
    from sglang.srt.mem_cache.tree.prefix_tree import PrefixTree
    from sglang.srt.mem_cache.tree.radix_key import RadixKey

_MOST_PROMPTS: Final = 4096
"""First pages of other prompts that are compared, to find equal tokens under another key."""
_PROMPT_ENDS: Final = (CutReason.PARTIAL_PAGE, CutReason.LAST_TOKEN, CutReason.LOGPROBS)
"""Reasons by which no tier could have contributed more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixEnds:
    """The cached prefix of a request, as admission decided. Counts are tokens."""

    device: int
    """Tokens that L1 had."""
    host: int
    """Tokens after those that L2 had."""
    used: int
    """Tokens that the request uses of both."""
    cut: int
    """Tokens after the match that a tier has, and that no recurrent state continues."""
    no_load: str | None
    """Reason why less than L2 had is used."""


def complete_report(
    report: CacheReport, ends: PrefixEnds, tree: RadixCache, key: RadixKey, num_tokens: int
) -> None:
    """Note in `report` what L1 and L2 had and why they end.

    Args:
        report: Report that already has L3's part: the request waits for no read any more.
        key: Tokens that were looked up.
        num_tokens: Tokens of the prompt.
    """
    report.device, report.host = ends.device, ends.host
    matched = ends.device + ends.host
    reason, detail = _end_of_match(report, ends, tree, key, num_tokens)
    has_host = hasattr(tree.tree, "host")
    if ends.no_load is not None:
        report.cut(Tier.HOST, ends.used, ends.no_load)
    if ends.host:
        report.cut(Tier.DEVICE, ends.device, CutReason.NO_PAGE)
    if reason in _PROMPT_ENDS:
        # L3 cannot have more either, so its own reasons do not matter.
        report.cuts = [cut for cut in report.cuts if cut.tier is not Tier.STORAGE]
        report.cut(None, matched, reason)
        return
    if not ends.host:
        report.cut(Tier.DEVICE, matched, reason, detail)
    if has_host:
        report.cut(Tier.HOST, matched, reason, detail)
    is_short = report.storage is not None and all(cut.tier != Tier.STORAGE for cut in report.cuts)
    if is_short:
        # All that was awaited has landed, and has left L2 since, or its parents have.
        report.cut(Tier.STORAGE, matched, reason)


def _end_of_match(
    report: CacheReport, ends: PrefixEnds, tree: RadixCache, key: RadixKey, num_tokens: int
) -> tuple[CutReason, str | None]:
    """Reason why the tree gives no more of a prompt, and the difference of another namespace."""
    matched, page_size = ends.device + ends.host, tree.page_size
    if tree.disable:
        return CutReason.DISABLED, None
    if ends.cut >= page_size:
        return CutReason.NO_STATE, None
    usable = tree.tree.longest_match(len(key)) // page_size * page_size
    if matched >= usable:
        if len(key) < num_tokens:
            return CutReason.LOGPROBS, None
        is_whole = num_tokens % page_size == 0
        return (CutReason.LAST_TOKEN if is_whole else CutReason.PARTIAL_PAGE), None
    if matched < report.on_arrival + (report.storage or 0):
        gone = matched < report.on_arrival or _has_landed(report, matched)
        if gone:
            return CutReason.EVICTED, None
    if not matched and (detail := _other_key(tree.tree, key)) is not None:
        return CutReason.OTHER_NAMESPACE, detail
    return CutReason.NO_PAGE, None


def _has_landed(report: CacheReport, at: int) -> bool:
    """True if L3 has brought the page after token `at`."""
    ends = [cut.at for cut in report.cuts if cut.tier is Tier.STORAGE]
    return not ends or at < ends[0]


def _other_key(tree: PrefixTree, key: RadixKey) -> str | None:
    """Compare `key` with the key of a cached prompt that has the same first page. Returns the
    difference; None: there is no such prompt.

    Prompts with another `cache_salt` do not count: salts keep clients from learning what others
    have asked.
    """
    own = split_extra_key(key.extra_key)
    if own is None:
        return None
    _, first = key.child_key(tree.page_size)
    for other, page in itertools.islice(tree.root.children, _MOST_PROMPTS):
        if page != first or other == key.extra_key:
            continue
        theirs = split_extra_key(other)
        if theirs is not None and theirs.cache_salt == own.cache_salt:
            if own.extra_key is None:
                return "extra_key: this prompt has none, the cached one has one"
            has = "none" if theirs.extra_key is None else "another"
            return f"extra_key: the cached prompt has {has}"
    return None
