"""`--hicache-storage-backend-extra-config`: JSON, or `@file` with JSON, YAML or TOML."""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Mapping
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
    source = text
    try:
        if text.startswith("@"):
            value = _read_file(Path(text[1:]))
        else:
            source = "its value"
            value = json.loads(text)
    except (OSError, ValueError, yaml.YAMLError) as error:
        cause = " ".join(str(error).split())
        raise ValueError(f"{FLAG}: cannot read {source}: {cause}") from None
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise ValueError(f"{FLAG}: expected an object of named settings, got {value!r}")
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
    text = path.read_text(encoding="utf-8")
    match path.suffix:
        case ".json":
            return json.loads(text)
        case ".yaml" | ".yml":
            return yaml.safe_load(text)
        case ".toml":
            return tomllib.loads(text)
    raise ValueError(f"unknown suffix {path.suffix!r}; use .json, .yaml, .yml or .toml")


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
