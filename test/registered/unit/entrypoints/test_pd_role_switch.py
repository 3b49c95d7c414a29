"""`POST /pd_role_switch` on an engine that echoes: keys, refusals, the bootstrap port."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from functools import partial
from typing import Any

import httpx
import pytest

from rigs.servers.fake_engine import FrontServer, fake_engine, front_server
from sglang.srt.entrypoints.http.pd_role import PDRole
from sglang.srt.messages.io_struct import ControlReqOutput, PDRoleSwitchReqInput
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.network import get_free_port, wait_until
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=4, suite="base-a-test-cpu")

KEY = "operator"
ADMIN = {"Authorization": f"Bearer {KEY}"}
PATH = "/pd_role_switch"


def args_of(mode: str, **more: Any) -> dict[str, Any]:
    return {
        "disaggregation_mode": mode,
        "disaggregation_bootstrap_port": get_free_port(),
        "enable_pd_role_switch": True,
        "admin_api_key": KEY,
        **more,
    }


@pytest.fixture(params=["prefill", "decode"])
def server(request: pytest.FixtureRequest) -> Iterator[FrontServer]:
    with front_server(**args_of(request.param)) as running:
        yield running


def switch(server: FrontServer, role: object, headers: dict[str, str] = ADMIN) -> httpx.Response:
    return httpx.post(server.url + PATH, json={"new_role": role}, headers=headers, timeout=30)


def message_of(answer: httpx.Response) -> str:
    return str(answer.json()["error"]["message"])


def role_of(server: FrontServer) -> tuple[str, str]:
    """The role as probes and settings name it."""
    info = httpx.get(f"{server.url}/server_info", headers=ADMIN).json()
    header = httpx.get(f"{server.url}/health").headers["X-SGLang-PD-Role"]
    return header, info["disaggregation_mode"]


def listens(server: FrontServer) -> bool:
    """True if the bootstrap port is open."""
    port = server.context.args.disaggregation_bootstrap_port
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def asked(server: FrontServer) -> list[str]:
    """The roles that the scheduler was asked for."""
    messages = server.scheduler.received
    return [one.new_role for one in messages if isinstance(one, PDRoleSwitchReqInput)]


def test_a_server_changes_its_role_and_back(server: FrontServer) -> None:
    before = server.context.args.disaggregation_mode
    after = "decode" if before == "prefill" else "prefill"
    for old, new in ((before, after), (after, before)):
        assert role_of(server) == (old, old) and listens(server) == (old == "prefill")
        answer = switch(server, new)
        assert answer.status_code == 200
        body = answer.json()
        assert (body["success"], body["role"], body["before"]) == (True, new, old)
        assert body["seconds"] < 2
        # A repeated request changes nothing, and asks nobody.
        assert switch(server, new).json()["before"] == new
    assert role_of(server) == (before, before)
    assert asked(server) == [after, before]
    # Requests are judged by the present role.
    lost = httpx.post(f"{server.url}/generate", json={"text": "a"}, timeout=20)
    assert f"does the {before} of requests only" in message_of(lost)


@pytest.mark.parametrize("api_key", [None, "user"])
def test_only_the_admin_key_may_change_it(api_key: str | None) -> None:
    with front_server(**args_of("decode", api_key=api_key)) as server:
        for key in (None, "user", "wrong"):
            headers = {} if key is None else {"Authorization": f"Bearer {key}"}
            answer = switch(server, "prefill", headers)
            assert answer.status_code == 403
            assert "needs the admin key" in message_of(answer)
        assert not asked(server)


def test_a_bad_role_is_named_with_the_right_ones(server: FrontServer) -> None:
    for role in ("null", "Decode", ""):
        answer = switch(server, role)
        assert answer.status_code == 400
        assert message_of(answer) == f"new_role={role!r}: must be prefill or decode"
    answer = switch(server, 7)
    assert answer.status_code == 400 and "new_role" in message_of(answer)
    assert httpx.post(server.url + PATH, headers=ADMIN).status_code == 400
    assert not asked(server)


@pytest.mark.parametrize("mode", ["null", "decode"])
def test_a_server_without_the_flag_names_it(mode: str) -> None:
    with front_server(disaggregation_mode=mode, admin_api_key=KEY) as server:
        answer = switch(server, "prefill")
        assert answer.status_code == 400
        assert "--enable-pd-role-switch" in message_of(answer)
        assert f"--disaggregation-mode {mode}" in message_of(answer)


def test_what_is_under_way_is_told(server: FrontServer) -> None:
    before = server.context.args.disaggregation_mode
    after = "decode" if before == "prefill" else "prefill"
    server.scheduler.busy = "busy: running 2; try again when idle"
    answer = switch(server, after)
    assert answer.status_code == 409
    assert message_of(answer) == f"busy: running 2; try again when idle; the role stays {before}"
    server.scheduler.busy = None
    server.scheduler.control_success = False
    answer = switch(server, after)
    assert answer.status_code == 503 and message_of(answer).endswith(f"the role stays {before}")
    server.scheduler.control_success = True
    assert role_of(server) == (before, before) and listens(server) == (before == "prefill")
    assert switch(server, after).status_code == 200


@pytest.mark.parametrize("mode", ["prefill", "decode"])
def test_all_groups_change_or_none(mode: str) -> None:
    after = "decode" if mode == "prefill" else "prefill"
    sizes = {"tp_size": 2, "attn_dp_size": 2}
    with front_server(
        make_engine=partial(fake_engine, num_groups=2), **args_of(mode, **sizes)
    ) as server:
        first, second = server.engine.schedulers
        second.busy = "busy: loads 1; try again when idle"
        answer = switch(server, after)
        assert answer.status_code == 409
        assert message_of(answer) == f"dp_rank 1: {second.busy}; the role stays {mode}"
        assert role_of(server) == (mode, mode) and listens(server) == (mode == "prefill")
        roles = [
            [one.new_role for one in each.received if isinstance(one, PDRoleSwitchReqInput)]
            for each in (first, second)
        ]
        assert roles == [[after, mode], [after]], "the first one has changed back"
        second.busy = None
        assert switch(server, after).status_code == 200
        assert role_of(server) == (after, after)


def test_the_routes_of_a_group_that_has_not_changed_stay() -> None:
    role = PDRole(ServerArgs(model_path="dummy").resolve())
    role.routes = [{"dp_rank": 0, "rank": 0}, {"dp_rank": 1, "rank": 0}, {"dp_rank": 1, "rank": 1}]
    new = {"dp_rank": 0, "rank": 0, "endpoint": "another"}
    known = [*role.routes[1:]]
    says = ControlReqOutput(req_id="", success=True, data={"routes": [new]})
    role._register_new({0: says, 1: ControlReqOutput(req_id="", success=True)})
    assert role.routes == [*known, new]


def test_a_request_under_way_is_told(server: FrontServer) -> None:
    after = "decode" if server.context.args.disaggregation_mode == "prefill" else "prefill"
    server.scheduler.hold_after = 1
    room = {"bootstrap_host": "127.0.0.1", "bootstrap_port": 8998, "bootstrap_room": 5}
    body = {"text": "ab", "stream": True, **room}
    with httpx.stream("POST", f"{server.url}/generate", json=body, timeout=30) as stream:
        assert stream.status_code == 200
        answer = switch(server, after)
        assert answer.status_code == 409
        assert message_of(answer) == "busy: requests 1; try again when idle"
    server.scheduler.hold_after = None
    assert wait_until(lambda: switch(server, after).status_code == 200, 20)


def test_a_bootstrap_port_in_use_leaves_the_role() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with front_server(**args_of("decode", disaggregation_bootstrap_port=port)) as server:
            answer = switch(server, "prefill")
            assert answer.status_code == 503
            assert f"--disaggregation-bootstrap-port {port}" in message_of(answer)
            assert message_of(answer).endswith("the role stays decode")
            assert role_of(server) == ("decode", "decode") and not asked(server)
            taken.close()
            assert switch(server, "prefill").status_code == 200


def test_requests_are_refused_until_the_role_is_known(
    server: FrontServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = server.context.args.disaggregation_mode
    after = "decode" if before == "prefill" else "prefill"
    control = server.context.manager.control
    ask = control.ask_each
    server.scheduler.silent_about = PDRoleSwitchReqInput
    with monkeypatch.context() as short:
        short.setattr(control, "ask_each", lambda message: ask(message, 0.2))
        answer = switch(server, after)
    assert answer.status_code == 503 and "did not answer" in message_of(answer)
    room = {"bootstrap_host": "127.0.0.1", "bootstrap_port": 8998, "bootstrap_room": 5}
    lost = httpx.post(f"{server.url}/generate", json={"text": "ab", **room}, timeout=20)
    assert lost.status_code == 503 and "repeat POST /pd_role_switch" in message_of(lost)
    server.scheduler.silent_about = None
    for role in (after, before):
        assert switch(server, role).status_code == 200
        assert role_of(server) == (role, role) and listens(server) == (role == "prefill")
