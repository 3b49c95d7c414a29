"""Re-exports the scheduling policy at SGLang's path."""

from sglang.srt.managers.scheduler.policy import PrefillAdder, SchedulePolicy

__all__ = ["PrefillAdder", "SchedulePolicy"]
