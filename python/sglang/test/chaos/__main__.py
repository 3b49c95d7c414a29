"""A whole system under chaos: python -m sglang.test.chaos [--seed N] [--minutes M] [--servers S]
[--faults LABELS] [--transport mooncake|nixl]

Plain servers behind a router, and a prefill server and two decode servers behind another one; all
over one Mooncake store of a master and three nodes. Clients ask questions with known answers,
while processes are stopped, killed and restarted, the link to the master is slow, and a decode
server becomes a prefill server and back. The seed gives times and targets (`agenda.draw_agenda`),
and the transport of pages. Rules:

- No answer is wrong, each request ends before its deadline, each question is answered.
- A request fails only if a fault closed its door, and with an error that says so. Graceful restarts
  and changes of the role behind a router, and faults of the store, fail none.
- Children of a killed server end by themselves. On SIGTERM each process ends in time, servers with
  status 0, and no port stays open.
- All tiers served prompts. After the last fault L3 serves again, also decode servers that have just
  been started.

Exit status 1 if one is broken; then the logs are kept. The last table has the times of requests
beside faults that were not on their way.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import secrets
import shutil
import signal
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import psutil

from sglang.embedded_mooncake import (
    LOOPBACK,
    ChildStartError,
    ManagedProcess,
    MooncakeMaster,
    StoreNode,
)
from sglang.embedded_router import RESTART_FLAGS, Router
from sglang.srt.arg_groups.disaggregation import TransferBackend
from sglang.srt.constants import MIB
from sglang.srt.distributed.device_communicators.nixl_library import has_nixl
from sglang.srt.environ import envs
from sglang.srt.utils.network import base_url, can_connect, get_free_ports, is_healthy, wait_until
from sglang.test.chaos.agenda import (
    MASTER,
    NUM_DECODE,
    NUM_NODES,
    PD,
    POOL,
    PREFILL,
    TIERS,
    Event,
    Kind,
    broken_rules,
    draw_agenda,
    draw_transport,
    latencies,
    summary,
)
from sglang.test.chaos.load import Load
from sglang.test.chaos.slow_link import SlowLink

_NUM_CLIENTS: Final = 4
_NODE_BYTES: Final = 128 * MIB
_START_S: Final = 180.0
_END_S: Final = 80.0
"""Seconds for a server to end: those of docs/api.md, and some for a busy machine."""
_ORPHANS_S: Final = 15.0
_NOTICED_S: Final = 60.0
_RECOVERY_S: Final = 120.0
_REST_S: Final = 3.0
_NUM_KEPT: Final = 8
"""Questions whose prompts new decode servers read from L3; some are shorter than what is read."""
_READ_TOKENS: Final = "sglang:prefetched_tokens_total"
_DELAY_S: Final = 0.3
_STORE_SETTINGS: Final = {"on_unreachable": "degrade", "prefetch_timeout_max": 5}
_FLAGS: Final = (
    # Words are compared; see the rounding of bf16.
    *("--dtype", "float32", "--page-size", "64", "--max-total-tokens", "4096"),
    *("--hicache-storage-backend", "mooncake", "--enable-cache-report"),
    *("--hicache-storage-backend-extra-config", json.dumps(_STORE_SETTINGS)),
)
_ADMIN_KEY: Final = secrets.token_hex(16)
_SWITCH_FLAGS: Final = ("--enable-pd-role-switch", "--admin-api-key", _ADMIN_KEY)
_CACHE_FLAGS: Final = ("--hicache-ratio", "2", "--hicache-storage-prefetch-policy", "wait_complete")


class System:
    """All processes of a run. Main thread only: the processes end with it.

    Args:
        log_dir: An existing directory.
    """

    def __init__(self, num_servers: int, transport: TransferBackend, log_dir: Path) -> None:
        self.broken: list[str] = []
        """A line for each broken rule."""
        self._sessions: dict[int, str] = {}
        """Name of the process that leads each session that was started."""
        self._master = MooncakeMaster(log_dir)
        self._link = SlowLink(self._master.rpc_port)
        self._env = self._master.engine_env() | {
            "MOONCAKE_MASTER": self._link.address,
            "OMP_NUM_THREADS": "1",
            envs.SGLANG_DISAGGREGATION_SECRET.name: secrets.token_hex(32),
        }
        self._log_dir = log_dir
        self._urls: dict[str, str] = {}
        self._ports = [self._master.rpc_port, self._master.metrics_port]
        nodes = {
            f"node {number}": StoreNode(
                self._master, log_dir, segment_bytes=_NODE_BYTES, name=f"node {number}"
            )
            for number in range(NUM_NODES)
        }
        plain = [f"server {number}" for number in range(num_servers)]
        decodes = [f"decode {number}" for number in range(NUM_DECODE)]
        self._bootstrap_ports = dict(
            zip((PREFILL, *decodes), self._new_ports(1 + NUM_DECODE), strict=True)
        )
        engines = {name: self._engine(name, *_CACHE_FLAGS) for name in plain}
        for name, bootstrap in self._bootstrap_ports.items():
            engines[name] = self._engine(
                name,
                *("--disaggregation-mode", "prefill" if name == PREFILL else "decode"),
                *("--disaggregation-transfer-backend", transport),
                *("--disaggregation-bootstrap-port", str(bootstrap), "--enable-metrics"),
                *("--disaggregation-decode-enable-offload-kvcache",) * (name != PREFILL),
                *(*_CACHE_FLAGS, *_SWITCH_FLAGS),
            )
        urls = self._urls
        self._routers = {
            POOL: self._router(POOL, [], [], [urls[name] for name in plain]),
            PD: self._router(
                PD,
                [(urls[PREFILL], self._bootstrap_ports[PREFILL])],
                [urls[name] for name in decodes],
                [],
            ),
        }
        self._processes: dict[str, ManagedProcess] = {
            MASTER: self._master,
            **nodes,
            **engines,
            **self._routers,
        }
        self.doors = {name: urls[name] for name in plain} | {
            name: router.url for name, router in self._routers.items()
        }

    def _new_ports(self, count: int) -> list[int]:
        ports = get_free_ports(count)
        self._ports += ports
        return ports

    def _engine(self, name: str, *flags: str) -> ManagedProcess:
        (port,) = self._new_ports(1)
        url = self._urls[name] = base_url(LOOPBACK, port)
        command = [sys.executable, "-m", "sglang.launch_server", "--host", LOOPBACK]
        return ManagedProcess(
            name,
            [*command, "--port", str(port), *_FLAGS, *flags],
            ready=lambda: is_healthy(url),
            log_dir=self._log_dir,
            env=self._env,
        )

    def _router(
        self,
        name: str,
        prefills: Sequence[tuple[str, int]],
        decodes: Sequence[str],
        plain: Sequence[str],
    ) -> Router:
        (port,) = self._new_ports(1)
        log_dir = self._log_dir / name
        log_dir.mkdir()
        return Router(
            prefills, decodes, port=port, log_dir=log_dir, flags=RESTART_FLAGS, plain=plain
        )

    def start(self, stack: ExitStack) -> None:
        """Start all; `stack` kills them. Raises ChildStartError."""
        for name, process in self._processes.items():
            stack.callback(process.kill)
            self._start(name)
        stack.callback(self._link.close)

    def _start(self, name: str) -> None:
        self._processes[name].start(_START_S)
        self._sessions[self._processes[name].pid] = name

    def gone(self) -> list[str]:
        """A line for each process that ended, though no event ended it."""
        return [
            f"{name} ended by itself: {process.log_tail(1)}"
            for name, process in self._processes.items()
            if not process.is_running()
        ]

    def apply(self, event: Event) -> None:
        """Do what the event says, and wait until its target serves again. Raises
        ChildStartError."""
        if event.kind == Kind.DELAY:
            self._link.delay = _DELAY_S
            time.sleep(event.seconds)
            self._link.delay = 0.0
            return
        if event.kind == Kind.SWITCH:
            self._switch(event.target, "prefill")
            time.sleep(event.seconds)
            self._switch(event.target, "decode")
            return
        process = self._processes[event.target]
        if event.kind == Kind.STOP:
            os.killpg(process.pid, signal.SIGSTOP)
            time.sleep(event.seconds)
            os.killpg(process.pid, signal.SIGCONT)
        else:
            if event.kind == Kind.KILL:
                process.kill()
                self._expect_end(process.pid)
                time.sleep(event.seconds)
            else:
                self._end(event.target, _END_S)
            self._start(event.target)
        self._expect_known(event.target)

    def _switch(self, name: str, role: str) -> None:
        """Change a server's role as docs/pd.md says it, or break a rule."""
        url, router = self._urls[name], self._routers[PD].url
        for one in self._workers():
            if one["url"] == url:
                _call("DELETE", f"{router}/workers/{one['id']}")
        if not wait_until(lambda: url not in [one["url"] for one in self._workers()], _NOTICED_S):
            self.broken.append(f"the router does not forget {name}")
        status = 0

        def switches() -> bool:
            nonlocal status
            status = _call("POST", f"{url}/pd_role_switch", {"new_role": role})
            return status == 200

        if not wait_until(switches, _NOTICED_S, 0.2):
            self.broken.append(f"{name} does not become a {role} server: status {status}")
        worker: dict[str, object] = {"url": url, "worker_type": role}
        if role == "prefill":
            worker["bootstrap_port"] = self._bootstrap_ports[name]
        _call("POST", f"{router}/workers", worker)
        self._expect_known(name)

    def _expect_known(self, name: str) -> None:
        """Break a rule unless a router soon finds the server healthy with its probes."""
        url = self._urls.get(name)

        def is_known() -> bool:
            return any(one["url"] == url and one["is_healthy"] for one in self._workers())

        if url and not wait_until(is_known, _NOTICED_S, 0.2):
            self.broken.append(f"{name} is back, but no router sends to it")

    def _workers(self) -> list[dict[str, Any]]:
        """The servers that the routers know."""
        workers = []
        for router in self._routers.values():
            with (
                contextlib.suppress(OSError),
                urllib.request.urlopen(f"{router.url}/workers", timeout=10) as response,
            ):
                workers += json.load(response)["workers"]
        return workers

    def _end(self, name: str, timeout: float) -> None:
        process = self._processes[name]
        status = process.stop(timeout)
        if status == -signal.SIGKILL:
            self.broken.append(f"{name} did not end within {timeout:.0f} s of SIGTERM")
        elif status and name in self._urls:
            self.broken.append(f"{name} ended with status {status}: {process.log_tail(1)}")
        self._expect_end(process.pid)

    def _expect_end(self, session: int) -> None:
        """Break a rule unless all processes of an ended leader's session end."""
        if not wait_until(lambda: not _members(session), _ORPHANS_S):
            left = ", ".join(_members(session))
            self.broken.append(f"{self._sessions[session]} ended, but not its children: {left}")
            with contextlib.suppress(ProcessLookupError):
                os.killpg(session, signal.SIGKILL)

    def expect_l3(self, load: Load) -> None:
        """Break a rule unless one server soon reads from L3 what another one has computed."""
        rng = random.Random(0)

        def serves() -> bool:
            asked = load.fresh_question(rng)
            load.ask_until_answered(asked, ["server 0"], rng, streams=False)
            time.sleep(1.0)  # The page may be read from the store once it has been written.
            cached = load.ask_until_answered(asked, ["server 1"], rng, streams=False)
            return cached.get("storage", 0) > 0

        if not wait_until(serves, _RECOVERY_S):
            self.broken.append(f"L3 serves nothing {_RECOVERY_S:.0f} s after the last fault")

    def expect_decode_tiers(self, load: Load) -> None:
        """Break a rule unless decode servers that have just been started read from L3 what those
        before them have written. Needs an L3 that serves."""
        rng = random.Random(1)
        kept = [load.fresh_question(rng) for _ in range(_NUM_KEPT)]
        for asked in kept:
            load.ask_until_answered(asked, [PD], rng, streams=False)
        decodes = [f"decode {number}" for number in range(NUM_DECODE)]
        for name in decodes:
            event = Event(load.now(), Kind.RESTART, name, 0.0)
            with load.span(event):
                self.apply(event)
        for asked in kept:
            load.ask_until_answered(asked, [PD], rng, streams=False)
        read = sum(_metric(self._urls[name], _READ_TOKENS) for name in decodes)
        print(f"new decode servers read {read:.0f} tokens from L3")
        if not read:
            self.broken.append("new decode servers read nothing from L3")

    def end(self) -> None:
        """Send SIGTERM to one process after another, in reverse order of their start."""
        for name in reversed(self._processes):
            self._end(name, _END_S)
        left = [port for port in self._ports if can_connect(LOOPBACK, port)]
        self.broken += [f"port {port} is still open" for port in left]


def _call(method: str, url: str, body: Mapping[str, object] | None = None) -> int:
    """The status of a call as the operator; 0: no answer."""
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {_ADMIN_KEY}"}
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=_NOTICED_S) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def _metric(url: str, name: str) -> float:
    """The sum of a metric of a server over its labels."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as response:
        lines = response.read().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"{name}{{"))


def _members(session: int) -> list[str]:
    """Names and ids of the processes of a session that have not ended."""
    found = []
    for process in psutil.process_iter(["name", "status"]):
        with contextlib.suppress(ProcessLookupError):
            has_ended = process.info["status"] == psutil.STATUS_ZOMBIE
            if os.getsid(process.pid) == session and not has_ended:
                found.append(f"{process.info['name']} {process.pid}")
    return found


def run(
    seed: int,
    seconds: float,
    num_servers: int,
    transport: TransferBackend,
    log_dir: Path,
    faults: Sequence[str] = (),
) -> list[str]:
    """Run the agenda of `seed` and print what happened; returns a line for each broken rule."""
    agenda = draw_agenda(seed, seconds, num_servers, faults)
    print(f"seed {seed}, over {transport}, logs in {log_dir}")
    print("\n".join(f"{one.at:7.1f} s  {one.kind} {one.target} {one.seconds}" for one in agenda))
    system = System(num_servers, transport, log_dir)
    with ExitStack() as stack:
        system.start(stack)
        print("all processes run", flush=True)
        with Load(system.doors, seed, _NUM_CLIENTS) as load:
            try:
                for event in agenda:
                    at = max(event.at, load.now() + _REST_S)
                    if at >= seconds:
                        break
                    time.sleep(max(0.0, at - load.now()))
                    if system.gone():
                        break
                    print(f"{load.now():7.1f} s  {event.kind} {event.target}", flush=True)
                    with load.span(event):
                        system.apply(event)
                else:
                    time.sleep(max(0.0, seconds - load.now()))
            except ChildStartError as error:
                system.broken.append(str(error))
        if gone := system.gone():
            system.broken += gone
        else:
            system.expect_l3(load)
            system.expect_decode_tiers(load)
            system.end()
    print("\n".join(summary(load.attempts, load.spans)))
    print("\n".join(latencies(load.attempts, load.spans)))
    slowest = max((one.ended - one.began for one in load.attempts), default=0.0)
    tokens = ", ".join(f"{tier} {load.cached[tier]}" for tier in TIERS)
    print(f"slowest request {slowest:.1f} s; cached tokens: {tokens}")
    return [*system.broken, *broken_rules(load.attempts, load.spans, load.lost, load.cached)]


def main(argv: Sequence[str] | None = None) -> int:
    """Run from the command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m sglang.test.chaos", description=__doc__, allow_abbrev=False
    )
    parser.add_argument("--seed", type=int, help="[random]")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--servers", type=int, default=3, help="plain servers, at least 2")
    parser.add_argument(
        "--faults", default="", help='these alone: "stop master,stop node,delay link to the master"'
    )
    parser.add_argument("--transport", type=TransferBackend, help="mooncake or nixl [drawn]")
    args = parser.parse_args(argv)
    faults = [label for label in args.faults.split(",") if label]
    try:
        draw_agenda(0, 0.0, args.servers, faults)
    except ValueError as error:
        parser.error(f"--faults: {error}")
    if args.servers < 2:
        parser.error("--servers: L3 is shared, so give at least 2")
    if args.minutes <= 0:
        parser.error("--minutes: give more than 0")
    seed = secrets.randbits(31) if args.seed is None else args.seed
    log_dir = Path(tempfile.mkdtemp(prefix="sglang-chaos-"))
    try:
        if not has_nixl():
            print("NIXL is not drawn: no package nixl-cu13 (extra nixl)")
        over = args.transport or draw_transport(seed)
        broken = run(seed, 60 * args.minutes, args.servers, over, log_dir, faults)
    except ChildStartError as error:
        broken = [str(error)]
    if not broken:
        shutil.rmtree(log_dir)
        print("no rule is broken")
        return 0
    print(f"{len(broken)} rules are broken; the logs are in {log_dir}")
    print("\n".join(broken))
    return 1


if __name__ == "__main__":
    raise SystemExit(main())
