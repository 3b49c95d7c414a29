"""Properties are tested without clocks, which run unevenly on a busy machine. A metric that cannot
count a value fails the test, in processes that it starts too. There, steps verify drafts wherever
they can, since measurements differ from run to run. Files that share a process are told apart by
their CPU time."""

from __future__ import annotations

import atexit
import gc
import logging
import sys
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest
from hypothesis import HealthCheck, settings

from rigs.nightly_cases import leave_halves
from sglang.srt.environ import envs

if TYPE_CHECKING:
    from rigs.stores.mooncake_cluster import MooncakeCluster

settings.register_profile(
    "without clocks", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("without clocks")

envs.SGLANG_TEST_RAISE_METRIC_ERRORS.set(True)
envs.SGLANG_SPECULATE_ALWAYS.set(True)

_CPU_MS: Final[Counter[str]] = Counter()
"""CPU milliseconds by file."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    leave_halves(items)


def pytest_collection_finish() -> None:
    """Collections visit what tests make, not half a million objects of libraries."""
    gc.collect()
    gc.freeze()
    # What tests make is small, and few of its objects form cycles.
    gc.set_threshold(20_000, 20, 20)
    atexit.register(gc.unfreeze)  # Libraries report what is still there at the end as a leak.


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    root, began = logging.getLogger(), time.process_time()
    level, handlers = root.level, list(root.handlers)
    done = yield
    # A test that starts a command in this process leaves its log's settings.
    root.setLevel(level)
    root.handlers[:] = handlers
    _CPU_MS[item.nodeid.partition("::")[0]] += round((time.process_time() - began) * 1e3)
    return done


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """`test/run_suite.py` reads these lines; it measures a file in a process of its own itself."""
    if len(_CPU_MS) > 1:
        for path, milliseconds in _CPU_MS.most_common(10):
            terminalreporter.write_line(f"{milliseconds / 1e3:.1f} CPU seconds: {path}")


@pytest.fixture(autouse=True)
def no_call_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that stands still does not make L3 silent. `forked_servers` does the same."""
    store_calls = sys.modules.get("sglang.srt.mem_cache.l3.store_calls")
    if store_calls is not None:
        monkeypatch.setattr(store_calls, "_SILENT_AFTER_S", 60.0)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Path of a tiny model, which `save_tiny_checkpoint` writes once for each set of arguments: a
    family, and fields of its config. Tests share the files and do not change them."""
    # It imports transformers, which most files do without.
    from rigs.models.tiny_models import save_tiny_checkpoint

    made: dict[str, Path] = {}

    def path_of(family: str, **fields: Any) -> Path:
        key = repr((family, sorted(fields.items())))
        if key not in made:
            made[key] = tmp_path_factory.mktemp(family)
            save_tiny_checkpoint(made[key], family, **fields)
        return made[key]

    return path_of


@pytest.fixture(scope="module")
def cluster() -> Iterator[MooncakeCluster]:
    """A Mooncake Store of one node, for the tests of a file."""
    from rigs.stores.mooncake_cluster import MooncakeCluster

    with MooncakeCluster(segment_size="256mb") as running:
        yield running
