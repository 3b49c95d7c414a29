"""Order of requests, under the path where readers look for it."""

from sglang.srt.managers.scheduler.policy import PrefillAdder, SchedulePolicy

__all__ = ["PrefillAdder", "SchedulePolicy"]
