"""Loads Mooncake's library with the settings that differ here from its own defaults."""

from __future__ import annotations

import functools
import importlib
import logging
import os
from pathlib import Path
from types import ModuleType
from typing import Final

from sglang.srt.distributed.device_communicators.mooncake_listeners import redirect_binds
from sglang.srt.distributed.device_communicators.mooncake_log import redirect_log
from sglang.srt.environ import envs

logger = logging.getLogger(__name__)

MOONCAKE_MISSING: Final = (
    "{user}: Mooncake cannot be loaded ({cause}); install mooncake-transfer-engine and the "
    "libraries libibverbs1 and libnuma1"
)
STORE_USER: Final = "--hicache-storage-backend mooncake"
ENGINE_USER: Final = "Transfer Engine"


def load_mooncake() -> ModuleType:
    """Load the module `mooncake.store`. It logs only errors to stderr, and its retries are bounded.

    Raises:
        ValueError: The package or a shared library that it needs is missing; names them.
    """
    return _load("mooncake.store", STORE_USER)


def load_transfer_engine() -> ModuleType:
    """Load the module `mooncake.engine`. It ends a stalled TCP transfer after ten seconds.

    Its default limit is as long as its calls wait, so that either the transfer or the call could
    end first.

    Raises:
        ValueError: The package or a shared library that it needs is missing; names them.
    """
    for field in (
        envs.MC_TCP_PROGRESS_TIMEOUT_SEC,
        envs.MC_TCP_STATUS_TIMEOUT_SEC,
        envs.MC_TRANSFER_TIMEOUT,
    ):
        field.export_default()
    return _load("mooncake.engine", ENGINE_USER)


def _load(module: str, user: str) -> ModuleType:
    # Mooncake reads these variables when its first library is loaded: no other module here may
    # import it.
    for field in (envs.MC_STORE_CLIENT_SETUP_RETRIES, envs.MC_LOG_LEVEL, envs.GLOG_minloglevel):
        field.export_default()
    try:
        loaded = importlib.import_module(module)
    except ImportError as error:
        raise ValueError(MOONCAKE_MISSING.format(user=user, cause=error)) from error
    _redirect(module)
    return loaded


@functools.cache
def _redirect(module: str) -> None:
    """Redirect what the libraries of `module` bind and log, once: the search takes 25 ms."""
    package = Path(os.path.realpath(str(importlib.import_module("mooncake").__file__))).parent
    # Its own libraries, and those that the wheel carries along (`mooncake_*.libs`).
    libraries = str(package.parent / "mooncake")
    binds, logs = redirect_binds(libraries), redirect_log(libraries)
    logger.debug("%s: %d imports of bind and %d of stderr redirected", module, binds, logs)
