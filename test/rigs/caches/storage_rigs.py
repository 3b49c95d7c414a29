"""Cache rigs that share one storage backend, for tests of a misbehaving store."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import pytest

from rigs.caches.cache_rig import CacheRig, HiCacheSettings, Reused
from rigs.stores.fake_mooncake import FakeMooncakes
from rigs.stores.mooncake_cluster import MooncakeCluster
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage
from sglang.srt.mem_cache.l3.attached_store import AttachedStore
from sglang.srt.mem_cache.storage.mooncake_store import mooncake_store
from sglang.srt.mem_cache.tree.radix_key import RadixKey
from sglang.srt.utils.metrics import Counter

PAGE: Final = 4
"""Tokens per page of the rigs made here."""


class StorageRigs:
    """Context manager that creates rigs with a common namespace, and closes them.

    Args:
        extra: Extra config of every rig.
    """

    def __init__(self, **extra: Any) -> None:
        self._extra = {"prefetch_threshold": PAGE, **extra}
        self._weights = f"weights-{time.monotonic_ns()}"
        self._rigs: list[CacheRig] = []

    @classmethod
    def on(cls, cluster: MooncakeCluster, **extra: Any) -> StorageRigs:
        """Rigs that are clients of `cluster`."""
        return cls(
            master_server_address=cluster.master.address,
            local_hostname="127.0.0.1",
            metadata_server="P2PHANDSHAKE",
            global_segment_size=0,
            protocol="tcp",
            **extra,
        )

    def __enter__(self) -> StorageRigs:
        return self

    def __exit__(self, *error: object) -> None:
        for rig in self._rigs:
            rig.close()

    def make(
        self,
        backend: str | type[HiCacheStorage] = "mooncake",
        *,
        l1_pages: int = 128,
        extra: Mapping[str, Any] | None = None,
        kind: Callable[..., CacheRig] = CacheRig,
        **settings: Any,
    ) -> CacheRig:
        """Create the tiers of one engine.

        Args:
            backend: Name of a backend, or a class of the test.
            l1_pages: Pages of L1.
            extra: Further extra config.
            kind: Class of the rig, or a function that makes one.
            settings: Fields of `HiCacheSettings`.
        """
        config = {**self._extra, **(extra or {})}
        if isinstance(backend, type):
            config |= {"backend_name": "faulty", "class_name": backend.__name__}
            config["module_path"] = backend.__module__
            backend = "dynamic"
        rig = kind(
            l1_pages=l1_pages,
            page_size=PAGE,
            weights_identity=self._weights,
            settings=HiCacheSettings(
                hicache_storage_backend=backend,
                hicache_storage_backend_extra_config=json.dumps(config),
                **settings,
            ),
        )
        self._rigs.append(rig)
        return rig


def object_file(root: Path, prompt: list[int], pool: str, page: int = -1) -> Path:
    """The file with an item of `pool`, of a page of `prompt`, in the file backend's `root`."""
    page_hash = RadixKey(prompt[: len(prompt) // PAGE * PAGE]).page_hashes(PAGE)[page]
    (found,) = root.glob(f"*/??/{page_hash}%2F{pool}")
    return found


def assert_without_one_none(
    rigs: StorageRigs,
    kind: Callable[..., CacheRig],
    root: Path,
    prompt: list[int],
    pool: str,
    trouble: str,
) -> None:
    """Assert that no page of a prompt is served while one of its objects is lost or damaged, and
    that the next request heals it.

    Args:
        kind: Class of a rig with several pools.
        root: Directory of the file backend.
        prompt: Whole pages and a token.
        pool: The pool that loses its last object.
        trouble: `lost` or `damaged`.
    """
    writer, reader, third = (rigs.make("file", kind=kind) for _ in range(3))
    writer.run(prompt)
    writer.settle()
    file = object_file(root, prompt, pool)
    raw = file.read_bytes()
    if trouble == "lost":
        file.unlink()
    else:
        file.write_bytes(bytes([raw[0] ^ 1]) + raw[1:])
    assert reader.run(prompt) == Reused()
    reader.settle()
    assert file.read_bytes() == raw
    assert third.run(prompt) == Reused(storage=len(prompt) - 1)
    third.settle()


def assert_one_question_for_all_prompts(
    patch: pytest.MonkeyPatch, kind: Callable[..., CacheRig], pool: str, objects: int
) -> None:
    """Assert that one call asks the store about two prompts of one tick, for all pools.

    Args:
        patch: Puts a fake in the place of the store.
        kind: Class of a rig with several kinds of state.
        pool: The kind beside the primary pool.
        objects: Number of its objects for the two prompts, of ten and of five pages.
    """
    fakes = FakeMooncakes(patch)
    patch.setattr(mooncake_store, "is_reachable", lambda config: True)
    with StorageRigs(master_server_address="127.0.0.1:1", protocol="tcp") as rigs:
        writer, reader = (rigs.make(kind=kind) for _ in range(2))
        prompts = {"a": [*range(40), 7], "b": [*range(500, 520), 7]}
        for prompt in prompts.values():
            writer.run(prompt)
        writer.settle()
        assert sum(key.endswith(f"/{pool}") for key in fakes[0].objects) == objects
        for rid, prompt in prompts.items():
            reader.arrive(rid, prompt)
        reader.until(lambda: all(reader.tree.check_prefetch_progress(rid) for rid in prompts))
        assert fakes[1].calls.count("batch_is_exist") == 1
        for rid, prompt in prompts.items():
            request, reused = reader.admit(rid, prompt)
            assert reused == Reused(storage=len(prompt) - 1)
            reader.finish(request)
        reader.settle()


def attached_store_of(rig: CacheRig) -> AttachedStore:
    """The threads of the rig's L3."""
    found = rig.hi.store.attached
    assert found is not None
    return found


def counts(counter: Counter) -> dict[str, float]:
    """The non-zero values of a counter, by the values of its labels."""
    return {
        "/".join(sample.labels.values()): sample.value
        for metric in counter.collect()
        for sample in metric.samples
        if sample.name.endswith("_total") and sample.value
    }
