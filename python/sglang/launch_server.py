"""`python -m sglang.launch_server`: the HTTP server on the command line."""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Sequence
from types import FrameType

from sglang.srt.server_args import prepare_server_args

logger = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a server; the exit status. What is wrong at the start is one line on stderr."""
    # Until the server has handlers of its own, a signal unwinds what has been started.
    signal.signal(signal.SIGTERM, _unwind)
    try:
        args = prepare_server_args(argv)
        # After the command line is known to be right: these pull in torch.
        from sglang.srt.entrypoints.engine_processes import StartError
        from sglang.srt.entrypoints.http_server import run_server
    except ValueError as error:
        return _fail(error)
    try:
        return run_server(args)
    except (ValueError, StartError) as error:
        return _fail(error)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _fail(error: Exception) -> int:
    if logger.isEnabledFor(logging.DEBUG):
        logger.debug("the server cannot start", exc_info=error)
    sys.stderr.write(f"error: {' '.join(str(error).split())}\n")
    return 1


def _unwind(sig: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + sig)


if __name__ == "__main__":
    raise SystemExit(main())
