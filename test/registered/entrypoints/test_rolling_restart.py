"""Two servers behind the real router are restarted one after the other: no request fails (F5),
though the router never repeats one."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from rigs.disaggregation.pd_servers import ROUTER
from rigs.servers.forked_servers import ForkedServer
from rigs.servers.rolling_restart import Load, restart_each
from sglang.embedded_router import RESTART_FLAGS, Router
from sglang.srt.utils.network import get_free_port
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=11, suite="base-b-test-cpu")


def test_no_request_fails_while_servers_are_restarted(tmp_path: Path) -> None:
    with ExitStack() as stack:
        servers = [stack.enter_context(ForkedServer("--drain-seconds", "120")) for _ in range(2)]
        urls = [server.url for server in servers]
        flags = (*RESTART_FLAGS, "--disable-retries")
        router = Router(
            [], [], port=get_free_port(), log_dir=tmp_path, flags=flags, plain=urls, package=ROUTER
        )
        stack.callback(router.kill)
        router.start(60)
        with Load(router.url, rate=4) as load:
            restart_each(load, router, servers)
        assert not load.failures, load.failures
        print(f"{len(load.seconds)} requests, the slowest {max(load.seconds):.1f} s")
        assert len(load.seconds) == load.num_sent > 50
