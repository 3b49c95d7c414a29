"""Runs of cache rigs that are decided by a seed: machines of hypothesis, and stores with moods."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, Final

from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from rigs.caches.cache_rig import CacheRig
from rigs.caches.storage_rigs import StorageRigs
from rigs.schedulers.random_setup import impatient
from rigs.stores.object_store import STORE_KEY, ObjectStore
from sglang.srt.mem_cache.l2.host_backup import WRITE_POLICIES

_MOODS: Final = ("well", "quick", "slow", "failing", "refusing", "rotten", "forgetful", "full")
_PROMPTS: Final = 120


def run_machine(kind: type[RuleBasedStateMachine], max_examples: int, steps: int = 40) -> None:
    """Run `max_examples` sequences of at most `steps` rules of a machine. A failure prints its
    steps, and how to repeat them."""
    run_state_machine_as_test(
        kind,
        settings=settings(
            max_examples=max_examples,
            stateful_step_count=steps,
            deadline=None,
            print_blob=True,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        ),
    )


def end_at_any_point(rig: CacheRig, seed: int, *, steps: int) -> None:
    """Send prompts of four families, whose requests end while they are queued, read, loaded or
    computed."""
    rng = random.Random(seed)
    for step in range(steps):
        first = 1000 * rng.randrange(4)
        prompt = [*range(first, first + rng.randrange(4, 41)), 7]
        match rng.randrange(4):
            case 0:
                rig.arrive(f"queued {step}", prompt)
                rig.tree.release_aborted_request(f"queued {step}")
            case 1:
                rig.arrive(f"read {step}", prompt)
                for _ in range(rng.randrange(3)):
                    rig.tick()
                rig.tree.release_aborted_request(f"read {step}")
            case 2:
                request, _ = rig.start(prompt)
                rig.finish(request, is_insert=False)
            case _:
                rig.run(prompt)
        if rng.random() < 0.1:
            rig.flush()


def run_over_moods(
    kind: type[CacheRig], backend: str, seed: int, layouts: Sequence[str], **settings: Any
) -> None:
    """Send prompts of four families to two engines over one store, whose mood changes at each.

    The rigs check all that they reuse. Asserts that L3 was of use, and saw no contradiction.

    Args:
        kind: Rig of the engines.
        backend: Name of the store's backend, of `object_store`.
        layouts: Host layouts to choose from.
        settings: Further arguments of `StorageRigs.make`.
    """
    rng = random.Random(seed)
    with (
        ObjectStore(seed) as store,
        impatient(),
        StorageRigs(**{STORE_KEY: store.name, "prefetch_timeout_max": 2.0}) as rigs,
    ):
        pair = [
            rigs.make(
                backend,
                kind=kind,
                hicache_ratio=1.5,
                hicache_mem_layout=rng.choice(layouts),
                hicache_write_policy=rng.choice(WRITE_POLICIES),
                **settings,
            )
            for _ in range(2)
        ]
        reused = 0
        for _ in range(_PROMPTS):
            store.set_mood(rng.choice(_MOODS))
            first = 1000 * rng.randrange(4)
            prompt = [*range(first, first + rng.randrange(4, 41)), 7]
            reused += rng.choice(pair).run(prompt).storage
            if rng.random() < 0.1:
                store.rot(rng)
                rng.choice(pair).flush()
        store.set_mood("quick")
        store.release()
        for rig in pair:
            rig.settle()
        assert reused, "L3 was of no use"
        assert not store.contradictions
