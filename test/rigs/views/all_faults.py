"""The twelve faults that an operator asks for, each with the tests that plant it.

    .venv/bin/python -m rigs.views.all_faults

Runs them, and prints which alert or view named each.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final, NamedTuple

import pytest

ROOT: Final = Path(__file__).resolve().parents[3]
_TESTS: Final = ROOT / "test" / "registered"
_SERVERS: Final = "hicache/views/test_named_faults.py"
_STORES: Final = "hicache/views/test_named_faults_store.py"
_IN_PROCESS: Final = "unit/rigs/test_faults_in_process.py"


class Fault(NamedTuple):
    """A fault, how it is named, and which tests show that."""

    what: str
    alerts: tuple[str, ...]
    view: str
    """Where else it shows; empty: nowhere."""
    tests: tuple[str, ...]


FAULTS: Final = (
    Fault(
        "a full L1",
        ("PrefillStarved", "DeviceCacheThrashes"),
        "queues; verdict, decisions",
        (
            f"{_SERVERS}::test_a_starved_prefill_queue",
            f"{_SERVERS}::test_a_thrashing_l1_raises_its_alert",
        ),
    ),
    Fault(
        "a full L2",
        ("HostMemoryInUse",),
        "L2's bar, queue of backups",
        (f"{_SERVERS}::test_a_full_l2_raises_its_alert",),
    ),
    Fault(
        "a slow store",
        ("ReadsTooSlow",),
        "reads by outcome",
        (f"{_SERVERS}::test_a_slow_store_raises_its_alert",),
    ),
    Fault(
        "a dead node",
        ("StoreNodeGone",),
        "nodes; the log",
        (f"{_STORES}::test_a_dead_node_is_named_by_log_alert_and_views",),
    ),
    Fault("a damaged page", ("DamagedPages",), "", (f"{_IN_PROCESS}::test_a_damaged_page",)),
    Fault(
        "a tenant that evicts",
        ("TenantEvicts",),
        "tenants",
        (f"{_IN_PROCESS}::test_a_tenant_that_evicts",),
    ),
    Fault(
        "a namespace that nobody shares",
        ("NamespaceAlone",),
        "store: shared by",
        (
            "hicache/views/test_store_versions.py"
            "::test_a_server_that_shares_its_store_with_nobody_is_named",
        ),
    ),
    Fault(
        "a wrong protocol",
        (),
        "store: other protocol; the log; check_env, the start",
        (
            f"{_STORES}::test_a_nodes_other_protocol_is_named_by_log_and_views",
            "unit/diagnosis/test_check_env.py"
            "::test_transports_that_this_host_or_wheel_lacks_are_refused",
        ),
    ),
    Fault(
        "drafts that fail",
        ("DraftsRejected",),
        "speculation",
        ("speculative/test_draft_alerts.py::test_rejected_drafts_raise_an_alert",),
    ),
    Fault(
        "a stuck prefill server",
        ("PrefillServerStuck",),
        "the log",
        (f"{_IN_PROCESS}::test_a_stuck_prefill_server",),
    ),
    Fault("a full disk", ("WritesFail",), "writes", (f"{_IN_PROCESS}::test_a_full_disk",)),
    Fault(
        "a thrashing state pool",
        ("StatesThrash",),
        "decisions",
        (f"{_IN_PROCESS}::test_a_thrashing_state_pool",),
    ),
)


class _Outcomes:
    """pytest plugin: the tests that passed, by path and name."""

    def __init__(self) -> None:
        self.passed: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            self.passed.add(report.nodeid.partition("registered/")[2])


def main() -> int:
    """Run all tests, and print a line for each fault. Returns 1 if one was not named."""
    tests = [f"{_TESTS}/{test}" for fault in FAULTS for test in fault.tests]
    outcomes = _Outcomes()
    pytest.main(["-q", *tests], plugins=[outcomes])
    is_named = {fault.what: outcomes.passed >= set(fault.tests) for fault in FAULTS}
    for fault in FAULTS:
        names = ", ".join((*fault.alerts, *filter(None, [fault.view])))
        print(f"{'named' if is_named[fault.what] else 'NOT NAMED':<10}{fault.what:<32}{names}")
    return 0 if all(is_named.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
