"""News for users: each fragment is listed, under one of the headings that pyproject.toml names."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path
from typing import Final

import pytest

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=2, suite="base-a-test-cpu")

REPO: Final = Path(__file__).resolve().parents[3]


def test_each_fragment_is_listed() -> None:
    command = [sys.executable, "-m", "towncrier", "build", "--draft", "--version", "next"]
    listed = subprocess.run(command, cwd=REPO, check=True, capture_output=True, text=True).stdout
    fragments = [path for path in (REPO / "newsfragments").iterdir() if path.suffix == ".md"]
    missing = [path.name for path in fragments if path.read_text().strip() not in listed]
    assert not missing, f"their kind is change, feature or bugfix: {missing}"


def test_what_the_package_is_warned_about_is_an_error() -> None:
    for module in ("sglang", "sglang.srt.utils.files"):
        with pytest.raises(DeprecationWarning, match="old"):
            warnings.warn_explicit("old", DeprecationWarning, "file.py", 1, module)
    with warnings.catch_warnings(record=True):
        warnings.warn_explicit("old", DeprecationWarning, "file.py", 1, "sglang_router.launch")
