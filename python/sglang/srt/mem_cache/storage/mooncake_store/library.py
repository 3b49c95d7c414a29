"""Loads Mooncake's library with this engine's defaults of its settings."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Final

from sglang.srt.environ import envs

MOONCAKE_MISSING: Final = (
    "--hicache-storage-backend mooncake: Mooncake cannot be loaded ({cause}); install "
    "mooncake-transfer-engine and the libraries libibverbs1 and libnuma1"
)


def load_mooncake() -> ModuleType:
    """Import the module `mooncake.store`, with bounded retries and only errors on stderr.

    Mooncake reads its settings while its first library loads, so nothing else here imports it.

    Raises:
        ValueError: The package or a shared library is missing; the message names it.
    """
    for field in (envs.MC_STORE_CLIENT_SETUP_RETRIES, envs.MC_LOG_LEVEL, envs.GLOG_minloglevel):
        field.export_default()
    try:
        return importlib.import_module("mooncake.store")
    except ImportError as error:
        raise ValueError(MOONCAKE_MISSING.format(cause=error)) from error
