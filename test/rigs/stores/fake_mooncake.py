"""A fake of Mooncake's store class: objects in a dict, recorded calls, answers set by tests."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from sglang.srt.mem_cache.storage.mooncake_store import base_store, client

_NOT_FOUND = -704


class FakeMooncake:
    """One `MooncakeDistributedStore`. Test threads; no locks.

    `calls` has the names of calls that moved, queried or closed, in order. A function in `answers`,
    under the name of a call, answers in place of the dict; it gets the call's arguments.
    """

    def __init__(self, objects: dict[str, bytes]) -> None:
        self.objects = objects
        self.calls: list[str] = []
        self.answers: dict[str, Callable[..., Any]] = {}
        self.memory: dict[int, int] = {}
        """Registered bytes by address."""
        self.groups: dict[str, str] = {}
        """Group of each object that was put with one."""
        self.is_closed = False

    def _answer(self, name: str, otherwise: Callable[..., Any], *arguments: Any) -> Any:
        assert not self.is_closed, f"{name} on a closed store crashes the process"
        self.calls.append(name)
        return self.answers.get(name, otherwise)(*arguments)

    def setup(self, *_: Any) -> int:
        return 0

    def setup_dummy(self, *_: Any) -> int:
        return 0

    def register_buffer(self, address: int, size: int) -> int:
        self.memory[address] = size
        return 0

    def unregister_buffer(self, address: int) -> int:
        del self.memory[address]
        return 0

    def close(self) -> int:
        self._answer("close", lambda: 0)
        self.is_closed = True
        return 0

    def health_check(self) -> int:
        return 0

    def batch_is_exist(self, keys: list[str]) -> list[int]:
        found: list[int] = self._answer(
            "batch_is_exist", lambda keys: [int(key in self.objects) for key in keys], keys
        )
        return found

    def get_size(self, key: str) -> int:
        size: int = self._answer(
            "get_size",
            lambda key: len(self.objects[key]) if key in self.objects else _NOT_FOUND,
            key,
        )
        return size

    def remove(self, key: str, force: bool) -> int:
        def drop(key: str) -> int:
            return 0 if self.objects.pop(key, None) is not None else _NOT_FOUND

        code: int = self._answer("remove", drop, key)
        return code

    def put(self, key: str, value: bytes) -> int:
        def keep(key: str, value: bytes) -> int:
            self.objects.setdefault(key, bytes(value))
            return 0

        code: int = self._answer("put", keep, key, value)
        return code

    def get(self, key: str) -> bytes:
        raw: bytes = self._answer("get", lambda key: self.objects.get(key, b""), key)
        return raw

    def upsert(self, key: str, value: bytes) -> int:
        def keep(key: str, value: bytes) -> int:
            self.objects[key] = bytes(value)
            return 0

        code: int = self._answer("upsert", keep, key, value)
        return code

    def get_batch(self, keys: list[str]) -> list[bytes]:
        raw: list[bytes] = self._answer(
            "get_batch", lambda keys: [self.objects.get(key, b"") for key in keys], keys
        )
        return raw

    def batch_put_from_multi_buffers(
        self,
        keys: list[str],
        ptrs: list[list[int]],
        sizes: list[list[int]],
        config: SimpleNamespace | None = None,
    ) -> list[int]:
        if config is not None:
            assert len(config.group_ids) == len(keys)
            self.groups.update(zip(keys, config.group_ids, strict=True))

        def keep(keys: list[str]) -> list[int]:
            for key, parts, lengths in zip(keys, ptrs, sizes, strict=True):
                pieces = map(ctypes.string_at, parts, lengths)
                self.objects.setdefault(key, b"".join(pieces))
            return [0] * len(keys)

        codes: list[int] = self._answer("batch_put_from_multi_buffers", keep, keys)
        return codes

    def batch_get_into_multi_buffers(
        self, keys: list[str], ptrs: list[list[int]], sizes: list[list[int]]
    ) -> list[int]:
        def fill(keys: list[str]) -> list[int]:
            codes = []
            for key, parts, lengths in zip(keys, ptrs, sizes, strict=True):
                raw = self.objects.get(key)
                if raw is None or len(raw) != sum(lengths):
                    codes.append(_NOT_FOUND if raw is None else -800)
                    continue
                for address, length in zip(parts, lengths, strict=True):
                    ctypes.memmove(address, raw, length)
                    raw = raw[length:]
                codes.append(sum(lengths))
            return codes

        codes: list[int] = self._answer("batch_get_into_multi_buffers", fill, keys)
        return codes


class FakeMooncakes(list[FakeMooncake]):
    """The stores that were created, oldest first. All share their objects."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        """Replace Mooncake in new clients by fakes, whose master always answers."""
        super().__init__()
        objects: dict[str, bytes] = {}

        def make() -> FakeMooncake:
            self.append(FakeMooncake(objects))
            return self[-1]

        module = SimpleNamespace(MooncakeDistributedStore=make, ReplicateConfig=SimpleNamespace)
        patch.setattr(client, "load_mooncake", lambda: module)
        patch.setattr(client, "check_reachable", lambda config: None)
        patch.setattr(base_store, "settle_protocol", lambda config, device, rank: ("tcp", ""))
