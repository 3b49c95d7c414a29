"""The folder of a Mooncake client that offloads to disk: two clients in one damage each other."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Final

_MOST: Final = 256
"""Clients that may share the setting on one host."""
_SETTING: Final = "Mooncake setting ssd_offload_path (MOONCAKE_OFFLOAD_FILE_STORAGE_PATH)"


def claim_folder(parent: str) -> Path:
    """A folder below `parent` that no other client on this host has or gets.

    It is locked until this process ends, since nothing else ends such a client. A client of a later
    process gets it with the objects in it.

    Raises:
        ValueError: There is no such folder; one line with the setting.
    """
    for index in range(_MOST):
        path = Path(parent) / f"client_{index}"
        try:
            # Mooncake ends the process if it cannot use the folder.
            path.mkdir(parents=True, exist_ok=True)
            lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ValueError(f"{_SETTING}: cannot use {path}: {error.strerror}") from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            continue
        except OSError as error:
            os.close(lock)
            raise ValueError(
                f"{_SETTING}: cannot lock {path}: {error.strerror}; give a folder on a local disk"
            ) from None
        if os.access(path, os.R_OK | os.W_OK | os.X_OK):
            return path
        os.close(lock)
        raise ValueError(f"{_SETTING}: this user cannot write in {path}")
    raise ValueError(f"{_SETTING}: {parent} has {_MOST} clients; give each server one of its own")
