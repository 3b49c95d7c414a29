"""Messages between the processes, under the path where readers look for them."""

from sglang.srt.managers.messages.io_struct import AbortReq, TokenizedGenerateReqInput

__all__ = ["AbortReq", "TokenizedGenerateReqInput"]
