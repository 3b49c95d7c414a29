"""The part of a trace that the engine reads from L3, by its own prefetch cost model.

The model compares two queues: one thread reads, one device computes. Here both follow the trace's
clock. Rates are known from the start, a read that computing would overtake brings nothing, and
decoding takes no time.
"""

from __future__ import annotations

from collections.abc import Sequence

from sglang.planning.hit_rates import StackDistances
from sglang.planning.tiers import ReadOrCompute
from sglang.srt.mem_cache.l3.prefetch_cost import PendingRead, is_rejected, slower_reads
from sglang.srt.mem_cache.tree.tick_sync import Rates


def tokens_read(
    distances: StackDistances,
    arrivals_s: Sequence[float],
    *,
    l2_tokens: float,
    l3_tokens: float,
    reads: ReadOrCompute,
    threshold: int,
    always: bool,
) -> int:
    """Tokens that the engine reads from L3 for all requests.

    Args:
        distances: Reuse distances of the trace.
        arrivals_s: Arrival of each request in seconds, ascending.
        l2_tokens: Size of L1 and L2 together.
        l3_tokens: Size of L3, which also has the pages of L1 and L2.
        threshold: Tokens; shorter hits are computed.
        always: True if every longer hit is read (`wait_complete`).
    """
    rates = Rates(reads=int(reads.read), prefills=int(reads.prefill))
    in_l2 = distances.hits(l2_tokens)
    in_l3 = distances.hits(l3_tokens) - in_l2
    total, reader_free_s, device_free_s = 0, 0.0, 0.0
    for now_s, length, known, stored in zip(
        arrivals_s, distances.lengths.tolist(), in_l2.tolist(), in_l3.tolist(), strict=True
    ):
        missing, hit = int(length - known), int(stored)
        ahead = int(max(0.0, reader_free_s - now_s) * reads.read)
        waiting = int(max(0.0, device_free_s - now_s) * reads.prefill)
        is_slower = (
            is_rejected(missing, rates, ahead=ahead, waiting=waiting)
            or slower_reads(
                [PendingRead(unread=hit, missing=hit, uncached=missing)],
                rates,
                ahead=ahead,
                waiting=waiting,
            )[0]
        )
        if hit >= threshold and (always or not is_slower):
            reader_free_s = max(reader_free_s, now_s) + hit / reads.read
            missing -= hit
            total += hit
        device_free_s = max(device_free_s, now_s) + missing / reads.prefill
    return total
