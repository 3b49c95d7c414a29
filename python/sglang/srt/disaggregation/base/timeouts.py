"""Time limits of prefill and decode servers, from the environment."""

from __future__ import annotations

from dataclasses import dataclass

from sglang.srt.environ import EnvField, envs


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """Time limits of a room, in seconds."""

    unknown_room: float
    """Time until the prefill server knows the room, from its first answer that it does not."""
    waiting: float
    """Time until the next pages, once the prefill server knows the room."""
    silence: float
    """Time until any answer of the prefill server."""

    @classmethod
    def from_environment(cls) -> Timeouts:
        """The time limits of this process. Raises ValueError if one is not positive."""
        return cls(
            unknown_room=seconds(envs.SGLANG_DISAGGREGATION_UNKNOWN_ROOM_TIMEOUT),
            waiting=seconds(envs.SGLANG_DISAGGREGATION_WAITING_TIMEOUT),
            silence=silence_s(),
        )


def seconds(field: EnvField[int]) -> int:
    """The value of a time limit in the environment. Raises ValueError if the value is not
    positive."""
    value = field.get()
    if value < 1:
        raise ValueError(f"environment variable {field.name}={value}: it must be at least 1")
    return value


def silence_s() -> int:
    """Seconds without a message after which the other server counts as gone."""
    interval = seconds(envs.SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL)
    return interval * seconds(envs.SGLANG_DISAGGREGATION_HEARTBEAT_MAX_FAILURE)
