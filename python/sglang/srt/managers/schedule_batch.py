"""Requests and batches, under the path where readers look for them."""

from sglang.srt.managers.scheduler.batch import DecodeBatch, ModelWorkerBatch
from sglang.srt.managers.scheduler.requests.req import Req

__all__ = ["DecodeBatch", "ModelWorkerBatch", "Req"]
