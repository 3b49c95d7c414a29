"""`--hicache-storage-backend-extra-config`: JSON, or `@file` with JSON, YAML or TOML.

The configuration may also come over HTTP while the server runs. Reading it takes bounded time and
memory; it gives plain values that JSON can express, or raises ValueError.
"""

from __future__ import annotations

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

from sglang.srt.utils.spelling import near_misspelling

FLAG: Final = "--hicache-storage-backend-extra-config"

CONTROLLER_KEYS: Final = frozenset(
    {
        "prefetch_threshold",
        "prefetch_timeout_base",
        "prefetch_timeout_per_ki_token",
        "prefetch_timeout_max",
        "hicache_storage_pass_prefix_keys",
        "on_unreachable",
        "tp_lcm_size",
        "verify_checksum",
    }
)
"""Keys that the extra config of every backend may have."""

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
            "enable_ssd_offload",
            "ssd_offload_path",
            "tenant_id",
            "extra_backend_tag",
            "enable_group_semantics",
        }
    ),
}
"""Further keys of each backend. `dynamic` is absent, because its class may read any key."""

MACHINE_KEYS: Final = frozenset(
    {"local_hostname", "device_name", "client_server_address", "ssd_offload_path"}
)
"""Keys that describe a machine, and so may differ between the machines of a server."""

_PUBLIC_KEYS: Final = CONTROLLER_KEYS.union(*BACKEND_KEYS.values())
_MAX_BYTES: Final = 64 * 1024
_MAX_VALUES: Final = 10_000
_MAX_DEPTH: Final = 32
_MAX_INT: Final = 2**63
"""Messages between processes have 64 bits for an integer."""
_SECRET: Final = re.compile("key|token|secret|password|credential", re.IGNORECASE)
_USER_INFO: Final = re.compile(r"(://)[^/@\s]*@")


def parse_extra_config(text: str | None) -> dict[str, Any]:
    """The object in `text`: a JSON object, or `@path` of a `.json`, `.yaml`, `.yml` or `.toml`
    file; empty for None. A ValueError of one line names the flag if the text is unreadable,
    malformed or not an object."""
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
    """`config` for display: values with secret-looking names and credentials in addresses are
    hidden, but not the settings listed above."""
    return {
        key: "***" if key not in _PUBLIC_KEYS and _SECRET.search(key) else _shown(value)
        for key, value in config.items()
    }


def public_text(text: str | None) -> str | None:
    """The flag's value for display: a path unchanged, JSON through `without_secrets`."""
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
    """The text of a regular file. Other files could block for ever or be endless."""
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError("not a regular file")
        return _bounded(file.read(_MAX_BYTES + 1).decode())


def _bounded(text: str) -> str:
    if len(text) > _MAX_BYTES:
        raise ValueError(f"at most {_MAX_BYTES} bytes are read")
    return text


def _check(value: Any, depth: int, budget: Iterator[int]) -> None:
    """Refuse values that JSON or a message cannot express, deep nesting and too many values.

    `budget` yields one item for each value that is still allowed. YAML can refer to one list many
    times, and a list can contain itself.
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
                raise ValueError(f"{value!r} is not a finite number")
        case str():
            if any("\ud800" <= character <= "\udfff" for character in value):
                raise ValueError("a text with a lone surrogate")
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
    """Refuse settings that `backend` would ignore: a ValueError that suggests the nearest name."""
    backend_keys = BACKEND_KEYS.get(backend)
    if backend_keys is None:
        return
    known = CONTROLLER_KEYS | backend_keys
    for key in config:
        if key not in known:
            near = near_misspelling(key, known)
            hint = f"did you mean {near!r}?" if near else f"it takes {', '.join(sorted(known))}"
            raise ValueError(f"{FLAG}: backend {backend} knows no {key!r}; {hint}")
