"""A run under chaos: the agenda of a seed, excuses, broken rules, the table."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest

from sglang.test.chaos import agenda
from sglang.test.chaos.agenda import (
    AFTERMATH_S,
    LINK,
    MASTER,
    PD,
    POOL,
    PREFILL,
    TIERS,
    Attempt,
    Event,
    Kind,
    Outcome,
    Span,
    Tiers,
    broken_rules,
    draw_agenda,
    draw_transport,
    latencies,
    summary,
)
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=2, suite="base-a-test-cpu")

ALL_TIERS = Counter(dict.fromkeys(TIERS, 64))
KILL_AT_10 = Span(Event(10.0, Kind.KILL, "server 1", 2.0), 10.0, 20.0)


def attempt(door: str, began: float, outcome: Outcome = Outcome.CUT) -> Attempt:
    """A request of a second."""
    return Attempt(door, began, began + 1, outcome, "why")


def test_a_seed_gives_the_same_agenda_and_another_one_another() -> None:
    assert draw_agenda(7, 600.0, 3) == draw_agenda(7, 600.0, 3)
    assert draw_agenda(7, 600.0, 3) != draw_agenda(8, 600.0, 3)
    # A shorter run has the first events of a longer one.
    short = draw_agenda(7, 60.0, 3)
    assert short == draw_agenda(7, 600.0, 3)[: len(short)]


def test_a_seed_draws_a_transport_of_this_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agenda, "has_nixl", lambda: True)
    assert [draw_transport(seed) for seed in (1, 2)] == ["nixl", "mooncake"]
    monkeypatch.setattr(agenda, "has_nixl", lambda: False)
    assert [draw_transport(seed) for seed in (1, 2)] == ["mooncake", "mooncake"]


def test_no_event_begins_before_the_one_before_it_ends_or_after_the_run() -> None:
    agenda = draw_agenda(3, 600.0, 3)
    assert len(agenda) > 30
    assert all(a.at + a.seconds < b.at for a, b in pairwise(agenda))
    assert agenda[-1].at < 600.0


def test_all_kinds_of_fault_come_within_minutes() -> None:
    labels = {event.label for event in draw_agenda(1, 300.0, 3)}
    engines = {f"{kind} {one}" for kind in ("stop", "kill", "restart")
               for one in ("server", "prefill", "decode")}  # fmt: skip
    store = {f"{kind} {one}" for kind in ("stop", "kill") for one in ("master", "node")}
    assert labels == engines | store | {"delay link to the master", "switch decode"}


def test_all_servers_are_targets() -> None:
    targets = {event.target for event in draw_agenda(1, 3600.0, 5)}
    assert {f"server {number}" for number in range(5)} <= targets


@pytest.mark.parametrize(
    ("kind", "target", "doors"),
    [
        (Kind.KILL, "server 1", {"server 1", POOL}),
        (Kind.RESTART, "server 1", {"server 1"}),
        (Kind.STOP, "server 1", set()),
        (Kind.STOP, PREFILL, {PD}),
        (Kind.RESTART, PREFILL, {PD}),
        (Kind.KILL, "decode 0", {PD}),
        (Kind.RESTART, "decode 0", set()),
        (Kind.STOP, "decode 0", set()),
        (Kind.KILL, MASTER, set()),
        (Kind.KILL, "node 2", set()),
        (Kind.DELAY, LINK, set()),
        (Kind.SWITCH, "decode 1", set()),
    ],
)
def test_an_event_excuses_some_doors(kind: Kind, target: str, doors: set[str]) -> None:
    assert set(Event(0.0, kind, target, 1.0).excuses()) == doors


def test_a_failure_is_excused_by_its_own_event_alone() -> None:
    fine = [
        attempt("server 1", 9.5),
        attempt(POOL, 15.0, Outcome.REFUSED),
        attempt(POOL, 20.0 + AFTERMATH_S),
        attempt("server 0", 15.0, Outcome.RIGHT),
    ]
    assert not broken_rules(fine, [KILL_AT_10], [], ALL_TIERS)
    for bad in (
        attempt("server 1", 8.0),
        attempt("server 0", 15.0),
        attempt(PD, 15.0, Outcome.REFUSED),
        attempt(POOL, 20.1 + AFTERMATH_S),
    ):
        (line,) = broken_rules([*fine, bad], [KILL_AT_10], [], ALL_TIERS)
        assert line == (
            f"{bad.outcome} without an excuse: {bad.door}, {bad.began:.1f} to {bad.ended:.1f} s: "
            "why"
        )


def test_an_event_that_never_ended_excuses_to_the_end() -> None:
    event = Event(10.0, Kind.KILL, "server 1", 2.0)
    assert not broken_rules([attempt(POOL, 999.0)], [Span(event, 10.0)], [], ALL_TIERS)


@pytest.mark.parametrize("outcome", [Outcome.WRONG, Outcome.HUNG, Outcome.UNNAMED])
def test_nothing_excuses_wrong_hung_and_unnamed(outcome: Outcome) -> None:
    (line,) = broken_rules([attempt(POOL, 15.0, outcome)], [KILL_AT_10], [], ALL_TIERS)
    assert line == f"{outcome}: pool, 15.0 to 16.0 s: why"


def test_lost_questions_and_unused_tiers_break_rules() -> None:
    assert broken_rules([], [], ["pd: 'heron?'"], Counter(device=1, host=1)) == [
        "lost: pd: 'heron?'",
        "no prompt token came from storage",
    ]


def test_the_table_counts_outcomes_by_event() -> None:
    again = Span(Event(50.0, Kind.KILL, "server 0", 2.0), 50.0, 60.0)
    attempts = [
        attempt(POOL, 1.0, Outcome.RIGHT),
        attempt(POOL, 12.0, Outcome.RIGHT),
        attempt(POOL, 13.0),
        attempt(POOL, 55.0),
    ]
    rows = [line.split() for line in summary(attempts, [KILL_AT_10, again])]
    assert rows == [
        ["event", "times", *Outcome],
        ["calm", "1", "0", "0", "0", "0", "0"],
        ["kill", "server", "2", "1", "0", "0", "2", "0", "0"],
    ]


@pytest.mark.parametrize(
    ("target", "doors"),
    [("server 1", {"server 1", POOL}), (PREFILL, {PD}), ("decode 0", {PD}), ("node 2", set())],
)
def test_an_event_touches_the_doors_whose_way_it_is_on(target: str, doors: set[str]) -> None:
    assert set(Event(0.0, Kind.STOP, target, 1.0).touches()) == doors


def test_latencies_are_of_right_answers_beside_events_that_are_not_on_their_way() -> None:
    attempts = [
        Attempt(POOL, 1.0, 2.0, Outcome.RIGHT),
        Attempt("server 0", 12.0, 15.0, Outcome.RIGHT),
        Attempt(PD, 12.0, 14.0, Outcome.RIGHT),
        attempt("server 0", 12.0),
        Attempt(POOL, 12.0, 19.0, Outcome.RIGHT),
        Attempt("server 1", 12.0, 19.0, Outcome.RIGHT),
    ]
    rows = {line[:40].strip(): line[40:].split() for line in latencies(attempts, [KILL_AT_10])[1:]}
    none = ["0", "0.00", "0.00", "0.00", "0.00"]
    assert rows == {
        "beside any": ["2", "3.00", "3.00", "3.00", *none],
        "beside kill server": ["2", "3.00", "3.00", "3.00", *none],
        "calm": ["1", "1.00", "1.00", "1.00", *none],
    }


def test_requests_that_ask_l3_and_those_that_do_not_have_lines_of_their_own() -> None:
    stop = Span(Event(10.0, Kind.STOP, MASTER, 2.0), 10.0, 12.0)
    attempts = [
        Attempt(POOL, 1.0, 2.0, Outcome.RIGHT, tiers=Tiers(first=0.5)),
        Attempt("server 0", 1.0, 2.0, Outcome.RIGHT, tiers=Tiers(True, 0.25)),
        Attempt("server 0", 10.0, 14.0, Outcome.RIGHT, tiers=Tiers(True, 3.0, 3.5)),
        Attempt("server 0", 10.0, 11.0, Outcome.RIGHT, tiers=Tiers(False, 0.0, 0.5)),
        Attempt(PD, 11.0, 14.0, Outcome.RIGHT),
    ]
    rows = {line[:40].strip(): line[40:].split() for line in latencies(attempts, [stop])[1:]}
    assert rows == {
        "beside any": ["3", "3.00", "4.00", "4.00", *"2 3.50 3.50 7.00 3.00 3.00".split()],
        "beside stop master": ["3", "3.00", "4.00", "4.00", *"2 3.50 3.50 7.00 3.00 3.00".split()],
        "beside stop master, asks L3": "1 4.00 4.00 4.00 1 3.50 3.50 7.00 3.00 3.00".split(),
        "beside stop master, asks not": "1 1.00 1.00 1.00 1 0.50 0.50 1.00 0.00 0.00".split(),
        "calm": "2 1.00 1.00 1.00 1 0.50 0.50 1.00 0.25 0.25".split(),
        "calm, asks L3": "1 1.00 1.00 1.00 0 0.00 0.00 0.00 0.25 0.25".split(),
    }


def test_a_run_may_have_some_kinds_of_fault_alone() -> None:
    only = ["stop master", "delay link to the master"]
    assert {event.label for event in draw_agenda(1, 100.0, 3, only)} == set(only)
    with pytest.raises(ValueError, match="stop mastr: none of stop master, stop node"):
        draw_agenda(1, 100.0, 3, ["stop mastr"])
