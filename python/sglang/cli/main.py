"""The command `sglang`: `sglang serve [MODEL] [flags]` starts a server, `version` says which."""

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
        "command",
        choices=["serve", "version"],
        help="serve: start a server, `sglang serve --help` lists its flags; version: as --version",
    )
    command = parser.parse_args(sys.argv[1:2]).command
    flags = sys.argv[2:]
    if command == "version":
        parser.parse_args(["--version", *flags])
    asked = [word for word in flags if word.partition("=")[0] in ("-h", "--help")]
    if asked:
        from sglang.srt.server_args import prepare_server_args

        prepare_server_args(asked[:1], "sglang serve [MODEL]")
    if flags and not flags[0].startswith("-"):
        flags.insert(0, "--model-path")
    # In place of this process, so that signals and the exit status are the server's.
    os.execv(sys.executable, [sys.executable, "-m", "sglang.launch_server", *flags])
