"""A prefill server with a clock that stands, and decode servers that ask it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from rigs.disaggregation.desk_rig import (
    LAYOUT,
    SILENT_S,
    UNWANTED_S,
    Asker,
    Clock,
    PrefillRooms,
)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def prefill(clock: Clock) -> Iterator[PrefillRooms]:
    prefill = PrefillRooms(
        LAYOUT, "127.0.0.1", unwanted_s=UNWANTED_S, silent_s=SILENT_S, clock=clock
    )
    yield prefill
    prefill.close()


@pytest.fixture
def new_asker(prefill: PrefillRooms) -> Iterator[Callable[[], Asker]]:
    made: list[Asker] = []

    def new() -> Asker:
        made.append(Asker(prefill.port))
        return made[-1]

    yield new
    for one in made:
        one.link.close()


@pytest.fixture
def asker(new_asker: Callable[[], Asker]) -> Asker:
    return new_asker()
