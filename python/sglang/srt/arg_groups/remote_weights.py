"""The flags of weights from a running server: which of them contradict each other or do nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Final

from sglang.srt.arg_groups.cli import Heading, flag, flag_name

REMOTE_INSTANCE: Final = "remote_instance"
"""The value of `--load-format`."""
START_SEED: Final = "--remote-instance-weight-loader-start-seed-via-transfer-engine"
SEED_PATH: Final = "/remote_instance_transfer_engine_info"
"""Path at which a seed answers."""
_PREFIX: Final = "remote_instance_weight_loader_"
_SEED_IP: Final = f"{_PREFIX}seed_instance_ip"
_SEED_PORT: Final = f"{_PREFIX}seed_instance_service_port"


@dataclasses.dataclass(kw_only=True)
class RemoteWeightsArgs:
    """Fields of `ServerArgs`."""

    load_format: str = flag(
        "auto",
        "Format of the weights; dummy makes random weights, pt reads pickled files, "
        "remote_instance reads them from a running server.",
        choices=("auto", "safetensors", "dummy", "pt", REMOTE_INSTANCE),
        heading=Heading.MODEL,
    )
    remote_instance_weight_loader_seed_instance_ip: str | None = flag(
        None,
        "Host of the server whose weights remote_instance reads.",
        heading=Heading.REMOTE_WEIGHTS,
    )
    remote_instance_weight_loader_seed_instance_service_port: int | None = flag(
        None, "Port of that server's HTTP."
    )
    remote_instance_weight_loader_backend: str = flag(
        "transfer_engine", "How remote_instance reads them.", choices=("transfer_engine",)
    )
    remote_instance_weight_loader_start_seed_via_transfer_engine: bool = flag(
        False, "Let other servers read the weights, through Mooncake's Transfer Engine."
    )


def reads_weights(args: RemoteWeightsArgs) -> bool:
    """True if the server reads its weights from another one."""
    return args.load_format == REMOTE_INSTANCE


def offers_weights(args: RemoteWeightsArgs) -> bool:
    """True if other servers may read its weights. A server that has read its weights from another
    one offers them too."""
    return reads_weights(args) or args.remote_instance_weight_loader_start_seed_via_transfer_engine


def seed_host_port(args: RemoteWeightsArgs) -> tuple[str, int]:
    """Host and port of the seed's HTTP server; the arguments have passed `check_remote_weights`."""
    host = args.remote_instance_weight_loader_seed_instance_ip
    port = args.remote_instance_weight_loader_seed_instance_service_port
    assert host is not None and port is not None, "checked"
    return host, port


def check_remote_weights(args: RemoteWeightsArgs, host: str, port: int) -> Iterator[str]:
    """Refuse flags that contradict each other: a line for each, with the remedy. `host` and
    `port`: the server's own."""
    for field in (_SEED_IP, _SEED_PORT):
        value = getattr(args, field)
        if reads_weights(args) and value is None:
            yield (
                f"--load-format {REMOTE_INSTANCE} needs {flag_name(field)}: name the server to "
                "read from"
            )
        if not reads_weights(args) and value is not None:
            yield (
                f"{flag_name(field)} {value} has no effect without --load-format {REMOTE_INSTANCE}"
            )
    seed = getattr(args, _SEED_IP), getattr(args, _SEED_PORT)
    if reads_weights(args) and seed == (host, port):
        yield (
            f"{flag_name(_SEED_IP)} {host} and {flag_name(_SEED_PORT)} {port} are this "
            "server's own address: name another server"
        )
