"""Re-exports the detokenizer at SGLang's path."""

from sglang.srt.managers.detokenizer.detokenizer_manager import Detokenizer as Detokenizer
