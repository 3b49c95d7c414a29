"""The server process side of requests, under the path where readers look for it."""

from sglang.srt.managers.tokenizer.tokenizer_manager import TokenizerManager

__all__ = ["TokenizerManager"]
