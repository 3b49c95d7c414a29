"""Finds reasons not to start here: Mooncake's transports, the environment, and flags."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator, Sequence

from sglang.diagnosis.findings import Finding, State
from sglang.diagnosis.machine_facts import CPU_WHEELS, port_finding
from sglang.srt.arg_groups.cli import FlagErrors
from sglang.srt.arg_groups.disaggregation import (
    BOOTSTRAP_PORT_FLAG,
    DisaggregationMode,
    variables_of,
)
from sglang.srt.arg_groups.foreign_variables import warnings_about_variables
from sglang.srt.distributed.device_communicators.mooncake_library import load_transfer_engine
from sglang.srt.distributed.device_communicators.mooncake_protocol import (
    SUPPORTED_PROTOCOLS,
    RdmaDevice,
    resolve_mooncake_protocol,
    wheel_protocols,
)
from sglang.srt.entrypoints import start_checks
from sglang.srt.environ import envs
from sglang.srt.server_args import ServerArgs, prepare_server_args
from sglang.srt.utils.network import check_port_available


def check_port(args: ServerArgs) -> None:
    """Check that a server can listen at `--host` and `--port`."""
    check_port_available(args.host, args.port)


def protocols_of_wheel(wheels: Sequence[str]) -> frozenset[str] | str:
    """Transports of the installed Mooncake wheel, or a text that says why it cannot be loaded.

    Args:
        wheels: Names of the installed wheels. A CUDA wheel links libraries that torch brings, so
            torch is imported first.
    """
    if not CPU_WHEELS.issuperset(wheels) and importlib.util.find_spec("torch") is not None:
        importlib.import_module("torch")
    try:
        load_transfer_engine()
        return wheel_protocols()
    except ValueError as error:
        return str(error)


def transport_findings(
    devices: Sequence[RdmaDevice], wheel: frozenset[str] | str
) -> Iterator[Finding]:
    """Each transport, and why a server would refuse it. The one that MOONCAKE_PROTOCOL names must
    work, if it is set."""
    chosen = envs.MOONCAKE_PROTOCOL.get() if envs.MOONCAKE_PROTOCOL.is_set() else None
    if isinstance(wheel, str):
        state = State.ABSENT if chosen is None else State.REFUSED
        yield Finding(
            section="transports", name="mooncake", value="not loaded", state=state, remedy=wheel
        )
        return
    names = [*SUPPORTED_PROTOCOLS]
    if chosen is not None and chosen not in names:
        names.append(chosen)
    for name in names:
        try:
            resolve_mooncake_protocol(
                name, allow_tcp_fallback=False, devices=devices, supported=wheel
            )
        except ValueError as error:
            yield Finding(
                section="transports",
                name=name,
                value="chosen, refused" if name == chosen else "refused if chosen",
                state=State.REFUSED if name == chosen else State.ABSENT,
                remedy=str(error),
            )
        else:
            yield Finding(
                section="transports", name=name, value="chosen" if name == chosen else "works"
            )


def environment_findings() -> Iterator[Finding]:
    """Variables of SGLang and Mooncake that are malformed or unknown."""
    lines = [str(line) for line in warnings_about_variables()]
    try:
        envs.check_own()
    except ValueError as error:
        yield Finding(
            section="start", name="environment", value="malformed", state=State.REFUSED,
            remedy=str(error),
        )  # fmt: skip
        return
    for line in lines:
        yield Finding(
            section="start", name="environment", value="no effect", state=State.ABSENT, remedy=line
        )
    if not lines:
        yield Finding(section="start", name="environment", value="all variables are known")


def flag_findings(argv: Sequence[str]) -> Iterator[Finding]:
    """Ports of a server with the flags `argv`, and what it would refuse before it loads anything.
    Reads model files, downloads nothing."""
    try:
        args = prepare_server_args(["--log-level", "error", *argv])
    except FlagErrors as error:
        for line in error.lines:
            yield _refused("flags", line)
        return
    except ValueError as error:
        yield _refused("flags", str(error))
        return
    yield port_finding("server", args.host, args.port, "--port")
    if args.disaggregation_mode == DisaggregationMode.PREFILL:
        port = args.disaggregation_bootstrap_port
        yield port_finding("bootstrap", args.host, port, BOOTSTRAP_PORT_FLAG)
    refused = []
    with variables_of(args):
        for check in (check_port, *start_checks.CHECKS):
            try:
                check(args)
            except ValueError as error:
                name = check.__name__.removeprefix("check_").replace("_", " ")
                refused.append(_refused(name, str(error)))
    yield from refused
    if not refused:
        yield Finding(section="start", name="flags", value=" ".join(argv) or "no flags")


def _refused(name: str, line: str) -> Finding:
    return Finding(section="start", name=name, value="refused", state=State.REFUSED, remedy=line)
