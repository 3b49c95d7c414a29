"""Re-exports the command line settings at SGLang's path."""

from sglang.srt.arg_groups.server_args import ServerArgs, prepare_server_args

__all__ = ["ServerArgs", "prepare_server_args"]
