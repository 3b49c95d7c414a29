"""Changes of L3 at run time leave the cache working, even if a backend raises or hangs in them."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from rigs.caches.cache_rig import CacheRig, HiCacheSettings, Reused
from rigs.caches.memory_ranks import run_on_ranks
from rigs.caches.tier_rigs import wait_for
from sglang.srt.distributed.rank_group import RankGroup
from sglang.srt.environ import envs
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheFile,
    HiCacheStorageConfig,
    StorageUnavailable,
)
from sglang.srt.mem_cache.l3 import attached_store
from sglang.srt.mem_cache.l3.hicache_administration import (
    _MAX_LEFT_BEHIND,
    ChangeResult,
)
from sglang.srt.mem_cache.tree.tick_sync import Progress, Status
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=4, suite="base-a-test-cpu")

ANYTHING: tuple[BaseException, ...] = (
    ZeroDivisionError("division by zero"),
    SystemExit(3),
    KeyboardInterrupt("no"),
    OSError(5, "broken"),
    StorageUnavailable("nobody there"),
)
EXTRA = {"prefetch_threshold": 4}


class Erratic(HiCacheFile):
    """A file backend. A test chooses which of its calls raise or hang."""

    raises: ClassVar[dict[str, BaseException]] = {}
    hangs: ClassVar[dict[str, threading.Event]] = {}
    closed: ClassVar[list[HiCacheFile]] = []

    def __init__(self, storage_config: HiCacheStorageConfig) -> None:
        self.act("init")
        super().__init__(storage_config, envs.SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR.get())

    def clear(self) -> None:
        self.act("clear")
        super().clear()

    def close(self) -> None:
        self.act("close")
        self.closed.append(self)

    def act(self, call: str) -> None:
        if call in self.hangs:
            assert self.hangs[call].wait(30)
        if call in self.raises:
            raise self.raises[call]


ERRATIC = {
    **EXTRA,
    "backend_name": "erratic",
    "module_path": __name__,
    "class_name": "Erratic",
}


@pytest.fixture(autouse=True)
def storage_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    for name in ("raises", "hangs"):
        monkeypatch.setattr(Erratic, name, {})
    monkeypatch.setattr(Erratic, "closed", [])
    with envs.SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR.override(str(tmp_path / "l3")):
        yield tmp_path / "l3"
    for gate in Erratic.hangs.values():
        gate.set()


@pytest.fixture
def rig() -> Iterator[CacheRig]:
    """Two tiers; L3 is attached by the test."""
    made = CacheRig(l1_pages=8, settings=HiCacheSettings())
    yield made
    made.close()


def attach(rig: CacheRig, config: dict[str, Any] | str, backend: str = "dynamic") -> Any:
    text = config if isinstance(config, str) else json.dumps(config)
    return rig.hi.attach_storage_backend(backend, text)


def serves_from_storage(rig: CacheRig) -> bool:
    """Assert that new pages are written to L3, and read from there after a flush."""
    rig.run(range(500, 516))
    rig.flush()
    return rig.run(range(500, 517)) == Reused(storage=16)


# ---- attaching ---------------------------------------------------------------------------------


@pytest.mark.parametrize("raised", ANYTHING, ids=lambda raised: type(raised).__name__)
def test_a_constructor_that_raises_anything_leaves_things_as_they_were(
    rig: CacheRig, raised: BaseException
) -> None:
    Erratic.raises["init"] = raised
    done, why = attach(rig, ERRATIC)
    assert not done
    assert str(raised) in why and "\n" not in why
    assert rig.hi.storage_state()["hicache_storage_backend"] is None
    assert not rig.tree.is_busy()
    Erratic.raises.clear()
    assert attach(rig, ERRATIC) == (True, "attached dynamic")
    assert serves_from_storage(rig)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("def f(:\n", "SyntaxError"),
        ("import sys\nsys.exit(4)\n", "SystemExit: 4"),
        ("raise RuntimeError('two\\nlines')\n", "RuntimeError: two lines"),
        ("import no_such_module\n", "No module named 'no_such_module'"),
        ("class Other: ...\n", "has no attribute 'Backend'"),
        ("class Backend: ...\n", "is not a HiCacheStorage"),
    ],
)
def test_a_module_with_anything_in_it_is_refused_in_one_line(
    rig: CacheRig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, words: str
) -> None:
    name = f"backend_{abs(hash(source))}"
    (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    done, why = attach(rig, ERRATIC | {"module_path": name, "class_name": "Backend"})
    assert not done
    assert words in why and f"{name}.Backend" in why and "\n" not in why


def test_a_configuration_that_cannot_be_read_is_refused(rig: CacheRig, tmp_path: Path) -> None:
    fifo = tmp_path / "fifo.json"
    os.mkfifo(fifo)
    for text in ("[" * 60_000, "[" * 100_000, f"@{fifo}", "@/dev/zero", '{"a": 1e999}'):
        done, why = attach(rig, text)
        assert not done
        assert "--hicache-storage-backend-extra-config" in why
    assert not rig.tree.is_busy()


def test_an_attachment_that_was_given_up_is_closed_when_it_comes_after_all(rig: CacheRig) -> None:
    gate = Erratic.hangs["init"] = threading.Event()
    rig.hi.administration.begin_attaching("dynamic", json.dumps(ERRATIC), None, "write_back")
    rig.tick()
    assert rig.tree.is_busy() == {"administration": 1}
    assert not rig.hi.attach_storage_backend("file")[0]
    assert rig.run(range(16)) == Reused(), "requests run meanwhile"
    rig.until(lambda: rig.tree.is_busy() == {"administration": 1})
    rig.hi.administration.give_up("it has taken 100 s")
    assert rig.hi.administration.take_result() == (
        False,
        "the attaching of L3 was given up: it has taken 100 s",
    )
    assert rig.hi.host_backup.write_policy == "write_through"
    assert attach(rig, EXTRA, "file") == (True, "attached file"), "another one need not wait"
    gate.set()
    wait_for(lambda: Erratic.closed)
    assert rig.hi.storage_backend_name == "HiCacheFile"
    assert serves_from_storage(rig)


def test_attachments_that_hang_for_ever_are_bounded(rig: CacheRig) -> None:
    gate = Erratic.hangs["init"] = threading.Event()
    administration = rig.hi.administration
    for _ in range(_MAX_LEFT_BEHIND):
        administration.begin_attaching("dynamic", json.dumps(ERRATIC), None, None)
        administration.give_up("too long")
    done, why = attach(rig, EXTRA, "file")
    assert not done
    assert "4 changes of L3 that were given up still hang; restart" in why
    assert not rig.tree.is_busy()
    gate.set()
    wait_for(lambda: len(Erratic.closed) == _MAX_LEFT_BEHIND)
    wait_for(lambda: attach(rig, EXTRA, "file")[0])


def test_what_failed_on_one_rank_is_made_on_none(storage_dir: Path) -> None:
    """The rank on which it has succeeded lets go of it again."""

    def work(group: RankGroup) -> tuple[ChangeResult, Status]:
        rig = CacheRig(l1_pages=8, group=group, settings=HiCacheSettings())
        administration = rig.hi.administration
        try:
            config = ERRATIC if group.rank else {**ERRATIC, "prefetch_threshold": -1}
            administration.begin_attaching("dynamic", json.dumps(config), None, None)
            result = administration.wait(rig.tick)
            assert rig.hi.storage_state()["hicache_storage_backend"] is None
            progress = Progress()
            administration.report(progress)
            return result, progress.administration
        finally:
            rig.close()

    told = "rank 0 of 2: extra config prefetch_threshold: 0 or more, not -1"
    assert run_on_ranks(2, work) == [((False, told), Status.UNDER_WAY)] * 2
    wait_for(lambda: Erratic.closed)


# ---- clearing ----------------------------------------------------------------------------------


@pytest.mark.parametrize("raised", ANYTHING, ids=lambda raised: type(raised).__name__)
def test_a_clear_that_raises_anything_may_have_removed_pages(
    rig: CacheRig, storage_dir: Path, raised: BaseException
) -> None:
    assert attach(rig, ERRATIC)[0]
    rig.run(range(16))
    rig.settle()
    stored = list(storage_dir.glob("*/??/*"))
    stored[0].unlink()
    Erratic.raises["clear"] = raised
    done, why = rig.hi.clear_storage_backend()
    assert not done
    assert str(raised) in why
    rig.run(range(16))
    rig.settle()
    assert stored[0].exists(), "written again, as nothing is taken for stored any more"


def test_nothing_is_asked_of_a_store_while_it_is_cleared(rig: CacheRig, storage_dir: Path) -> None:
    assert attach(rig, ERRATIC)[0]
    rig.run(range(16))
    rig.settle()
    gate = Erratic.hangs["clear"] = threading.Event()
    rig.hi.administration.begin_clearing()
    assert rig.run(range(100, 116)) == Reused()
    rig.until(lambda: rig.tree.is_busy() == {"administration": 1})
    outcomes = rig.hi.metrics.prefetch_outcomes.labels("unavailable")
    assert outcomes._value.get() == 1
    assert len(list(storage_dir.glob("*/??/*"))) == 4
    gate.set()
    rig.until(lambda: not rig.tree.is_busy())
    assert rig.hi.administration.take_result() == (True, "cleared dynamic")
    assert not list(storage_dir.glob("*/??/*"))
    assert serves_from_storage(rig)


def test_a_clear_that_hangs_is_given_up_and_its_store_can_be_detached(
    rig: CacheRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert attach(rig, ERRATIC)[0]
    gate = Erratic.hangs["clear"] = threading.Event()
    rig.hi.administration.begin_clearing()
    rig.until(lambda: not rig.hi.store.answers)
    rig.hi.administration.give_up("it has taken 100 s")
    assert rig.hi.administration.take_result() is not None
    rig.run(range(16))
    rig.settle()
    assert rig.hi.storage_prefetch.table.operations == [] and not rig.hi.store.available, (
        "it is left alone"
    )
    done, text = rig.hi.detach_storage_backend()
    assert done
    assert text == "detached dynamic; its client could not be closed and is left behind"
    assert not Erratic.closed, "a client is not closed under a call"
    gate.set()
    assert attach(rig, EXTRA, "file")[0]
    assert serves_from_storage(rig)


def test_a_store_that_was_slow_to_clear_is_used_again_when_it_is_done(rig: CacheRig) -> None:
    assert attach(rig, ERRATIC)[0]
    gate = Erratic.hangs["clear"] = threading.Event()
    rig.hi.administration.begin_clearing()
    rig.until(lambda: not rig.hi.store.answers)
    rig.hi.administration.give_up("it has taken 100 s")
    assert rig.hi.administration.take_result() is not None
    gate.set()
    rig.until(lambda: rig.hi.store.available)
    assert serves_from_storage(rig)


# ---- detaching ---------------------------------------------------------------------------------


@pytest.mark.parametrize("raised", ANYTHING, ids=lambda raised: type(raised).__name__)
def test_a_close_that_raises_anything_is_a_detachment(rig: CacheRig, raised: BaseException) -> None:
    assert attach(rig, ERRATIC)[0]
    Erratic.raises["close"] = raised
    done, text = rig.hi.detach_storage_backend()
    assert done
    assert text == "detached dynamic; its client could not be closed and is left behind"
    assert attach(rig, EXTRA, "file")[0]
    assert serves_from_storage(rig)


def test_what_is_detached_is_not_shown_as_failing(rig: CacheRig) -> None:
    assert attach(rig, ERRATIC)[0]
    attached = rig.hi.store.attached
    assert attached is not None
    attached.breaker.trip()
    assert rig.hi.metrics.breaker_open._value.get() == 1
    assert rig.hi.detach_storage_backend()[0]
    assert rig.hi.metrics.breaker_open._value.get() == 0


def test_a_close_that_hangs_holds_up_no_request_and_no_end(
    rig: CacheRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The storage threads end within this time too.
    monkeypatch.setattr(attached_store, "_CLOSE_TIMEOUT_S", 0.5)
    assert attach(rig, ERRATIC)[0]
    gate = Erratic.hangs["close"] = threading.Event()
    rig.hi.administration.begin_detaching()
    assert rig.hi.storage_state()["hicache_storage_backend"] is None, "at once"
    assert rig.run(range(16)) == Reused()
    rig.settle()
    result = rig.hi.administration.take_result()
    assert result == (True, "detached dynamic; its client could not be closed and is left behind")
    # The end of the process does not wait for it either.
    assert attach(rig, ERRATIC)[0]
    rig.close()
    assert not Erratic.closed
    gate.set()
    wait_for(lambda: len(Erratic.closed) == 2)
