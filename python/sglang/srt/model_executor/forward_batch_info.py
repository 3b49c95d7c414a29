"""The plain data of one forward, under the path where readers look for it."""

from sglang.srt.layers.forward_batch_info import ForwardBatch, ForwardMode

__all__ = ["ForwardBatch", "ForwardMode"]
