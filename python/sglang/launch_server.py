"""`python -m sglang.launch_server`: starts the HTTP server from the command line."""

from __future__ import annotations

import os
import signal
import sys

if __name__ == "__main__":
    # The handlers come before the other imports, because Ctrl-C during them would print a
    # traceback. An immediate exit is safe, because no process has been started yet.
    for _early in (signal.SIGINT, signal.SIGTERM):
        signal.signal(_early, lambda sig, frame: os._exit(128 + sig))

import logging
from collections.abc import Sequence
from types import FrameType

from sglang.srt.arg_groups.cli import FlagErrors
from sglang.srt.environ import envs
from sglang.srt.server_args import prepare_server_args
from sglang.srt.utils.logging_utils import logs_json
from sglang.srt.utils.process import raise_file_limit, set_title

logger = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a server and return the exit status. Each mistake at the start is a line on stderr."""
    raise_file_limit()
    try:
        args = prepare_server_args(argv)
        envs.SGLANG_DISAGGREGATION_SECRET.clear()  # The processes that need it get it with `args`.
        url = args.url
        logger.info("starting %s for %s; loading it takes a while", args.served_model_name, url)
        # Scripts look for the module's name to find the server's process.
        set_title("server", f"sglang.launch_server {url}")
        # Imported after the command line was checked and the first line was logged.
        from sglang.srt.entrypoints.engine_processes import StartError, run_node
        from sglang.srt.entrypoints.http_server import run_server
    except ValueError as error:
        return _fail(error)
    # Until the server installs its own handlers, a signal unwinds the start. SystemExit, because
    # after a KeyboardInterrupt that passed through `exec` Python kills itself at its end.
    for sig in (signal.SIGINT, signal.SIGTERM):
        signal.signal(sig, _unwind)
    try:
        return run_server(args) if args.node_rank == 0 else run_node(args)
    except (ValueError, StartError) as error:
        return _fail(error)


def _fail(error: Exception) -> int:
    if logger.isEnabledFor(logging.DEBUG):
        logger.debug("the server cannot start", exc_info=error)
    for line in error.lines if isinstance(error, FlagErrors) else [str(error)]:
        text = " ".join(line.split())
        if logs_json():
            logger.critical("%s", text)
        else:
            sys.stderr.write(f"error: {text}\n")
    return 1


def _unwind(sig: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + sig)


if __name__ == "__main__":
    raise SystemExit(main())
