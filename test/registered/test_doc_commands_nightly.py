"""The commands of every page work as typed, but for those that say why they are not run here."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

from rigs.doc_commands import blocks_of, reader
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=600, suite="nightly-test-cpu", nightly=True)

REPO: Final = Path(__file__).parents[2]
PAGES: Final = sorted(
    str(page.relative_to(REPO))
    for page in (*REPO.glob("*.md"), *REPO.glob("docs/**/*.md"))
    if any(block.is_commands and not block.reason for block in blocks_of(page.read_text()))
)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("page", PAGES)
def test_each_block_ends_well_or_serves(page: str, tmp_path: Path) -> None:
    with reader(REPO, tmp_path) as types:
        for block in blocks_of((REPO / page).read_text()):
            if block.is_commands and not block.reason:
                print(f"{page}:{block.line}\n{block.text}", flush=True)
                print(types.run(block)[-2000:], flush=True)
