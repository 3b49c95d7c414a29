"""A process on a CPU, and a Transfer Engine of it over a transport that only records."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rigs.stores.fake_transfer_engine import (
    FakeTransferEngines,
    listening_peer,
    start_engine,
)
from sglang.srt.distributed import device_context
from sglang.srt.distributed.device_communicators.mooncake_transfer_engine import (
    MooncakeTransferEngine,
)
from sglang.srt.distributed.device_context import mark_device_set


@pytest.fixture(autouse=True)
def environment(clean_environment: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONCAKE_PROTOCOL", "tcp")
    monkeypatch.setattr(device_context, "_device", None)
    mark_device_set("cpu")


@pytest.fixture
def fakes() -> FakeTransferEngines:
    return FakeTransferEngines()


@pytest.fixture
def engine(fakes: FakeTransferEngines) -> Iterator[MooncakeTransferEngine]:
    made = start_engine(fakes)
    yield made
    made.close()


@pytest.fixture
def peer() -> Iterator[str]:
    with listening_peer() as name:
        yield name
