"""`--hicache-storage-backend-extra-config`: JSON, or `@file` with JSON, YAML or TOML.

It may come over HTTP while the server runs. Whatever it is, reading it takes bounded time and
memory and ends in plain values that can be shown as JSON, or in a ValueError.
"""

from __future__ import annotations

import difflib
import json
import math
import os
import re
import stat
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import yaml

FLAG: Final = "--hicache-storage-backend-extra-config"

CONTROLLER_KEYS: Final = frozenset(
    {
        "prefetch_threshold",
        "prefetch_timeout_base",
        "prefetch_timeout_per_ki_token",
        "prefetch_timeout_max",
        "hicache_storage_pass_prefix_keys",
        "on_unreachable",
        "verify_checksum",
    }
)
"""What every backend's extra config may say."""

BACKEND_KEYS: Final[Mapping[str, frozenset[str]]] = {
    "file": frozenset(),
    "mooncake": frozenset(
        {
            "master_server_address",
            "local_hostname",
            "metadata_server",
            "global_segment_size",
            "local_buffer_size",
            "protocol",
            "device_name",
            "check_server",
            "master_metrics_port",
            "client_server_address",
            "standalone_storage",
        }
    ),
}
"""Further keys by backend. Absent: `dynamic`, whose class reads what it likes."""

_PUBLIC_KEYS: Final = CONTROLLER_KEYS.union(*BACKEND_KEYS.values())
_MAX_BYTES: Final = 64 * 1024
_MAX_VALUES: Final = 10_000
_MAX_DEPTH: Final = 32
_MAX_INT: Final = 2**63
"""Messages between processes have 64 bits for an integer."""
_SECRET: Final = re.compile("key|token|secret|password|credential", re.IGNORECASE)
_USER_INFO: Final = re.compile(r"(://)[^/@\s]*@")


def parse_extra_config(text: str | None) -> dict[str, Any]:
    """The object that `text` holds; empty for None.

    Args:
        text: A JSON object, or `@path` of a `.json`, `.yaml`, `.yml` or `.toml` file.

    Raises:
        ValueError: Unreadable, malformed, or not an object; one line that names the flag.
    """
    if text is None or not text.strip():
        return {}
    source = text if text.startswith("@") else "its value"
    try:
        value = _read_file(Path(text[1:])) if text.startswith("@") else json.loads(_bounded(text))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        cause = " ".join(str(error).split())
        raise ValueError(f"{FLAG}: cannot read {source}: {cause}") from None
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise ValueError(
            f"{FLAG}: expected an object of named settings, got one of type {type(value).__name__}"
        )
    for key, one in value.items():
        try:
            _check(key, 0, iter(()))
            _check(one, 0, iter(range(_MAX_VALUES)))
        except ValueError as error:
            raise ValueError(f"{FLAG}: {key!r}: {error}") from None
    return value


def without_secrets(config: Mapping[str, Any]) -> dict[str, Any]:
    """`config` to be shown: what is named like a secret is hidden, and credentials in addresses.

    The settings that are listed above hold no secret, whatever their names.
    """
    return {
        key: "***" if key not in _PUBLIC_KEYS and _SECRET.search(key) else _shown(value)
        for key, value in config.items()
    }


def public_text(text: str | None) -> str | None:
    """The flag's value to be shown: a path as it is, JSON `without_secrets`."""
    if text is None or not text.strip() or text.startswith("@"):
        return text
    return json.dumps(without_secrets(parse_extra_config(text)))


def _shown(value: Any) -> Any:
    if isinstance(value, Mapping):
        return without_secrets({str(key): one for key, one in value.items()})
    if isinstance(value, list):
        return [_shown(one) for one in value]
    return _USER_INFO.sub(r"\1***@", value) if isinstance(value, str) else value


def _read_file(path: Path) -> Any:
    if path.suffix not in (".json", ".yaml", ".yml", ".toml"):
        raise ValueError(f"unknown suffix {path.suffix!r}; use .json, .yaml, .yml or .toml")
    text = _read_text(path)
    match path.suffix:
        case ".json":
            return json.loads(text)
        case ".toml":
            return tomllib.loads(text)
    return yaml.safe_load(text)


def _read_text(path: Path) -> str:
    """A regular file's text: others may wait for a writer, or have no end."""
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError("no regular file")
        return _bounded(file.read(_MAX_BYTES + 1).decode())


def _bounded(text: str) -> str:
    if len(text) > _MAX_BYTES:
        raise ValueError(f"at most {_MAX_BYTES} bytes are read")
    return text


def _check(value: Any, depth: int, budget: Iterator[int]) -> None:
    """Refuse what JSON or a message cannot hold, and what is too much of it.

    `budget` has an item for each value: in YAML one list can be named many times, or by itself.
    """
    if depth > _MAX_DEPTH:
        raise ValueError(f"nested more than {_MAX_DEPTH} deep")
    match value:
        case None | bool():
            return
        case int():
            if not -_MAX_INT <= value < _MAX_INT:
                raise ValueError(f"{value!r:.40} has more than 64 bits")
        case float():
            if not math.isfinite(value):
                raise ValueError(f"{value!r} is no number")
        case str():
            if any("\ud800" <= character <= "\udfff" for character in value):
                raise ValueError("a text that is no Unicode")
        case list() | dict():
            for part in value if isinstance(value, list) else [*value, *value.values()]:
                if next(budget, None) is None:
                    raise ValueError(f"more than {_MAX_VALUES} values")
                _check(part, depth + 1, budget)
        case _:
            raise ValueError(
                f"a value of type {type(value).__name__}: use text, numbers, true, false, null"
            )


def check_extra_config_keys(backend: str, config: Mapping[str, Any]) -> None:
    """Refuse settings that `backend` would ignore.

    Raises:
        ValueError: Naming the setting and the nearest one that exists.
    """
    backend_keys = BACKEND_KEYS.get(backend)
    if backend_keys is None:
        return
    known = CONTROLLER_KEYS | backend_keys
    for key in config:
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1)
            hint = (
                f"did you mean {close[0]!r}?" if close else f"it takes {', '.join(sorted(known))}"
            )
            raise ValueError(f"{FLAG}: backend {backend} knows no {key!r}; {hint}")
