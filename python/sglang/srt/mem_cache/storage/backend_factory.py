"""Creates L3 backends by name: built-in, registered, and `dynamic` ones from a module path."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping
from typing import Any, ClassVar

from sglang.srt.environ import envs
from sglang.srt.mem_cache.device.state_spec import PoolName
from sglang.srt.mem_cache.storage.base import HiCacheStorage
from sglang.srt.mem_cache.storage.class_lookup import ClassPath, dynamic_class
from sglang.srt.mem_cache.storage.file_room import FileLimits
from sglang.srt.mem_cache.storage.types import (
    HiCacheStorageConfig,
    StoragePool,
    StorageUnavailable,
    StorageUnreachable,
)
from sglang.srt.utils.spelling import did_you_mean

logger = logging.getLogger(__name__)

DYNAMIC = "dynamic"
FILE = "file"


class StorageBackendFactory:
    """Creates backends; imports their modules on demand.

    The registry is the only module state here. Programs add to it before they start an engine.
    """

    _registry: ClassVar[dict[str, ClassPath]] = {
        FILE: ClassPath("sglang.srt.mem_cache.storage.file_store", "HiCacheFile"),
        "mooncake": ClassPath(
            "sglang.srt.mem_cache.storage.mooncake_store.mooncake_store", "MooncakeStore"
        ),
    }

    @classmethod
    def register_backend(cls, name: str, module_path: str, class_name: str) -> None:
        """Register `module_path.class_name` as `--hicache-storage-backend name`.

        Raises ValueError if another class has this name.
        """
        path = ClassPath(module_path, class_name)
        if name == DYNAMIC or cls._registry.get(name, path) != path:
            raise ValueError(f"storage backend name {name!r} is taken")
        cls._registry[name] = path

    @classmethod
    def create_backend(
        cls,
        backend_name: str,
        storage_config: HiCacheStorageConfig,
        mem_pool_host: StoragePool,
        *,
        extra_pools: Mapping[str, StoragePool] | None = None,
        **kwargs: Any,
    ) -> HiCacheStorage:
        """Create a backend and register every pool of the model with it.

        Args:
            backend_name: A registered name, or `dynamic` with `backend_name`, `module_path` and
                `class_name` in the extra config.
            storage_config: Passed to the backend, and set on it if its constructor does not do so.
            mem_pool_host: The primary pool.
            extra_pools: The other pools, by name.
            kwargs: Passed to backends that are not built in.

        Raises:
            ValueError: The name is unknown; a field is missing; the class cannot be loaded, is not
                a `HiCacheStorage`, or does not know one of the pools; or its constructor fails. One
                line.
            StorageUnavailable: The store does not answer, or does not take the memory of a pool.
        """
        if backend_name == DYNAMIC:
            path = dynamic_class(storage_config.extra_config or {})
        elif backend_name in cls._registry:
            path = cls._registry[backend_name]
        else:
            known = [*cls._registry, DYNAMIC]
            raise ValueError(
                f"--hicache-storage-backend {backend_name!r}: use one of: {', '.join(known)}"
                f"{did_you_mean(backend_name, known)}"
            )
        backend_class = _load(backend_name, path)
        if backend_name == FILE:
            root = envs.SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR.get()
            args: tuple[Any, ...] = (storage_config, root, FileLimits.from_env())
            kwargs = {}
        else:
            args = (storage_config,)
        try:
            backend: HiCacheStorage = backend_class(*args, **kwargs)
            if backend.storage_config is None:
                backend.storage_config = storage_config
            _register(backend, {PoolName.KV: mem_pool_host, **(extra_pools or {})})
        except (ValueError, StorageUnavailable):
            raise
        except (Exception, SystemExit) as error:
            raise _failure(backend_name, path, "cannot make", error) from error
        return backend


def _register(backend: HiCacheStorage, pools: Mapping[str, StoragePool]) -> None:
    """Register all pools with the backend; close the backend if it refuses one.

    Raises:
        ValueError: The backend refused a pool; names the pool and its bytes, as does a
            StorageUnavailable that the backend raised.
    """
    for name, pool in pools.items():
        try:
            backend.register_mem_host_pool_v2(pool, name)
        except BaseException as error:
            backend.close()
            if not isinstance(error, Exception):
                raise
            raise _not_registered(name, pool, error) from error


def _not_registered(name: str, pool: StoragePool, error: Exception) -> Exception:
    """`error`, which a backend raised for a pool, with the pool's name and bytes."""
    size = sum(buffer.nbytes for buffer in pool.get_hybrid_pool_buffer())
    known = isinstance(error, (ValueError, StorageUnavailable))
    cause = str(error) if known else f"{type(error).__name__}: {error}"
    text = f"host pool {name} of {size} bytes cannot be registered: {cause}"
    kinds = (StorageUnreachable, StorageUnavailable, ValueError)
    return next((kind for kind in kinds if isinstance(error, kind)), RuntimeError)(text)


def _load(name: str, path: ClassPath) -> Any:
    try:
        found = getattr(importlib.import_module(path.module_path), path.class_name)
    except (Exception, SystemExit) as error:
        # Importing runs the code of the module, which may raise anything.
        raise _failure(name, path, "cannot load", error) from error
    if not (isinstance(found, type) and issubclass(found, HiCacheStorage)):
        raise ValueError(f"--hicache-storage-backend {name}: {path} is not a HiCacheStorage")
    return found


def _failure(name: str, path: ClassPath, verb: str, error: BaseException) -> ValueError:
    """The error to raise for a failure of third-party code; logs the traceback."""
    logger.warning("--hicache-storage-backend %s: %s %s", name, verb, path, exc_info=error)
    cause = " ".join(f"{type(error).__name__}: {error}".split())
    return ValueError(f"--hicache-storage-backend {name}: {verb} {path}: {cause}")
