"""`make serve-pd`: a prefill server, a decode server and a router on this machine, and an answer.

Starts `mooncake_master` and a store node for the prefill server's cache, both servers, and
`sglang_router` in front of them. Asks a question over HTTP, prints the answer and a command for the
next question, and runs until Ctrl-C (with `ONCE=1` until the answer). The router gets `--host` and
`--port`, the prefill server the flags of the cache, and both servers all other arguments. The
servers share a secret: SGLANG_DISAGGREGATION_SECRET, or a random one. Without `--model-path` both
serve the built-in model, with `MODEL=hybrid` the built-in hybrid, with `MODEL=smollm2` a real model
from PyPI. If there are enough GPUs, each server has its own. All processes are children and end by
their handles.
"""

from __future__ import annotations

import os
import signal

if __name__ == "__main__":
    # The handler comes before the other imports: Ctrl-C during them would print a traceback.
    signal.signal(signal.SIGINT, lambda sig, frame: os._exit(128 + sig))

import secrets
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from sglang.embedded_mooncake import LOOPBACK, ManagedProcess, MooncakeMaster, StoreNode
from sglang.embedded_router import Router
from sglang.serve_embedded import (
    STORAGE_FLAGS,
    STORE_BYTES,
    answer_and_stay,
    make_log_dir,
    run,
    start_in_order,
)
from sglang.srt.arg_groups.disaggregation import DisaggregationMode
from sglang.srt.entrypoints.local_model import with_local_model
from sglang.srt.entrypoints.start_checks import check_model
from sglang.srt.environ import envs
from sglang.srt.hardware_backend.device_kinds import device_kind
from sglang.srt.server_args import ServerArgs, prepare_server_args
from sglang.srt.utils.network import base_url, check_port_available, get_free_ports, is_healthy

_GPUS: Final = Path("/dev")
_CACHE_FLAGS: Final = ("--enable-hierarchical-cache", "--hicache-")


@dataclass(frozen=True, slots=True)
class Plan:
    """The command lines of both servers, and where they are."""

    prefill_url: str
    decode_url: str
    bootstrap_port: int
    prefill: list[str]
    decode: list[str]


def plan(args: ServerArgs, argv: Sequence[str], ports: Sequence[int], num_gpus: int) -> Plan:
    """Divide `argv` between the servers.

    Args:
        args: Arguments of the prefill server, except for its mode, as `argv` gives them.
        ports: Three free ports of this machine: prefill, bootstrap, decode.

    Raises:
        ValueError: A flag does not fit the two servers. One line.
    """
    for field in ("api_key", "admin_api_key"):
        if getattr(args, field) is not None:
            raise ValueError(
                f"--{field.replace('_', '-')}: the router here has no keys; start servers and "
                "router by hand (docs/pd.md)"
            )
    if args.disaggregation_mode != DisaggregationMode.NULL:
        raise ValueError(
            f"--disaggregation-mode {args.disaggregation_mode}: both kinds of server are started "
            "here; remove the flag"
        )
    prefill_port, bootstrap_port, decode_port = ports
    prefill = [
        *STORAGE_FLAGS,
        *argv,
        *("--host", LOOPBACK, "--port", str(prefill_port)),
        *("--disaggregation-mode", DisaggregationMode.PREFILL),
        *("--disaggregation-bootstrap-port", str(bootstrap_port)),
    ]
    decode = [
        *_without_cache(argv),
        *("--host", LOOPBACK, "--port", str(decode_port), "--enable-cache-report"),
        # The servers need one page size, and it depends on the prefill server's cache.
        *("--page-size", str(args.page_size)),
        *("--disaggregation-mode", DisaggregationMode.DECODE),
    ]
    has_gpus = args.device == "auto" or device_kind(args.device).has_own_memory
    if has_gpus and num_gpus >= args.base_gpu_id + 2 * args.tp_size:
        decode += ["--base-gpu-id", str(args.base_gpu_id + args.tp_size)]
    for one in (prefill, decode):
        prepare_server_args(one)
    return Plan(
        base_url(LOOPBACK, prefill_port),
        base_url(LOOPBACK, decode_port),
        bootstrap_port,
        prefill,
        decode,
    )


def _without_cache(argv: Sequence[str]) -> list[str]:
    """`argv` without flags of the hierarchical cache, which a decode server does not have."""
    kept: list[str] = []
    drops = False
    for word in argv:
        if word.startswith("--"):
            drops = word.startswith(_CACHE_FLAGS)
        if not drops:
            kept.append(word)
    return kept


def count_gpus() -> int:
    """NVIDIA's devices of this machine, without loading a library."""
    return sum(path.name[6:].isdigit() for path in _GPUS.glob("nvidia*"))


def _start_all(
    stack: ExitStack, args: ServerArgs, parts: Plan
) -> tuple[Router, list[ManagedProcess]]:
    log_dir = make_log_dir("serve-pd", stack)
    print(f"serve-pd: the logs are in {log_dir}", flush=True)
    master = MooncakeMaster(log_dir)
    node = StoreNode(master, log_dir, segment_bytes=STORE_BYTES)
    secret = args.disaggregation_secret or secrets.token_hex(32)
    env = {**master.engine_env(), envs.SGLANG_DISAGGREGATION_SECRET.name: secret}
    servers = [
        ManagedProcess(
            f"{name}_server",
            [sys.executable, "-m", "sglang.launch_server", *flags],
            ready=lambda url=url: is_healthy(url),  # type: ignore[misc]
            log_dir=log_dir,
            env=env,
        )
        for name, flags, url in (
            (DisaggregationMode.PREFILL, parts.prefill, parts.prefill_url),
            (DisaggregationMode.DECODE, parts.decode, parts.decode_url),
        )
    ]
    router = Router(
        [(parts.prefill_url, parts.bootstrap_port)],
        [parts.decode_url],
        host=args.host,
        port=args.port,
        log_dir=log_dir,
    )
    start_in_order("serve-pd", stack, (master, node), (*servers, router))
    return router, [master, node, *servers, router]


def serve(argv: Sequence[str]) -> None:
    """Like `serve_embedded.serve`, for a pair of servers behind a router."""
    args = prepare_server_args([*STORAGE_FLAGS, *argv])
    envs.SGLANG_DISAGGREGATION_SECRET.clear()  # Only the servers get it.
    check_port_available(args.host, args.port)
    check_model(with_local_model(args))
    parts = plan(args, argv, get_free_ports(3), count_gpus())
    with ExitStack() as stack:
        router, processes = _start_all(stack, args, parts)
        print(f"serve-pd: prefill at {parts.prefill_url}, decode at {parts.decode_url}", flush=True)
        answer_and_stay("serve-pd", router.url, args, processes)


if __name__ == "__main__":
    raise SystemExit(run("serve-pd", serve))
