"""The commands in the documents: blocks between ``` lines whose info string begins with `bash`.

After that word it says how the block is tested: nothing, it ends with status 0; `serves on PORT`,
it goes on and answers there, until another block of the page serves or the page ends; `not run:`
and why, it is not. The documents are written for a checkout after `make setup`; blocks run in it,
one after the other, as a reader would paste them.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from sglang.srt.constants import BUILTIN_MODEL_DIR
from sglang.srt.environ import child_environment
from sglang.srt.utils.network import get_free_ports
from sglang.srt.utils.process import kill_process_tree

_FENCED: Final = re.compile(r"^( *)```(.*)\n((?s:.*?))^\1```$", re.MULTILINE)
_PORTS: Final = ("30000", "30001", "30010", "8998", "50051", "50052", "9003")
"""Ports of the documents; tests put free ones in their place."""
_ON_30000: Final = ("sglang serve", "sglang.bench_serving")
"""Commands that take this port where they name none; the last `--port` counts."""
_LENGTH: Final = re.compile(r"(--(?:random-)?(?:in|out)put-len) \d+")
_SHORT_TOKENS: Final = 16
_BLOCK_S: Final = 300.0
"""Seconds until a block has ended, or serves."""


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    line: int
    """Line of the page on which its text begins."""
    info: str
    text: str

    @property
    def is_commands(self) -> bool:
        return self.info.split(" ", 1)[0] == "bash"

    @property
    def reason(self) -> str | None:
        """Why it is not run; None: it is."""
        found = re.fullmatch(r"bash not run: (.+)", self.info)
        return found[1] if found else None

    @property
    def port(self) -> str | None:
        """Port on which it serves; None: it ends by itself."""
        found = re.fullmatch(r"bash serves on (\d+)", self.info)
        return found[1] if found else None


def blocks_of(page: str) -> list[Block]:
    """The fenced blocks of a page's text, without their indentation."""
    found = []
    for match in _FENCED.finditer(page):
        indent, info, text = match.groups()
        lines = (line.removeprefix(indent) for line in text.splitlines())
        found.append(Block(page[: match.start(3)].count("\n") + 1, info.strip(), "\n".join(lines)))
    return found


class Reader:
    """Someone who types the blocks of a page, on ports that are free.

    Args:
        checkout: Directory in which the blocks are typed.
        folder: An empty folder for logs and for what servers keep.
        is_brief: Measure prompts and answers of 16 tokens.
    """

    def __init__(self, checkout: Path, folder: Path, *, is_brief: bool) -> None:
        self._checkout = checkout
        self._folder = folder
        self._is_brief = is_brief
        self._ports = dict(zip(_PORTS, map(str, get_free_ports(len(_PORTS))), strict=True))
        self._shells: list[subprocess.Popen[bytes]] = []
        # A command fails if the server refuses its request.
        (folder / ".curlrc").write_text("fail-with-body\n")
        self._env = child_environment(
            {
                "CURL_HOME": str(folder),
                "ONCE": "1",
                "PORT": self._ports["30000"],
                "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(folder / "l3"),
            }
        )

    def run(self, block: Block) -> str:
        """Type a block; what it has written when it has ended, or serves.

        Raises:
            AssertionError: It fails, or takes too long.
        """
        text = block.text.replace("--model-path DIR", f"--model-path {BUILTIN_MODEL_DIR}")
        for command in _ON_30000:
            text = text.replace(command, f"{command} --port 30000")
        if self._is_brief:
            text = _LENGTH.sub(rf"\1 {_SHORT_TOKENS}", text)
        text = re.sub(r"\b\d+\b", lambda found: self._ports.get(found[0], found[0]), text)
        if block.port is not None:
            self.leave()
        log = self._folder / f"line {block.line}.log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                ["bash", "-e", "-c", text],
                cwd=self._checkout,
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._shells.append(process)
        deadline = time.monotonic() + _BLOCK_S
        while not (block.port is not None and _is_ready(self._ports[block.port])):
            said = log.read_text(errors="replace")
            status = process.poll()
            if status is not None:
                assert (status, block.port) == (0, None), f"{text}\nended with {status}:\n{said}"
                return said
            assert time.monotonic() < deadline, f"{text}\nafter {_BLOCK_S:.0f} s:\n{said}"
            time.sleep(0.1)
        return log.read_text(errors="replace")

    def leave(self) -> None:
        """End what blocks have left running, also behind shells that have ended."""
        for shell in self._shells:
            if shell.returncode is None:
                kill_process_tree(shell.pid)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(shell.pid, signal.SIGKILL)
            shell.wait()
        self._shells.clear()


def _is_ready(port: str) -> bool:
    """True if the router there knows healthy servers, or the server there is healthy."""
    for path in ("readiness", "health"):
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/{path}", timeout=5) as answer:
                return bool(answer.status == 200)
        except urllib.error.HTTPError as error:
            if error.code != 404:
                return False
        except OSError:
            return False
    return False


@contextlib.contextmanager
def reader(checkout: Path, folder: Path, *, is_brief: bool = False) -> Iterator[Reader]:
    """A reader of one page, of which nothing is left running behind the block."""
    made = Reader(checkout, folder, is_brief=is_brief)
    try:
        yield made
    finally:
        made.leave()
