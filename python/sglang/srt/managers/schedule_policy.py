"""Re-exports the scheduling policy at SGLang's path."""

from sglang.srt.managers.scheduler.policy import PrefillAdder as PrefillAdder
from sglang.srt.managers.scheduler.policy import SchedulePolicy as SchedulePolicy
