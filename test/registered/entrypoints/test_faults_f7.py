"""Row F7: models that cannot be served give one clear line and status 1, and run no code."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from rigs.servers.forked_servers import ForkedServer
from rigs.servers.spoiled_models import CASES, Case, pickled, start_refused
from sglang.srt.constants import BUILTIN_MODEL_DIR
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=1, suite="base-b-test-cpu")

QUICK = (
    "pickled", "booby-trapped", "weights-cut-short", "weights-huge-header",
    "weights-without-a-tensor",
)  # fmt: skip
"""`test_start_errors.py` has an architecture that is not known."""


@pytest.mark.parametrize("case", [c for c in CASES if c.name in QUICK], ids=lambda c: c.name)
def test_f7_one_clear_line(case: Case, tmp_path: Path) -> None:
    start_refused(case, tmp_path).check(case)


def test_f7_pickled_weights_are_served_on_request(tmp_path: Path) -> None:
    model = tmp_path / "pickled"
    shutil.copytree(BUILTIN_MODEL_DIR, model)
    pickled(model)
    with ForkedServer("--load-format", "pt", model=str(model)) as server:
        assert len(server.generate("name", 2, {"ignore_eos": True}).output_ids) == 2
