"""Re-exports the messages between the processes at SGLang's path."""

from sglang.srt.messages.io_struct import AbortReq as AbortReq
from sglang.srt.messages.io_struct import (
    TokenizedGenerateReqInput as TokenizedGenerateReqInput,
)
