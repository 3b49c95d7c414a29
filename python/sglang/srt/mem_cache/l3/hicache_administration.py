"""Changes of L3 while the server runs: one at a time, each in a thread that may fail or hang.

A change has two parts. Its work runs in a thread of its own: reading a configuration, importing a
backend, connecting, clearing, closing. Its duration cannot be bounded. The rest runs in the
scheduler's thread, at the tick at which the ranks agree that the work has ended.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeVar

from sglang.srt.constants import LONGEST_STORAGE_CHANGE_S
from sglang.srt.distributed.device_communicators.mooncake_library import log_exposed_ports
from sglang.srt.distributed.rank_group import RankGroup, gather_texts
from sglang.srt.mem_cache.l2.host_backup import HostBackup
from sglang.srt.mem_cache.l3.store_connection import PreparedChange, StoreConnection
from sglang.srt.mem_cache.storage.types import StorageUnavailable
from sglang.srt.mem_cache.tree.on_all_ranks import MOST_REASON_BYTES, reasons
from sglang.srt.mem_cache.tree.tick_sync import Progress, Status
from sglang.srt.utils.background_call import BackgroundCall

logger = logging.getLogger(__name__)

_MAX_LEFT_BEHIND: Final = 4
"""Most changes that were given up and still hang: each keeps a thread and its resources."""
_TICK_S: Final = 0.01
_NOT_ATTACHED: Final = "no storage backend is attached"
_EXPECTED: Final = (ValueError, StorageUnavailable)

T = TypeVar("T")


class ChangeResult(NamedTuple):
    """Outcome of a change."""

    done: bool
    message: str
    """The work done, or the reason why not. One line."""


@dataclass(frozen=True, slots=True)
class _Change:
    what: str
    call: BackgroundCall[Any]
    accept: Callable[[Any], str]
    on_failure: Callable[[], None]
    only_prepares: bool
    """True: `accept` waits for `settle`."""


class StorageAdministration:
    """The change under way, and the result of the last one. Scheduler thread only.

    Requests may run during a change; they use no L3. Owns one thread, `hicache-administration`,
    while a change is under way.

    Args:
        backup: Copies to L2, whose policy changes with L3.
        is_busy: Tells what is under way in the cache, by kind.
        ranks: All ranks; either all make a change or none.
    """

    def __init__(
        self,
        store: StoreConnection,
        backup: HostBackup,
        is_busy: Callable[[], dict[str, int]],
        ranks: RankGroup,
    ) -> None:
        self._store = store
        self._backup = backup
        self._is_busy = is_busy
        self._ranks = ranks
        self._change: _Change | None = None
        self._result: ChangeResult | None = None
        self._hanging: list[BackgroundCall[Any]] = []

    def begin_attaching(
        self,
        backend: str,
        extra_config: str | None,
        prefetch_policy: str | None,
        write_policy: str | None,
        *,
        only_prepares: bool = False,
    ) -> None:
        """Attach L3, or change the policies of the one that is attached. `only_prepares`: nothing
        changes before `settle`.

        Raises:
            ValueError: A change or another operation is under way, or the write policy does not
                exist or does not work here.
        """
        self._refuse_while_busy()
        if write_policy is not None and write_policy not in self._backup.POLICIES:
            choices = ", ".join(self._backup.POLICIES)
            raise ValueError(f"hicache_write_policy {write_policy!r} is none of {choices}")

        def prepare() -> PreparedChange:
            change = self._store.prepare(backend, extra_config, prefetch_policy)
            if change.store is not None:
                log_exposed_ports(logger)
            return change

        def take_up(change: PreparedChange) -> str:
            self._backup.write_policy = write_policy or self._backup.write_policy
            return self._store.take_up(change)

        work = self._unless_too_many_hang(prepare)
        discard = PreparedChange.discard
        self._begin("attaching", work, take_up, discard=discard, only_prepares=only_prepares)

    def begin_detaching(self) -> None:
        """Detach L3 at once, and close its client; its objects and the policies stay.

        Raises ValueError while a change or another operation is under way.
        """
        self._refuse_while_busy()
        attached = self._store.attached
        if attached is None:
            self._begin("detaching", lambda: None, lambda _: _NOT_ATTACHED)
            return

        def describe(closed: bool) -> str:
            rest = "" if closed else "; its client could not be closed and is left behind"
            return f"detached {attached.backend}{rest}"

        self._begin("detaching", attached.close, describe)
        self._store.detach()

    def begin_clearing(self) -> None:
        """Remove this namespace's objects from L3.

        Raises ValueError while a change or another operation is under way, or without an L3.
        """
        self._refuse_while_busy()
        attached = self._store.attached
        if attached is None:
            raise ValueError(_NOT_ATTACHED)

        def describe(_: None) -> str:
            self._store.note_cleared()
            return f"cleared {attached.backend}"

        # If it fails, some of the objects may have been removed nevertheless.
        work = self._unless_too_many_hang(attached.clear)
        self._begin("clearing", work, describe, on_failure=self._store.note_cleared)

    def _refuse_while_busy(self) -> None:
        if busy := self._is_busy():
            raise ValueError(f"busy: {busy}")

    def _begin(
        self,
        what: str,
        work: Callable[[], T],
        accept: Callable[[T], str],
        *,
        discard: Callable[[T], object] | None = None,
        on_failure: Callable[[], None] = lambda: None,
        only_prepares: bool = False,
    ) -> None:
        """Start a change.

        Args:
            what: Noun for the change in messages.
            work: Runs in the change's thread. Raises ValueError or StorageUnavailable with the
                reason in one line; for other exceptions the reason is made from their type and
                text.
            accept: Runs in the scheduler thread on all ranks: applies the result, and returns a
                description of the work done.
            discard: Runs in a thread: undoes a result that is not accepted.
            on_failure: Runs in the scheduler thread if the change failed or was given up.
        """
        assert self._change is None, "changes are made one at a time"
        call = BackgroundCall("hicache-administration", work, expected=_EXPECTED, discard=discard)
        change = _Change(f"{what} of L3", call, accept, on_failure, only_prepares)
        self._change, self._result = change, None
        self._store.is_changing = True

    def _unless_too_many_hang(self, work: Callable[[], T]) -> Callable[[], T]:
        """`work`, or a function that fails if too many earlier changes hang on this rank.

        The number of hanging changes differs between ranks, so a refusal counts as a failed change:
        the ranks agree on those.
        """
        self._hanging = [call for call in self._hanging if not call.ended]
        hanging = len(self._hanging)
        if hanging < _MAX_LEFT_BEHIND:
            return work

        def refuse() -> T:
            raise ValueError(
                f"{hanging} changes of L3 that were given up still hang; restart the server, and "
                "look into its log for what they wait for"
            )

        return refuse

    def wait(self, tick: Callable[[], None]) -> ChangeResult:
        """Wait for the end of the change, and call `tick` repeatedly meanwhile."""
        deadline = time.monotonic() + LONGEST_STORAGE_CHANGE_S
        while (result := self.take_result()) is None:
            if time.monotonic() > deadline:
                self.give_up(f"it has taken {LONGEST_STORAGE_CHANGE_S:.0f} s")
            if self._change is not None:
                self._change.call.wait(_TICK_S)
            tick()
        return result

    def report(self, progress: Progress) -> None:
        if self._change is not None and self._change.call.ended:
            progress.administration = Status.on(is_good=self._change.call.error is None)

    def act_on(self, agreed: Progress) -> None:
        if self._change is None or agreed.administration is Status.UNDER_WAY:
            return
        if self._change.only_prepares and agreed.administration is Status.LANDED:
            self._result = ChangeResult(True, f"the {self._change.what} is prepared")
            return
        change = self._end(self._change)
        if agreed.administration is Status.LANDED:
            self._result = ChangeResult(True, change.accept(change.call.result))
            return
        error = change.call.error
        if error is None:
            change.call.abandon()
        change.on_failure()
        self._result = ChangeResult(False, self._why_failed(change.what, error))

    def _end(self, change: _Change) -> _Change:
        """End `change`, the one under way."""
        self._change, self._store.is_changing = None, False
        return change

    def settle(self, *, keeps: bool) -> ChangeResult:
        """Do what was prepared, or (not `keeps`) undo it or what is being prepared."""
        if keeps and self._change is not None:
            change = self._end(self._change)
            return ChangeResult(True, change.accept(change.call.result))
        self.give_up("it was not possible in all DP groups")
        return self._result or ChangeResult(False, "no change of L3 is prepared")

    def _why_failed(self, what: str, error: BaseException | None) -> str:
        """Reasons of all ranks on which a change failed. A collective, at the tick of the
        agreement."""
        why = ""
        if isinstance(error, _EXPECTED):
            why = str(error)
        elif error is not None:
            why = f"the {what} failed: {type(error).__name__}: {' '.join(str(error).split())}"
        if self._ranks.size == 1:
            return why
        return reasons(gather_texts(self._ranks, why, MOST_REASON_BYTES))

    def give_up(self, why: str) -> None:
        """End the change under way without its result; a later result is undone."""
        if self._change is None:
            return
        change = self._end(self._change)
        change.call.abandon()
        self._hanging.append(change.call)
        change.on_failure()
        self._result = ChangeResult(False, f"the {change.what} was given up: {why}")

    def take_result(self) -> ChangeResult | None:
        """Take the outcome of the last change."""
        result, self._result = self._result, None
        return result
