"""Re-exports requests and batches at SGLang's path."""

from sglang.srt.managers.scheduler.batch import DecodeBatch as DecodeBatch
from sglang.srt.managers.scheduler.batch import ModelWorkerBatch as ModelWorkerBatch
from sglang.srt.managers.scheduler.requests.req import Req as Req
