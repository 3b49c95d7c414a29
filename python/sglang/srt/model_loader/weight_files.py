"""Finds the weight files of a checkpoint, and identifies them. Needs no torch.

The identity of a model's weights distinguishes models in the cache's namespace. It is the xxh3-128
of config.json and of the weight files. Hashing reads every byte, so digests are cached by path,
size and modification time in a small JSON file. If that file is damaged or cannot be written, the
weights are hashed again.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import xxhash

from sglang.srt.utils.json_files import read_json, refuse_lfs_pointer

logger = logging.getLogger(__name__)

SAFETENSORS_INDEX: Final = "model.safetensors.index.json"
PICKLE_INDEX: Final = "pytorch_model.bin.index.json"
REMEDY: Final = "copy the file again"
CACHE_FILE = "weights_identity.json"
_CHUNK_BYTES = 8 << 20
_MAX_ENTRIES = 4096


def weight_files(directory: Path, load_format: str) -> list[Path]:
    """The files that hold a checkpoint's weights, sorted by name.

    Args:
        load_format: "auto", "safetensors", or "pt" for pickled files, which must be asked for.

    Raises:
        ValueError: There are no weight files; a shard that the index names is missing or a git-lfs
            pointer; or the weights are pickled and `load_format` is not "pt".
    """
    files = _find(directory, load_format)
    for file in files:
        refuse_lfs_pointer(file)
    return files


def _find(directory: Path, load_format: str) -> list[Path]:
    if load_format == "pt":
        files = _indexed_files(directory, load_format) or _glob(
            directory, ("pytorch_model*.bin", "*.pt", "*.pth")
        )
        if not files:
            raise ValueError(f"{directory} has no *.bin, *.pt or *.pth files to load as 'pt'")
        return files
    files = _indexed_files(directory, load_format) or _glob(directory, ("*.safetensors",))
    if files:
        return files
    if _glob(directory, ("*.bin", "*.pt", "*.pth")):
        raise ValueError(
            f"{directory} has pickled weights only (*.bin, *.pt), which are refused because "
            "unpickling can run code: convert them to safetensors, or ask for --load-format pt"
        )
    raise ValueError(
        f"{directory} has no *.safetensors files: the weights are missing, copy them there "
        "(or use --load-format dummy for random weights)"
    )


def _glob(directory: Path, patterns: tuple[str, ...]) -> list[Path]:
    # Some checkpoints have the same weights a second time under this name.
    found = {path for pattern in patterns for path in directory.glob(pattern)}
    return sorted(path for path in found if not path.name.startswith("consolidated"))


def file_of_each_tensor(directory: Path, load_format: str) -> dict[str, Path]:
    """The file that the checkpoint's index gives each tensor to; empty: there is no index.

    Args:
        load_format: See `weight_files`.

    Raises:
        ValueError: The index is damaged.
    """
    index = directory / _index_name(load_format)
    read = read_json(index)
    if read is None:
        return {}
    found = read.get("weight_map")
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found.values()):
        raise ValueError(
            f"{index} is not a valid index: weight_map must have the file of each tensor: {REMEDY}"
        )
    # An index is untrusted data: it may only name files in its own directory.
    return {tensor: directory / Path(name).name for tensor, name in found.items()}


def _index_name(load_format: str) -> str:
    return PICKLE_INDEX if load_format == "pt" else SAFETENSORS_INDEX


def _indexed_files(directory: Path, load_format: str) -> list[Path]:
    files = sorted(set(file_of_each_tensor(directory, load_format).values()))
    for file in files:
        # `Path.is_file` raises OSError for a name that is too long.
        if not os.path.isfile(file):
            raise ValueError(
                f"{file} is missing though {_index_name(load_format)} names it: {REMEDY}"
            )
    return files


def weights_identity(
    model_path: str,
    *,
    load_format: str,
    random_seed: int = 0,
    rounding: str = "",
    has_draft_layer: bool = False,
    reading: str = "",
    cache_dir: Path | None = None,
) -> str:
    """Identity of the weights of the directory `model_path` under `load_format`.

    Args:
        load_format: See `LoadConfig`. The identity of "dummy" weights comes from config.json and
            the random seed.
        rounding: Name of the format to which plain or random weights are rounded; empty: none.
        has_draft_layer: True if the draft layer is loaded too. Its state is a part of each page.
        reading: Choices made in reading the files, if the files allow several; else empty.
        cache_dir: Directory in which digests are cached; None: `~/.cache/sglang`.

    Returns:
        32 hexadecimal digits.

    Raises:
        ValueError: The directory has no config.json or no weights.
    """
    config = config_file(model_path)
    draft = " and a draft layer" if has_draft_layer else ""
    if load_format == "dummy":
        digest = xxhash.xxh3_128(b"dummy 3")  # the generator's version
        digest.update(config.read_bytes())
        digest.update(f"seed {random_seed}{rounding}{draft}".encode())
        return digest.hexdigest()
    cache = _DigestCache((cache_dir or Path.home() / ".cache" / "sglang") / CACHE_FILE)
    digest = xxhash.xxh3_128(b"files")
    for file in (config, *weight_files(Path(model_path), load_format)):
        digest.update(bytes.fromhex(cache.digest(file)))
    cache.save()
    digest.update(f"{rounding}{draft}{reading}".encode())
    return digest.hexdigest()


def config_digest(model_path: str) -> str:
    """xxh3-128 of the directory's config.json, 32 hexadecimal digits.

    Raises:
        ValueError: The directory has no config.json.
    """
    return xxhash.xxh3_128_hexdigest(config_file(model_path).read_bytes())


def config_values(model_path: str) -> dict[str, str]:
    """The values of the directory's config.json, as JSON, by name; `a.b` is `b` in the object `a`.

    Raises:
        ValueError: There is no config.json, or it is not a JSON object.
    """
    raw = read_json(config_file(model_path))
    assert raw is not None, "it is there"
    return dict(_leaves("", raw))


def _leaves(prefix: str, values: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in values.items():
        if isinstance(value, dict) and value:
            yield from _leaves(f"{prefix}{name}.", value)
        else:
            yield f"{prefix}{name}", json.dumps(value, sort_keys=True)


def config_file(model_path: str) -> Path:
    """The directory's config.json. Raises ValueError: there is none."""
    config = Path(model_path) / "config.json"
    if not os.path.isfile(config):
        raise ValueError(f"{model_path} has no config.json: it is not a checkpoint directory")
    return config


class _DigestCache:
    """Digests of files by (path, size, mtime), in one JSON file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known = _read_cache(path)
        self._fresh: dict[str, str] = {}

    def digest(self, file: Path) -> str:
        """32 hexadecimal digits: xxh3-128 of the file's bytes."""
        # Follow links, because snapshots are often directories of links to shared blobs.
        real = file.resolve()
        stat = real.stat()
        key = f"{real}:{stat.st_size}:{stat.st_mtime_ns}"
        if key not in self._known:
            self._known[key] = self._fresh[key] = _hash_file(real)
        return self._known[key]

    def save(self) -> None:
        """Add the new digests to the file atomically, keeping entries of other processes."""
        if not self._fresh:
            return
        entries = {**_read_cache(self._path), **self._fresh}
        kept = dict(list(entries.items())[-_MAX_ENTRIES:])
        temporary: str | None = None
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(
                "w", dir=self._path.parent, prefix=CACHE_FILE, delete=False, encoding="utf-8"
            ) as file:
                temporary = file.name
                json.dump(kept, file)
            os.replace(temporary, self._path)
        except OSError as error:
            logger.warning("Weight digests are not remembered in %s: %s", self._path, error)
            if temporary is not None:
                Path(temporary).unlink(missing_ok=True)


def _read_cache(path: Path) -> dict[str, str]:
    """The well-formed entries of the cache file."""
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(entries, dict):
        return {}
    return {key: value for key, value in entries.items() if _is_digest(value)}


def _is_digest(value: object) -> bool:
    return isinstance(value, str) and len(value) == 32 and set(value) <= set("0123456789abcdef")


def _hash_file(path: Path) -> str:
    digest = xxhash.xxh3_128()
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
    return digest.hexdigest()
