"""Profiles steps with `torch.profiler`, within bounds, and writes a trace."""

from __future__ import annotations

import logging
import os
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from torch.profiler import ProfilerActivity, profile

from sglang.srt.environ import envs
from sglang.srt.hardware_backend.device_runtime import device_runtime

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler.state import SchedulerState
    from sglang.srt.messages.io_struct import StartProfileReqInput, StopProfileReqInput

logger = logging.getLogger(__name__)

_LONGEST_SILENCE_S: Final = 120.0
"""Most seconds for which torch may hold the interpreter's lock while it ends or writes a profile:
it takes 20 to 80 us for each operation, 12 s for 150,000 with their shapes."""
_MOST_SECONDS: Final = 600.0
"""Seconds after which a profile ends, however few steps there were."""


class StepProfiler:
    """One profile of a rank at a time. It ends by itself after a number of steps.

    Threads: the scheduler's. A thread `profile` writes the trace of a profile that has ended.

    Attributes:
        is_running: True if `tick` must be called.
    """

    def __init__(
        self, state: SchedulerState, rank: int, announce_silence: Callable[[float], None]
    ) -> None:
        """`announce_silence`: See `RankWatch.announce`."""
        self._state = state
        self._announce_silence = announce_silence
        self._rank = rank
        self._profile: profile | None = None
        self._path = Path()
        self._last_step = 0
        self._deadline = 0.0
        self._writer: threading.Thread | None = None
        self.is_running = False

    def start(self, message: StartProfileReqInput) -> dict[str, Any]:
        """Begin to profile `message.num_steps` steps. Raises ValueError: the reason why not."""
        if self.is_running:
            raise ValueError("a profile is under way: POST /stop_profile ends it")
        if self._writer is not None and self._writer.is_alive():
            raise ValueError("the last profile is being written: try again soon")
        device = self._state.pools.device.type
        kinds: dict[str, ProfilerActivity] = {"CPU": ProfilerActivity.CPU}
        if (activity := device_runtime(device).profiled_activity) is not None:
            kinds["GPU"] = activity
        wanted = message.activities or list(kinds)
        if not kinds.keys() >= set(wanted):
            raise ValueError(f"activities: this server runs on {device}: leave GPU out")
        folder = Path(envs.SGLANG_TORCH_PROFILER_DIR.get())
        self._path = folder / f"{message.profile_id}-TP-{self._rank}.trace.json.gz"
        try:
            self._profile = profile(
                activities=[kinds[one] for one in wanted], record_shapes=message.record_shapes
            )
            self._profile.start()
        except RuntimeError as error:
            self._profile = None
            raise ValueError(f"torch cannot profile: {error}") from None
        self._last_step = self._num_steps() + message.num_steps
        self._deadline = self._state.now + _MOST_SECONDS
        self.is_running = True
        logger.info("profiling up to %d steps", message.num_steps)
        return {"file": str(self._path)}

    def stop(self, message: StopProfileReqInput) -> dict[str, Any]:
        """End the profile. Raises ValueError: there is none."""
        if not self.is_running:
            raise ValueError("no profile is under way: it may have had all its steps")
        self._end()
        return {"file": str(self._path)}

    def tick(self) -> None:
        """End the profile that has had its steps or its time."""
        if self._num_steps() >= self._last_step or self._state.now >= self._deadline:
            self._end()

    def close(self) -> None:
        """End the profile under way, and wait for its trace."""
        if self.is_running:
            self._end()
        if self._writer is not None:
            self._writer.join()

    def _num_steps(self) -> int:
        counters = self._state.counters
        return counters.prefill_batches + counters.decode_steps

    def _end(self) -> None:
        ended, self._profile, self.is_running = self._profile, None, False
        assert ended is not None, "it runs"
        device_runtime(self._state.pools.device).synchronize()
        self._announce_silence(_LONGEST_SILENCE_S)
        ended.stop()
        self._writer = threading.Thread(
            target=self._write, args=(ended,), name="profile", daemon=True
        )
        self._writer.start()

    def _write(self, ended: profile) -> None:
        """Write a trace, and end the silence. The file appears when it is whole."""
        path = self._path  # No other profile begins before the end of this thread.
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # Others may write to the folder, so nobody else may know the name before.
            with tempfile.TemporaryDirectory(prefix=".profile-", dir=path.parent) as own:
                written = Path(own) / path.name
                ended.export_chrome_trace(str(written))
                os.replace(written, path)
        except (OSError, RuntimeError) as error:
            logger.error("the profile %s was not written: %s", path, error)
        else:
            logger.info("wrote the profile %s", path)
        self._announce_silence(0.0)
