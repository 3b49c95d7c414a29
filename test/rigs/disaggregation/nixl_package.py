"""NIXL's package for tests: that of the environment, or the one of `make nightly`.

Importing this module puts the latter on the path of this process and of its forks.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

import pytest

from sglang.srt.distributed.device_communicators.nixl_library import has_nixl

_FOLDER: Final = Path(__file__).parents[3] / ".venv" / "nixl"


if not has_nixl() and _FOLDER.is_dir():
    sys.path.append(str(_FOLDER))

_MISSING: Final = "no package nixl-cu13 (extra nixl; make nightly installs it)"
NOT_DRAWN: Final = f"NIXL is not drawn: {_MISSING}"
"""What drivers say without the package."""
__all__ = ["NOT_DRAWN", "has_nixl", "needs_nixl"]
needs_nixl: Final = pytest.mark.skipif(not has_nixl(), reason=_MISSING)
