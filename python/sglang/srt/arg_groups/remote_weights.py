"""The flags of weights from a running server: which of them contradict each other or do nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from sglang.srt.arg_groups.cli import flag_name

if TYPE_CHECKING:
    from sglang.srt.arg_groups.server_args import ServerArgs

REMOTE_INSTANCE: Final = "remote_instance"
"""The value of `--load-format`."""
START_SEED: Final = "--remote-instance-weight-loader-start-seed-via-transfer-engine"
SEED_PATH: Final = "/remote_instance_transfer_engine_info"
"""Path at which a seed answers."""
_PREFIX: Final = "remote_instance_weight_loader_"
_SEED_IP: Final = f"{_PREFIX}seed_instance_ip"
_SEED_PORT: Final = f"{_PREFIX}seed_instance_service_port"


def reads_weights(args: ServerArgs) -> bool:
    """True if the server reads its weights from another one."""
    return args.load_format == REMOTE_INSTANCE


def offers_weights(args: ServerArgs) -> bool:
    """True if other servers may read its weights. A server that has read its weights from another
    one offers them too."""
    return reads_weights(args) or args.remote_instance_weight_loader_start_seed_via_transfer_engine


def seed_host_port(args: ServerArgs) -> tuple[str, int]:
    """Host and port of the seed's HTTP server; the arguments have passed `check_remote_weights`."""
    host = args.remote_instance_weight_loader_seed_instance_ip
    port = args.remote_instance_weight_loader_seed_instance_service_port
    assert host is not None and port is not None, "checked"
    return host, port


def check_remote_weights(args: ServerArgs) -> Iterator[str]:
    """Refuse flags that contradict each other: a line for each, with the remedy."""
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
    if reads_weights(args) and seed == (args.host, args.port):
        yield (
            f"{flag_name(_SEED_IP)} {args.host} and {flag_name(_SEED_PORT)} {args.port} are this "
            "server's own address: name another server"
        )
