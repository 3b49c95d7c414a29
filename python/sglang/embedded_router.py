"""A router as a child process, in front of prefill and decode servers, or of plain ones."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from sglang.embedded_mooncake import LOOPBACK, ChildStartError, ManagedProcess
from sglang.srt.utils.network import ALL_ADDRESSES, base_url, get_free_port, is_healthy

RESTART_FLAGS: Final = (
    *("--health-check-interval-secs", "1", "--health-failure-threshold", "2"),
    *("--health-success-threshold", "1"),
    *("--cb-failure-threshold", "3", "--cb-timeout-duration-secs", "5"),
)
"""Flags with which a restart of one of several servers fails no request (docs/pd.md)."""
SGLANG_ROUTER: Final = "sglang_router"
SMG: Final = "smg"
"""The newer router, of the same commands."""


class Router(ManagedProcess):
    """The package's router, for pairs of servers that compute halves of requests, or for servers
    that compute whole ones."""

    def __init__(
        self,
        prefills: Sequence[tuple[str, int]],
        decodes: Sequence[str],
        *,
        host: str = LOOPBACK,
        port: int,
        log_dir: Path,
        flags: Sequence[str] = (),
        plain: Sequence[str] = (),
        package: str = SGLANG_ROUTER,
    ) -> None:
        """Describe the router; `start` waits until it knows healthy servers.

        Args:
            prefills: URL and bootstrap port of each.
            decodes: URL of each.
            plain: URLs of servers that compute whole requests; not together with `prefills` and
                `decodes`.
            package: `SGLANG_ROUTER` or `SMG`.

        Raises:
            ChildStartError: The package is not installed.
        """
        if importlib.util.find_spec(package) is None:
            name = package.replace("_", "-")
            raise ChildStartError(f"the package {package} is missing: pip install {name}")
        self.url = base_url(LOOPBACK if host in ALL_ADDRESSES else host, port)
        kind = ("--worker-urls", *plain) if plain else ("--pd-disaggregation",)
        command = [
            *(sys.executable, "-m", f"{package}.launch_router", *kind),
            *(word for url, port in prefills for word in ("--prefill", url, str(port))),
            *(word for url in decodes for word in ("--decode", url)),
            *("--host", host, "--port", str(port)),
            # The router's default for metrics is a fixed port of all addresses.
            *("--prometheus-host", LOOPBACK, "--prometheus-port", str(get_free_port())),
            *("--log-level", "warn"),
            *flags,
        ]
        super().__init__(
            "router",
            command,
            # 200 once it knows a healthy server of each kind; `/health` tells only that it runs.
            ready=lambda: is_healthy(self.url, path="/readiness"),
            log_dir=log_dir,
        )
