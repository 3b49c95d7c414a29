"""A desk with a clock that stands, and decode servers that ask it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from rigs.disaggregation.desk_rig import LAYOUT, SILENT_S, UNWANTED_S, Asker, Clock, Desk


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def desk(clock: Clock) -> Iterator[Desk]:
    desk = Desk(LAYOUT, "127.0.0.1", unwanted_s=UNWANTED_S, silent_s=SILENT_S, clock=clock)
    yield desk
    desk.close()


@pytest.fixture
def new_asker(desk: Desk) -> Iterator[Callable[[], Asker]]:
    made: list[Asker] = []

    def new() -> Asker:
        made.append(Asker(desk.port))
        return made[-1]

    yield new
    for one in made:
        one.link.close()


@pytest.fixture
def asker(new_asker: Callable[[], Asker]) -> Asker:
    return new_asker()
