"""Re-exports requests and batches at SGLang's path."""

from sglang.srt.managers.scheduler.batch import DecodeBatch, ModelWorkerBatch
from sglang.srt.managers.scheduler.requests.req import Req

__all__ = ["DecodeBatch", "ModelWorkerBatch", "Req"]
