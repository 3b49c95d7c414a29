"""Mooncake's library, loaded with what of its settings differs here from its own defaults."""

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
    """The module `mooncake.store`: its errors alone go to stderr, and its retries are bounded.

    Mooncake reads the settings while its first library is loaded: nothing else here imports it.

    Raises:
        ValueError: The package or a shared library that it needs is missing; names them.
    """
    for field in (envs.MC_STORE_CLIENT_SETUP_RETRIES, envs.MC_LOG_LEVEL, envs.GLOG_minloglevel):
        field.export_default()
    try:
        return importlib.import_module("mooncake.store")
    except ImportError as error:
        raise ValueError(MOONCAKE_MISSING.format(cause=error)) from error
