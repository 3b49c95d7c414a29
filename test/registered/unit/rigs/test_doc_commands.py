"""Commands in the documents can be pasted, and are tested or say why not."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import pytest

from rigs.doc_commands import Block, blocks_of
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=2, suite="base-a-test-cpu")

REPO: Final = Path(__file__).resolve().parents[4]
PAGES: Final = sorted(
    str(page.relative_to(REPO))
    for pattern in ("*.md", "docs/**/*.md", "python/sglang/*/*.md")
    for page in REPO.glob(pattern)
)
_BARE: Final = r"(?:\w+=\S* )*(?:python3?|pytest|pip|sglang|mooncake_(?:master|client)) -{0,2}\w"
"""Programs of `.venv` without its path. The path makes them work from any shell."""
_COMMAND: Final = rf"(?:\$ )?(?:{_BARE}|(?:\w+=\S* )*(?:\.venv/bin/|make \w|curl )|export \w)"


def problems(page: str, *, has_docstrings: bool = False) -> list[str]:
    """Reasons why a reader of `page` cannot paste its commands; one line for each.

    Args:
        page: Text of a page.
        has_docstrings: True if the page repeats docstrings of the sources, which name modules as
            Python does.
    """
    found = []
    rest = page
    for block in blocks_of(page):
        rest = rest.replace(block.text, "")
        lines = [line.strip() for line in block.text.splitlines()]
        if block.is_commands:
            if block.info != "bash" and not block.reason and not block.port:
                found.append(f"{block.line}: unknown info string {block.info!r}")
            lines = [line for line in lines if re.match(_BARE, line)]
            found += [f"{block.line}: name the program by its path: {line}" for line in lines]
        else:
            lines = [line for line in lines if re.match(_COMMAND, line)]
            found += [f"{block.line}: a command in a block of {block.info!r}" for _ in lines]
    found += [
        f"a command outside of a block: {line.strip()}"
        for line in rest.splitlines()
        if re.match(rf" {{4,}}{_COMMAND}", line)
    ]
    if not has_docstrings:
        spans = re.findall(r"`([^`\n]+)`", rest)
        found += [f"name the program by its path: {one}" for one in spans if re.match(_BARE, one)]
    return found


@pytest.mark.parametrize("page", PAGES)
def test_commands_of_every_page_can_be_pasted(page: str) -> None:
    assert problems((REPO / page).read_text(), has_docstrings=page.endswith("files.md")) == []


def test_every_page_is_looked_at() -> None:
    assert {"README.md", "SECURITY.md", "docs/hicache.md", "docs/changes/25083.md"} <= set(PAGES)
    assert any(
        block.is_commands for page in PAGES for block in blocks_of((REPO / page).read_text())
    )


PAGE: Final = """A page.

```bash serves on 30000
.venv/bin/sglang serve &
```

1. A list:

   ```bash not run: it needs a GPU
   make serve
   ```

```text
make no command
```
"""


def test_blocks_are_read_with_what_is_to_be_done() -> None:
    serves, not_run, text = blocks_of(PAGE)
    assert serves == Block(4, "bash serves on 30000", ".venv/bin/sglang serve &")
    assert (serves.is_commands, serves.port, serves.reason) == (True, "30000", None)
    assert not_run == Block(10, "bash not run: it needs a GPU", "make serve")
    assert (not_run.port, not_run.reason) == (None, "it needs a GPU")
    assert not text.is_commands


@pytest.mark.parametrize(
    ("page", "problem"),
    [
        ("```bash\nsglang serve\n```", "2: name the program by its path: sglang serve"),
        ("```bash\nA=1 python -m x\n```", "2: name the program by its path: A=1 python -m x"),
        ("```bash later\nls\n```", "2: unknown info string 'bash later'"),
        ("```\nexport A=1\n```", "2: a command in a block of ''"),
        ("Do:\n\n    make serve\n", "a command outside of a block: make serve"),
        ("Type `mooncake_master --rpc_port=1`.", "name the program by its path: mooncake_master -"),
        ("`.venv/bin/python -m x` and `make serve`, `mooncake_master` too", None),
        ("```bash\nA=1 .venv/bin/python -m x\n```\n\n    client -> server\n", None),
    ],
)
def test_what_hinders_pasting_is_found(page: str, problem: str | None) -> None:
    found = problems(page)
    if problem is None:
        assert found == []
    else:
        [line] = found
        assert line.startswith(problem)
