"""Ids to text, under the path where readers look for it."""

from sglang.srt.managers.detokenizer.detokenizer_manager import Detokenizer

__all__ = ["Detokenizer"]
