"""The commands of README.md work as typed, and leave nothing in the checkout.

`test_doc_commands_nightly.py` types those of the other pages.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Final

import psutil
import pytest

import sglang
from rigs.doc_commands import Block, blocks_of, reader
from sglang.srt.utils.network import wait_until
from sglang.srt.utils.process import is_alive
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=28, suite="base-b-test-cpu")

REPO: Final = Path(__file__).parents[2]
README: Final = REPO / "README.md"


def visible() -> set[str]:
    """Names in the checkout's root, but those that git ignores there."""
    ignored = {line.strip("/") for line in (REPO / ".gitignore").read_text().splitlines()}
    return {path.name for path in REPO.iterdir()} - ignored


def is_slow(block: Block) -> bool:
    """Other tests start what `make serve` and `make serve-pd` do; the nightly ones type it."""
    return block.text.startswith("make ")


def test_the_readmes_commands_run(tmp_path: Path) -> None:
    blocks = [one for one in blocks_of(README.read_text()) if one.is_commands and not one.reason]
    before = visible()
    with reader(REPO, tmp_path, is_brief=True) as types:
        said = [types.run(block) for block in blocks if not is_slow(block)]
    assert '"content":"7391"' in "".join(said)
    assert "Successful requests" in said[-1]
    assert "prefill" in said[-1]
    assert visible() == before


def test_what_blocks_leave_running_is_ended(tmp_path: Path) -> None:
    left: list[psutil.Process] = []
    with reader(REPO, tmp_path) as types:
        for line in (1, 2):
            said = types.run(Block(line, "bash", "sleep 600 & echo $!"))
            left.append(psutil.Process(int(said)))
        with pytest.raises(AssertionError, match="ended with 1"):
            types.run(Block(3, "bash", "false"))
    assert len(left) == 2
    assert wait_until(lambda: not any(map(is_alive, left)), 60)


def test_the_command_that_set_up_installs() -> None:
    command = Path(sys.executable).parent / "sglang"
    assert subprocess.check_output([command, "--version"], text=True) == f"{sglang.__version__}\n"


@pytest.mark.parametrize(("target", "script"), [("serve", "serve"), ("serve-pd", "serve_pd")])
def test_make_passes_flags(target: str, script: str) -> None:
    # A make above this test (`make test`) would have this one name its folder and take its flags.
    apart = ["env", "-u", "MAKEFLAGS", "-u", "MAKELEVEL", "-u", "MFLAGS"]
    command = [*apart, "make", "-n", target, "PORT=31000", "ARGS=--max-total-tokens 8192"]
    said = subprocess.check_output(command, cwd=REPO, text=True)
    assert said.split() == [f"scripts/{script}.sh", *"--port 31000 --max-total-tokens 8192".split()]
