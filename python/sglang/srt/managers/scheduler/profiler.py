"""Profiles steps with `torch.profiler`, within bounds, and writes a trace.

torch holds the interpreter's lock while it ends a profile, 20 to 80 us for each operation, so no
thread of the process answers anybody. Other ranks are told of it before. Prefill and decode servers
bear no such silence: there the first step is profiled alone, and the time for its end limits the
steps of the profile.
"""

from __future__ import annotations

import logging
import math
import os
import tempfile
import threading
import time
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
"""Most seconds for which the end of a profile, and writing it, may hold the lock."""
_SHARE_OF_SILENCE: Final = 0.25
"""The end of a profile may take this share of the silence that a decode or prefill server bears.
The steps of a profile are unlike, and writing it holds the lock for a third as long again."""
_MOST_SECONDS: Final = 600.0
"""Seconds after which a profile ends, however few steps there were."""


class StepProfiler:
    """One profile of a rank at a time. It ends by itself after a number of steps.

    Threads: the scheduler's. A thread `profile` writes the trace of a profile that has ended.

    Attributes:
        is_running: True if `tick` must be called.
    """

    def __init__(
        self,
        state: SchedulerState,
        rank: int,
        announce_silence: Callable[[float], None],
        most_silence_s: Callable[[], float] = lambda: math.inf,
    ) -> None:
        """`announce_silence`: see `RankWatch.announce`. `most_silence_s`: see `Role`."""
        self._state = state
        self._most_silence_s = most_silence_s
        self._announce_silence = announce_silence
        self._rank = rank
        self._profile: profile | None = None
        self._begin: Callable[[], profile] | None = None
        """Begins the profile once its first step has been tried; None: it has begun."""
        self._path = Path()
        self._trial: profile | None = None
        """The profile of the first step alone, for the case that no other step comes."""
        self._first_step = 0
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

        def begin() -> profile:
            begun = profile(
                activities=[kinds[one] for one in wanted], record_shapes=message.record_shapes
            )
            begun.start()
            return begun

        try:
            self._profile = begin()
        except RuntimeError as error:
            raise ValueError(f"torch cannot profile: {error}") from None
        self._first_step = self._num_steps()
        self._last_step = self._first_step + message.num_steps
        is_bounded = self._most_silence_s() < math.inf
        self._begin = begin if is_bounded and message.num_steps > 1 else None
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
        if self._begin is not None and self._num_steps() > self._first_step:
            self._begin_after_trial(self._begin)
        elif self._num_steps() >= self._last_step or self._state.now >= self._deadline:
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

    def _begin_after_trial(self, begin: Callable[[], profile]) -> None:
        """Begin the profile, with fewer steps if the end of so many would take too long."""
        began = time.monotonic()
        self._trial = self._stop()
        seconds = time.monotonic() - began
        self._announce_silence(0.0)
        steps = wanted = self._last_step - self._first_step
        if wanted * seconds > (limit := _SHARE_OF_SILENCE * self._most_silence_s()):
            steps = max(1, int(limit / seconds))
        self._begin, self._first_step = None, self._num_steps()
        self._last_step = self._first_step + steps
        if steps < wanted:
            logger.warning(
                "the profile has %d of %d steps: its end takes %.3f s for a step, in which neither "
                "decode nor prefill servers get answers; "
                "SGLANG_DISAGGREGATION_HEARTBEAT_MAX_FAILURE on all servers allows more",
                steps,
                wanted,
                seconds,
            )
        try:
            self._profile = begin()
        except RuntimeError as error:
            logger.error("torch cannot profile: %s", error)
            self._trial, self.is_running = None, False

    def _stop(self) -> profile:
        ended, self._profile = self._profile, None
        assert ended is not None, "it runs"
        device_runtime(self._state.pools.device).synchronize()
        self._announce_silence(_LONGEST_SILENCE_S)
        ended.stop()
        return ended

    def _end(self) -> None:
        ended, self.is_running = self._stop(), False
        if self._trial is not None and self._num_steps() == self._first_step:
            ended = self._trial
        self._trial = None
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
