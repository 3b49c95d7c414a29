"""TCP ports that this process listens on, and warnings in the log about exposed ones."""

from __future__ import annotations

import logging
from typing import Final

import psutil

from sglang.srt.utils.network import is_loopback

_WILDCARDS: Final = frozenset({"0.0.0.0", "::"})


def ports_on_all_addresses() -> list[int]:
    """Sorted TCP ports that this process listens on at all addresses of the machine."""
    return sorted(
        {
            connection.laddr.port
            for connection in psutil.Process().net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN and connection.laddr.ip in _WILDCARDS
        }
    )


def warn_of_open_server(logger: logging.Logger, host: str, *, has_key: bool) -> None:
    """Warn if the server has no key and `host` is not a loopback address."""
    # A name may resolve to any address.
    if has_key or is_loopback(host):
        return
    logger.warning(
        "--host %s without an API key: all clients that reach it can use the server and read its "
        "answers; set SGLANG_API_KEY or --api-key-file",
        host,
    )


def log_exposed_ports(logger: logging.Logger, opened_by: str) -> None:
    """Warn in one line about ports that `opened_by` opened on all addresses, if any."""
    ports = ports_on_all_addresses()
    if ports:
        logger.warning(
            "TCP ports %s are open on all addresses, by %s: anyone who reaches them can end this "
            "process, and read and write its pages; set MOONCAKE_LOCAL_HOSTNAME to the address at "
            "which peers reach this host, or keep them behind a firewall",
            ", ".join(map(str, ports)),
            opened_by,
        )
