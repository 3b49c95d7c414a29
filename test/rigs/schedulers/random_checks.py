"""Invariants of the random driver: of the outputs of requests, and of the tiers at rest."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator

from rigs.caches.storage_rigs import counts as counter_values
from rigs.schedulers import checkable_model
from rigs.schedulers.checkable_worker import CheckableRig, CheckableWorker
from rigs.schedulers.random_requests import Sent
from rigs.schedulers.scheduler_rig import Collected, SchedulerRig
from rigs.stores.object_store import IN_PLACE, ObjectStore
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.hiradix_cache import HiRadixCache
from sglang.srt.mem_cache.l3.attached_store import AttachedStore
from sglang.srt.mem_cache.radix_cache import RadixCache


def assert_words(sent: Sent, got: Collected) -> None:
    """Assert that the words so far are those that the prompt must give."""
    said = got.output_ids
    if said != sent.words[: len(said)]:
        at = next(i for i, word in enumerate(said) if sent.words[i : i + 1] != [word])
        raise AssertionError(
            f"{sent.message.rid}: word {at} is {said[at]} and not {sent.words[at : at + 1]}, after "
            f"a prompt of {len(sent.prompt)} tokens; {got.last}"
        )


def assert_whole(sent: Sent, got: Collected) -> None:
    """Assert that a request that ended without an abort gave all its words."""
    last, rid = got.last, sent.message.rid
    assert last is not None and last.finish_reason is not None
    assert not sent.is_refused, f"{rid} is too long and ran"
    assert got.output_ids == sent.words, f"{rid} ended after {len(got.output_ids)} words"
    expected = "stop" if sent.stops else "length"
    assert last.finish_reason.type == expected, f"{rid} ended by {last.finish_reason}"
    details = last.cached_tokens_details
    assert details.total < len(sent.prompt), f"{rid}: {details}"
    assert_input_logprobs(sent, got)
    assert_output_logprobs(sent, got)


def assert_output_logprobs(sent: Sent, got: Collected) -> None:
    """Assert that a request has the log probabilities of its output that it asked for."""
    message = sent.message
    if message.return_logprob:
        wanted = checkable_model.output_logprobs(sent.prompt, message.seed, got.output_ids)
        assert got.logprobs == wanted, f"{message.rid}: wrong logprobs of its output"
    if message.top_logprobs_num:
        tops = checkable_model.output_top_logprobs(
            sent.prompt, message.seed, got.output_ids, message.top_logprobs_num
        )
        found = [list(map(tuple, one)) for one in got.top_logprobs]
        assert found == tops, f"{message.rid}: wrong top logprobs of its output"


def assert_input_logprobs(sent: Sent, got: Collected) -> None:
    """Assert that a request that ended has the log probabilities of its prompt that it asked
    for."""
    message = sent.message
    if message.logprob_start_len >= 0:
        start = message.logprob_start_len
        wanted = checkable_model.input_logprobs(sent.prompt, message.seed, start)
        assert got.input_logprobs == wanted, f"{message.rid}: wrong logprobs of its prompt"


def num_forwards(rig: SchedulerRig) -> int:
    """Steps of a scheduler whose results it knows."""
    counters = rig.scheduler.state.counters
    return counters.prefill_batches + counters.decode_steps


@contextlib.contextmanager
def resting_in_pauses(rig: SchedulerRig) -> Iterator[None]:
    """Assert that a tick within a pause, which the block runs, has no step."""
    control, state = rig.scheduler._control, rig.scheduler.state
    was_paused, before = control.is_paused, num_forwards(rig)
    yield
    if was_paused and control.is_paused:
        assert num_forwards(rig) == before and state.in_flight is None, "a step in a pause"


def assert_unpinned(tree: RadixCache) -> None:
    """Assert that at rest no node is pinned or locked."""
    for node in tree.nodes():
        assert not node.host_ref_counter, f"{node} is pinned though nothing is under way"
        assert not node.lock_ref, f"{node} is locked though nothing runs"


def assert_stored(tree: RadixCache, store: ObjectStore, backend: str, epoch_began: float) -> None:
    """Assert that L3 has, or has lost since, every object of the pages and host states that the
    tree counts as stored, and that this rank wrote no page before the earlier pages that it
    writes. Failed writes of other ranks are not known here. A page that was damaged in L2 before
    its write counts as written: readers find the damage.

    Args:
        store: The store; nothing is known of one that breaks its contract.
        backend: Name of the backend.
        epoch_began: A time, `time.monotonic()` seconds, before the tree began to use this L3.
    """
    attached = tree.store.attached if isinstance(tree, HiRadixCache) else None
    if attached is None or attached.client is None or store.breaks_contract:
        return
    storage = attached.client
    assert isinstance(tree, HiRadixCache) and storage.storage_config is not None
    namespace = tree.store.namespace().digest()
    pools = attached.pools
    for node in tree.nodes():
        pages = [f"{namespace}/{page}" for page in node.page_hashes(tree.page_size)]
        if node.storage_epoch == tree.store.epoch:
            for pool, shards in pools.shards.items():
                is_of_prefix = pool in (PoolName.MAMBA, PoolName.HIDDEN)
                if is_of_prefix and node.states[0].host_value is None:
                    continue
                for one in shards.objects:
                    keys = storage.object_keys(pages[-1:] if is_of_prefix else pages, one.pool)
                    missing = [key for key in keys if not store.has_had_since(key, epoch_began)]
                    assert not missing, f"{node} counts as stored, but L3 never had {missing[0]}"
        if backend == IN_PLACE:
            above = node.get_prefix_hash_values(tree.page_size)
            pages = [*(f"{namespace}/{page}" for page in above), *pages]
            keys = storage.object_keys(_written_here(attached, pages), PoolName.KV)
            writes = list(map(store.first_write, keys))
            assert writes == sorted(writes), f"{node} was written before a page above it"


def _written_here(attached: AttachedStore, pages: list[str]) -> list[str]:
    """The `pages`, with their namespace, whose keys and values this rank writes."""
    shards = attached.pools.shards.get(PoolName.KV)
    if shards is None:
        return pages
    name = shards.objects[0].name
    return [page for page in pages if shards.writes(f"{page}/{name}")]


def counts_of(rig: CheckableRig) -> Counter[str]:
    """What a scheduler and its cache did."""
    counts, counters = Counter[str](), rig.scheduler.state.counters
    worker = rig.worker
    assert isinstance(worker, CheckableWorker)
    counts["positions checked"] += worker.num_checked
    counts["prompts cached whole"] += worker.num_whole
    counts["steps from a state of the tree"] += worker.num_continued
    counts["retractions"] += counters.retractions
    counts["started again"] += counters.redone
    counts["wrong contexts"] += worker.num_wrong
    counts["drafts accepted"] += worker.num_accepted
    counts["drafts rejected"] += worker.num_rejected
    counts["verifications ahead"] += worker.num_ahead
    counts["prefill batches"] += counters.prefill_batches
    counts["decode steps"] += counters.decode_steps
    tree = rig.tree
    states = tree.state_metrics
    if states is not None:
        for metric, name in (
            (states.evicted, "states evicted from"),
            (states.snapshots, "snapshots of"),
        ):
            counts.update({f"{name} {what}": int(n) for what, n in counter_values(metric).items()})
    if isinstance(tree, HiRadixCache):
        for metric, name in (
            (tree.metrics.prefetch_outcomes, "read"),
            (tree.metrics.backup_outcomes, "write"),
            (tree.metrics.evicted, "evicted from"),
            (tree.metrics.dropped, "dropped"),
            (tree.metrics.checked_pages, "checked"),
            (tree.metrics.load_back, "loaded"),
        ):
            counts.update({f"{name} {what}": int(n) for what, n in counter_values(metric).items()})
    return counts


def assert_empty(rig: CheckableRig) -> None:
    """Assert that nothing has slots of L1 or of L2, or recurrent states."""
    pools, tree = rig.scheduler.state.pools, rig.tree
    assert pools.allocator.available_size() == pools.allocator.size
    states = pools.req_to_token_pool.mamba_pool
    assert states is None or states.available_size() == states.size
    if isinstance(tree, HiRadixCache):
        for entry in tree.cache_controller.mem_pool_host.entries.values():
            if entry.spec.indices_from_pool is None:
                assert entry.host_pool.available_size() == entry.host_pool.size, entry.name
