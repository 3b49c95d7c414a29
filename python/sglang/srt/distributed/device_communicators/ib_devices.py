"""Parser of `--disaggregation-ib-device`, which names InfiniBand devices, possibly by GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

ENGINE_FIELD: Final = "--disaggregation-ib-device (or MOONCAKE_DEVICE)"
"""Name of the setting of a Transfer Engine's devices, for errors."""
_FORMS: Final = (
    'use a list like mlx5_0,mlx5_1, a JSON object by GPU like {"0": "mlx5_0", "1": "mlx5_1"}, or '
    "the path of a .json file with such an object"
)


def parse_ib_device_config(
    ib_device_str: str | None, *, field: str = ENGINE_FIELD
) -> dict[int, str] | None:
    """Devices by GPU; None: all GPUs share one list, or there is none.

    Args:
        ib_device_str: A comma separated list, a JSON object, or the path of a file with one.
        field: Name of the setting, for the error.

    Raises:
        ValueError: The value has none of these forms; names the field and the remedy.
    """
    text = (ib_device_str or "").strip()
    shown = f"{field} {text}"
    if text.endswith(".json"):
        return _parse_object(_read(text, shown), shown)
    if text.startswith(("{", "[")):
        return _parse_object(text, shown)
    if text:
        _check_list(text, shown)
    return None


def get_ib_devices_for_gpu(
    ib_device_str: str | None, gpu_id: int | None, *, field: str = ENGINE_FIELD
) -> str | None:
    """The devices of one GPU, comma separated; None: the transport chooses.

    Args:
        gpu_id: None: the process has no GPU.

    Raises:
        ValueError: From `parse_ib_device_config`; or the object has no devices for this GPU, or
            there is no GPU.
    """
    by_gpu = parse_ib_device_config(ib_device_str, field=field)
    if by_gpu is None:
        return _normalized(ib_device_str or "") or None
    if gpu_id is None:
        raise ValueError(
            f"{field} has devices by GPU, and this process has none: use a list like mlx5_0,mlx5_1"
        )
    if gpu_id not in by_gpu:
        raise ValueError(
            f"{field} has no devices for GPU {gpu_id}, only for {sorted(by_gpu)}; add it"
        )
    return by_gpu[gpu_id]


def _read(path: str, shown: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ValueError(f"{shown}: cannot be read ({error}); {_FORMS}") from error


def _parse_object(text: str, shown: str) -> dict[int, str]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{shown}: not JSON ({error}); {_FORMS}") from error
    if not isinstance(value, dict) or not value:
        raise ValueError(f"{shown}: not a JSON object by GPU; {_FORMS}")
    by_gpu: dict[int, str] = {}
    for gpu, devices in value.items():
        if not gpu.isdecimal() or not isinstance(devices, str):
            raise ValueError(
                f"{shown}: {gpu!r}: {devices!r} is not a GPU's number with a list; {_FORMS}"
            )
        if int(gpu) in by_gpu:
            raise ValueError(f"{shown}: GPU {int(gpu)} is named twice; {_FORMS}")
        _check_list(devices, shown)
        by_gpu[int(gpu)] = _normalized(devices)
    return by_gpu


def _check_list(devices: str, shown: str) -> None:
    names = [name.strip() for name in devices.split(",")]
    wrong = [name for name in names if not name or not all(c.isalnum() or c in "_-." for c in name)]
    if wrong:
        raise ValueError(f"{shown}: {wrong[0]!r} is no device's name; {_FORMS}")


def _normalized(devices: str) -> str:
    return ",".join(name.strip() for name in devices.split(",") if name.strip())
