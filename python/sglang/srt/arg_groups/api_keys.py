"""Reads the keys of a server, each from a flag, a file or the environment.

Every user of the machine can read a flag's value in the list of processes.
"""

from __future__ import annotations

import logging
import os
import stat
from typing import Final

from sglang.srt.environ import EnvField

logger = logging.getLogger(__name__)

MAX_KEY_BYTES: Final = 4096


def resolve_key(
    value: str | None, path: str | None, flag: str, variable: EnvField[str | None]
) -> str | None:
    """The key from the flag's value, from the file `path` of the flag `-file`, or from `variable`.

    Raises:
        ValueError: There are two sources, or the file has no key. No message shows a key.
    """
    in_environment = variable.get()
    sources = {flag: value, f"{flag}-file": path, variable.name: in_environment}
    given = [name for name, source in sources.items() if source is not None]
    if len(given) > 1:
        raise ValueError(f"{' and '.join(given)}: give the key once")
    if path is not None:
        return _read_key(path, f"{flag}-file")
    return in_environment if value is None else value


def _read_key(path: str, flag: str) -> str:
    """The key in a file of one line."""
    try:
        # Non-blocking, because opening a pipe would wait for a writer.
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as f:
            status = os.fstat(f.fileno())
            raw = f.read(MAX_KEY_BYTES + 1) if stat.S_ISREG(status.st_mode) else b""
        key = raw.decode().strip()
    except OSError as error:
        raise ValueError(f"{flag} {path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        key = ""
    if not key or len(raw) > MAX_KEY_BYTES or not key.isprintable():
        raise ValueError(
            f"{flag} {path}: expected a file with one line, the key, of at most {MAX_KEY_BYTES} "
            "bytes"
        )
    if status.st_mode & 0o077:
        logger.warning("%s %s: others may read the key: chmod 600", flag, path)
    return key
