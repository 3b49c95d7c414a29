"""The command line of a server, at SGLang's path: the settings, parsed and resolved."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Final

from sglang.srt.arg_groups.checks import mistakes_of, without_effect
from sglang.srt.arg_groups.cli import parse_flags, raise_errors, warn_of_ignored
from sglang.srt.arg_groups.server_args import ServerArgs
from sglang.srt.utils.logging_utils import LOG_FORMATS, LOG_LEVELS, configure_logger

__all__ = ["ServerArgs", "prepare_server_args"]


FIRST_FLAGS: Final = (
    "model_path", "host", "port", "api_key_file", "context_length", "tp_size",
    "mem_fraction_static", "enable_hierarchical_cache", "hicache_storage_backend", "enable_metrics",
)  # fmt: skip
"""Fields whose flags `--help` explains first."""


def prepare_server_args(
    argv: Sequence[str] | None = None, program: str = "python -m sglang.launch_server"
) -> ServerArgs:
    """Parse and resolve a command line, and set up logging by `--log-level` and `--log-format`.

    Args:
        argv: Arguments without the program's name; None means those of the process.
        program: The program's name for `--help`.

    Raises:
        FlagErrors: A line for each mistake, with the flag and the remedy.
        SystemExit: `--help` was given and has been printed.
    """
    parsed = parse_flags(
        ServerArgs,
        sys.argv[1:] if argv is None else argv,
        prog=program,
        description="Serve a language model over HTTP, with a prefix cache in up to three tiers.",
        first=FIRST_FLAGS,
    )
    args = ServerArgs(**parsed.values)
    lines = list(parsed.lines)
    configure_logger(
        args.log_level if args.log_level in LOG_LEVELS else LOG_LEVELS[0],
        style=args.log_format if args.log_format in LOG_FORMATS else LOG_FORMATS[0],
    )
    try:
        args = args.with_keys()
    except ValueError as error:
        lines.append(str(error))
    raise_errors([*lines, *mistakes_of(args, parsed.malformed)])
    warn_of_ignored([*parsed.ignored, *without_effect(args)])
    return args.resolve()
