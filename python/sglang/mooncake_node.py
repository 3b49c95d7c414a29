"""A store node: a process that lends memory to a Mooncake Store, so that objects outlive engines.

    MOONCAKE_MASTER=127.0.0.1:50051 MOONCAKE_PROTOCOL=tcp MOONCAKE_GLOBAL_SEGMENT_SIZE=64gb \\
        python -m sglang.mooncake_node

Settings come from the environment, as for an engine's store client. Unlike
`mooncake.mooncake_store_service` it has no REST port, on which anyone could read and write objects,
and its other ports are open at MOONCAKE_LOCAL_HOSTNAME alone. SIGTERM or Ctrl-C ends it, and takes
its objects away.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal

from sglang.srt.distributed.device_communicators.mooncake_library import log_exposed_ports
from sglang.srt.mem_cache.storage.mooncake_store.client import MooncakeClient
from sglang.srt.mem_cache.storage.mooncake_store.config import MooncakeStoreConfig, settle_protocol
from sglang.srt.mem_cache.storage.types import StorageUnavailable
from sglang.srt.utils.process import set_title

logger = logging.getLogger(__name__)

_ENDS: frozenset[signal.Signals] = frozenset({signal.SIGINT, signal.SIGTERM})


def lends(pid: int) -> str:
    """The words of the log by which the node with this process id tells that it serves."""
    return f"node {pid} lends "


def main() -> None:
    """Lend memory until a signal comes. A failed start exits with one line, and so do words on the
    command line other than `--help`."""
    argparse.ArgumentParser(
        prog="python -m sglang.mooncake_node",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    ).parse_args()
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO)
    set_title("store_node")
    # In all threads, Mooncake's too, so that the signals wait for `sigwait`.
    signal.pthread_sigmask(signal.SIG_BLOCK, _ENDS)
    try:
        config = MooncakeStoreConfig.load_from_env()
        if config.standalone_storage:
            raise ValueError("MOONCAKE_CLIENT is for engines: unset it for a node")
        client = MooncakeClient(config, *settle_protocol(config, "cpu"))
    except (ValueError, StorageUnavailable) as error:
        raise SystemExit(f"the node cannot start: {error}") from None
    log_exposed_ports(logger)
    logger.info("%s%d bytes", lends(os.getpid()), config.global_segment_size)
    signal.sigwait(_ENDS)
    client.close()


if __name__ == "__main__":
    main()
