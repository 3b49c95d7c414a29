"""A change between prefill and decode while the server runs.

All ranks handle the message in the same tick, and are idle in the same ticks. The step that can
fail is the new transport, and its error is the same on all ranks: either all change or none does.
Weights, graphs, pools and tree stay; nothing of them depends on the role.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang.srt.arg_groups.disaggregation import DisaggregationMode
from sglang.srt.managers.scheduler.control import ControlHandler
from sglang.srt.managers.scheduler.state import busy_text

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler.prefill import PrefillScheduler
    from sglang.srt.managers.scheduler.role import Role
    from sglang.srt.managers.scheduler.state import SchedulerState
    from sglang.srt.messages.io_struct import PDRoleSwitchReqInput

logger = logging.getLogger(__name__)

MakeRole = Callable[["SchedulerState", "PrefillScheduler"], "Role"]
Routes = list[dict[str, Any]]
"""Addresses of all ranks of a prefill server, for its bootstrap server."""
RemakeRole = Callable[[DisaggregationMode], tuple[MakeRole, Routes]]
"""Makes a rank's transport for the other role. Returns how to make that role, and its routes. A
collective. Raises ValueError, the same on all ranks, and then nothing has changed."""


class RoleSwitch:
    """Changes the role of a rank. Scheduler thread only.

    Args:
        mode: The role at the start.
        remake: Makes the transport of the other role.
        take: Makes the new role, puts it in the place of the old one, and closes that.
    """

    def __init__(
        self,
        mode: DisaggregationMode,
        control: ControlHandler,
        remake: RemakeRole,
        take: Callable[[MakeRole], None],
    ) -> None:
        self._mode = mode
        self._control = control
        self._remake = remake
        self._take = take
        self._routes: Routes | None = None
        """Routes of the present role; None: those of the start."""

    def handle(self, message: PDRoleSwitchReqInput) -> dict[str, Any]:
        """Change the role if the scheduler is idle; data of the answer. A collective. Raises
        ValueError if the other role cannot begin: then the role stays."""
        new = message.new_role
        if new == self._mode:
            return self._data()
        if self._control.is_draining:
            raise ValueError("the server is shutting down")
        if busy := self._control.busy():
            return {"role": self._mode, "busy": busy_text(busy)}
        began = time.monotonic()
        make, self._routes = self._remake(new)
        self._take(make)
        before, self._mode = self._mode, new
        self._control.note_role(new)
        seconds = time.monotonic() - began
        logger.info("this is a %s server now, and was a %s server (%.2f s)", new, before, seconds)
        return self._data()

    def _data(self) -> dict[str, Any]:
        known = {} if self._routes is None else {"routes": self._routes}
        return {"role": self._mode, **known}
