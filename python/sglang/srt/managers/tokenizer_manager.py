"""Re-exports the server process's side of requests at SGLang's path."""

from sglang.srt.managers.tokenizer.tokenizer_manager import TokenizerManager as TokenizerManager
