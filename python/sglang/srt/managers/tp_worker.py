"""Re-exports the worker of one rank at SGLang's path."""

from sglang.srt.managers.scheduler.launched_step import TpModelWorker as TpModelWorker
