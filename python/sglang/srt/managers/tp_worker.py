"""The worker of one rank, under the path where readers look for it."""

from sglang.srt.managers.scheduler.tp_worker import TpModelWorker

__all__ = ["TpModelWorker"]
