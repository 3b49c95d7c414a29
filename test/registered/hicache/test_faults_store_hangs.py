"""Row C7 with several store nodes: the pages of L2 that reads hold while one node hangs.

The store still answers queries, because its master lives. A get of a page on the hanging node
returns after a minute or more.
"""

from __future__ import annotations

import time

from rigs.caches.cache_rig import Reused
from rigs.caches.storage_rigs import PAGE, StorageRigs, attached_store_of, counts
from rigs.stores.mooncake_cluster import MooncakeCluster
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=4, suite="base-b-test-cpu")

L2_PAGES = 256
PROMPTS = [[*range(1000 * number, 1000 * number + 40 * PAGE), 7] for number in range(5)]
TIMEOUT_S = 1.0
EPSILON_S = 20.0
"""Slack for a busy machine; less than a get from a hanging node takes."""


def test_c7_reads_given_up_while_a_node_hangs_leave_l2_to_others() -> None:
    times = {"prefetch_timeout_base": TIMEOUT_S, "prefetch_timeout_per_ki_token": 0.0}
    with (
        MooncakeCluster(num_nodes=3, segment_size="32mb") as cluster,
        StorageRigs.on(cluster, **times) as rigs,
    ):
        writer = rigs.make(l1_pages=L2_PAGES)
        for prompt in PROMPTS:
            writer.run(prompt)
        writer.settle()
        reader = rigs.make(
            l1_pages=L2_PAGES, hicache_ratio=1.0, hicache_storage_prefetch_policy="timeout"
        )
        # Opens sessions with all nodes; for a hanging node that would take a minute for each key.
        assert reader.run(PROMPTS[0]) == Reused(storage=40 * PAGE)
        reader.flush()
        cluster.nodes[0].suspend()
        try:
            waiting = {f"r{number}": prompt for number, prompt in enumerate(PROMPTS[1:])}
            began = time.monotonic()
            for rid, prompt in waiting.items():
                reader.arrive(rid, prompt)
            assert reader.hi.storage_prefetch.table.room(0) == -(L2_PAGES // 2 * PAGE)
            hangs = reader.hi.storage_prefetch.table.operations[0]
            reader.until(lambda: hangs.handed_pages > hangs.landed_pages)
            for rid, prompt in waiting.items():
                reader.until(lambda rid=rid: reader.hi.check_prefetch_progress(rid))  # type: ignore[misc]
                request, _ = reader.admit(rid, prompt)
                reader.finish(request)
            assert time.monotonic() - began < TIMEOUT_S + EPSILON_S
            reader.tick()
            stuck = reader.hi.storage_prefetch.table.stuck_tokens()
            assert 0 < stuck <= L2_PAGES // 8 * PAGE, "only the pages of the call under way"
            assert hangs.outcome is None
            reader.hi.check_integrity()

            reader.until(lambda: not attached_store_of(reader).available)
            reader.tick()
            reader.arrive("refused", PROMPTS[0])
            assert reader.hi.check_prefetch_progress("refused")
            assert counts(reader.hi.metrics.prefetch_outcomes)["unavailable"] == 1
            reader.hi.read_metrics()
            assert reader.hi.metrics.host_stuck._value.get() == stuck

            # All other pages of L2 are available to other requests.
            large = range(50_000, 50_000 + (L2_PAGES - L2_PAGES // 8) * PAGE)
            reader.run(large)
            reader.until(lambda: "writes" not in reader.hi.is_busy())
            assert sum(len(n.key) for n in reader.hi.nodes() if n.backuped) == len(large)
        finally:
            cluster.nodes[0].resume()
        reader.settle()
        assert hangs.outcome is not None
        reader.flush()
        assert reader.hi.host_pool.available_size() == reader.hi.host_pool.size
        assert reader.hi.storage_prefetch.table.stuck_tokens() == 0
