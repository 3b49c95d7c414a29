"""The role of a prefill or decode server in the server process: its bootstrap server, and changes.

Requests are refused during a change. The step that can fail here comes first: opening the bootstrap
port. Then all ranks of a DP group change, or none. If a group refuses, the others change back. If
they do not answer in time, requests stay refused until a repeated change tells the role.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from typing import TYPE_CHECKING, Any, Final

from sglang.srt.arg_groups.disaggregation import DisaggregationMode, moves_pages, prefill_hosts
from sglang.srt.disaggregation.base.bootstrap_route import Route
from sglang.srt.disaggregation.base.deployment_secret import DeploymentSecret
from sglang.srt.disaggregation.common.bootstrap_server import CommonKVBootstrapServer
from sglang.srt.entrypoints.http.errors import ApiError
from sglang.srt.messages.io_struct import ControlReqOutput, PDRoleSwitchReqInput

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sglang.srt.managers.tokenizer.tokenizer_manager import TokenizerManager
    from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)

SWITCH_FLAG: Final = "--enable-pd-role-switch"
_SWITCHING: Final = "the server changes its role: send the request again"
_UNKNOWN: Final = (
    "the server's role is not known, because a change of it was not answered: repeat "
    "POST /pd_role_switch"
)


class PDRole:
    """The role of a server. Event loop thread only, except for construction and `close`.

    Attributes:
        args: The server's, with the present role.
        routes: Addresses of the ranks of a prefill server.
    """

    def __init__(self, args: ServerArgs) -> None:
        """Listens for decode servers if the server is a prefill server, and answers them after
        `register`. Raises ValueError if the bootstrap port is in use."""
        self.args = args
        self.routes: Sequence[dict[str, Any]] = ()
        self._bootstrap: CommonKVBootstrapServer | None = None
        self._is_switching = False
        if args.disaggregation_mode == DisaggregationMode.PREFILL:
            self._listen()

    def register(self, routes: Sequence[dict[str, Any]]) -> None:
        """Let decode servers find the ranks of a prefill server."""
        self.routes = routes
        if self._bootstrap is not None:
            for route in routes:
                self._bootstrap.register(Route(**route))

    def close(self) -> None:
        """Stop listening. Blocks for a moment."""
        if self._bootstrap is not None:
            self._bootstrap.close()
            self._bootstrap = None

    async def switch(
        self, manager: TokenizerManager, new_role: DisaggregationMode
    ) -> dict[str, Any]:
        """Change the role to prefill or decode. Returns the answer for the operator. Raises
        ApiError, and the role stays; or EngineUnavailable, and the role is not known."""
        if (refusal := manager.ending or manager.refusal) is not None:
            raise ApiError(503, refusal)
        if self._is_switching:
            raise ApiError(409, "busy: another change of the role is under way")
        before = self.args.disaggregation_mode
        if new_role == before and manager.switching is None:
            return {"success": True, "role": new_role, "before": before, "seconds": 0.0}
        if manager.num_requests:
            raise ApiError(409, f"busy: requests {manager.num_requests}; try again when idle")
        began = time.monotonic()
        self._is_switching = True
        manager.switching = manager.switching or _SWITCHING
        try:
            await self._change(manager, new_role)
        finally:
            self._is_switching = False
        seconds = time.monotonic() - began
        logger.info("role: %s, before it %s (%.2f s)", new_role, before, seconds)
        return {"success": True, "role": new_role, "before": before, "seconds": round(seconds, 3)}

    async def _change(self, manager: TokenizerManager, new_role: DisaggregationMode) -> None:
        stays = f"the role stays {self.args.disaggregation_mode}"
        was_listening = self._bootstrap is not None
        try:
            if new_role == DisaggregationMode.PREFILL:
                self._listen()
        except ValueError as error:
            manager.switching = None
            raise ApiError(503, f"{error}; {stays}") from None
        manager.switching = _UNKNOWN
        answers = await manager.control.ask_each(PDRoleSwitchReqInput(new_role=new_role))
        refusals = _refusals_of(answers)
        if refusals:
            await self._change_back(
                manager, [one for one in range(len(answers)) if one not in refusals]
            )
            manager.switching = None
            if not was_listening:
                await asyncio.to_thread(self.close)
            status, why = next(iter(refusals.values()))
            raise ApiError(status, f"{why}; {stays}")
        self._register_new(dict(enumerate(answers)))
        if new_role != DisaggregationMode.PREFILL:
            await asyncio.to_thread(self.close)
        self.args = self.args.in_role(new_role)
        manager.limits = dataclasses.replace(
            manager.limits,
            disaggregation_mode=new_role,
            prefill_hosts=prefill_hosts(self.args, self.args.host),
        )
        manager.switching = None

    async def _change_back(self, manager: TokenizerManager, groups: Sequence[int]) -> None:
        """Change groups back that have changed. They are idle, since requests are refused. Raises
        ApiError if a group refuses; then the role is not known."""
        before = DisaggregationMode(self.args.disaggregation_mode)
        for dp_rank in groups:
            answer = await manager.control.ask_one(PDRoleSwitchReqInput(new_role=before), dp_rank)
            if refusals := _refusals_of([answer]):
                _, why = refusals[0]
                raise ApiError(503, f"dp_rank {dp_rank}: {why}; {_UNKNOWN}")
            self._register_new({dp_rank: answer})

    def _register_new(self, answers: Mapping[int, ControlReqOutput]) -> None:
        """Register the routes that groups say after a change. A group that had the role already may
        say none, and keeps its own."""
        new = {
            one: answer.data["routes"] for one, answer in answers.items() if "routes" in answer.data
        }
        stay = [route for route in self.routes if route["dp_rank"] not in new]
        self.register([*stay, *(route for routes in new.values() for route in routes)])

    def _listen(self) -> None:
        args = self.args
        if self._bootstrap is None and moves_pages(args):
            self._bootstrap = CommonKVBootstrapServer(
                args.host,
                args.disaggregation_bootstrap_port,
                DeploymentSecret.of(args.disaggregation_secret),
            )


def _refusals_of(answers: Sequence[ControlReqOutput]) -> dict[int, tuple[int, str]]:
    """Status and reason of each DP group that has not changed its role."""
    refusals: dict[int, tuple[int, str]] = {}
    for dp_rank, answer in enumerate(answers):
        busy = answer.data.get("busy")
        if not answer.success or busy is not None:
            which = "" if len(answers) == 1 else f"dp_rank {dp_rank}: "
            refusals[dp_rank] = 503 if busy is None else 409, f"{which}{busy or answer.message}"
    return refusals
