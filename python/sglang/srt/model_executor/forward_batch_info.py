"""Re-exports the plain data of one forward at SGLang's path."""

from sglang.srt.layers.forward_batch_info import ForwardBatch, ForwardMode

__all__ = ["ForwardBatch", "ForwardMode"]
