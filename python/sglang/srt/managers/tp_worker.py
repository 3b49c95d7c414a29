"""Re-exports the worker of one rank at SGLang's path."""

from sglang.srt.managers.scheduler.tp_worker import TpModelWorker

__all__ = ["TpModelWorker"]
