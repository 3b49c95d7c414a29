"""`python -m sglang.launch_server`: the HTTP server on the command line."""

from __future__ import annotations

import os
import signal
import sys

if __name__ == "__main__":
    # Before the other imports: Ctrl-C during them would end in a traceback, and nothing has been
    # started yet that would have to be ended.
    for _early in (signal.SIGINT, signal.SIGTERM):
        signal.signal(_early, lambda sig, frame: os._exit(128 + sig))

import logging
from collections.abc import Sequence
from types import FrameType

from sglang.srt.server_args import prepare_server_args
from sglang.srt.utils.network import base_url
from sglang.srt.utils.process import raise_file_limit, set_title

logger = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a server; the exit status. What is wrong at the start is one line on stderr."""
    raise_file_limit()
    try:
        args = prepare_server_args(argv)
        url = base_url(args.host, args.port)
        logger.info("starting %s for %s; loading it takes a while", args.served_model_name, url)
        # Words that scripts look for to end a server: the module's name.
        set_title("server", f"sglang.launch_server {url}")
        # After the command line is known to be right, and the first line is there.
        from sglang.srt.entrypoints.engine_processes import StartError
        from sglang.srt.entrypoints.http_server import run_server
    except ValueError as error:
        return _fail(error)
    # Until the server has handlers of its own, a signal unwinds what has been started. Not with
    # KeyboardInterrupt: Python kills itself at its end where one has passed through an `exec`.
    for sig in (signal.SIGINT, signal.SIGTERM):
        signal.signal(sig, _unwind)
    try:
        return run_server(args)
    except (ValueError, StartError) as error:
        return _fail(error)


def _fail(error: Exception) -> int:
    if logger.isEnabledFor(logging.DEBUG):
        logger.debug("the server cannot start", exc_info=error)
    sys.stderr.write(f"error: {' '.join(str(error).split())}\n")
    return 1


def _unwind(sig: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + sig)


if __name__ == "__main__":
    raise SystemExit(main())
