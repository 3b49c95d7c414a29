"""The command `sglang`: `sglang serve [flags]` starts a server, `sglang --version` says which."""

from __future__ import annotations

import argparse
import os
import sys

from sglang.srt.constants import VERSION


def main() -> None:
    """Run the command line of this process.

    Raises:
        SystemExit: There is no such command (status 2), or all has been printed.
    """
    parser = argparse.ArgumentParser(prog="sglang", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=VERSION)
    parser.add_argument(
        "command", choices=["serve"], help="start a server; `sglang serve --help` lists its flags"
    )
    parser.parse_args(sys.argv[1:2])
    # In place of this process, so that signals and the exit status are the server's.
    os.execv(sys.executable, [sys.executable, "-m", "sglang.launch_server", *sys.argv[2:]])
