"""A prompt's way between two servers, and servers that soon repeat and miss each other."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rigs.disaggregation.prompt_scene import Scene
from sglang.srt.disaggregation.control import control_client
from sglang.srt.environ import envs


@pytest.fixture
def scene() -> Iterator[Scene]:
    """A prefill server, and a decode server's way to it."""
    made = Scene()
    yield made
    made.close()


@pytest.fixture
def short_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_client, "REPEAT_S", 0.05)


@pytest.fixture
def short_heartbeats() -> Iterator[None]:
    """Servers that are gone are missed after two seconds."""
    with (
        envs.SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL.override(1),
        envs.SGLANG_DISAGGREGATION_HEARTBEAT_MAX_FAILURE.override(2),
    ):
        yield
