"""A server that speaks https, with a certificate of a throw-away authority."""

from __future__ import annotations

import ssl
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import httpx
import trustme

from rigs.servers.forked_servers import ForkedProcess
from sglang.srt.utils.network import get_free_port
from sglang.test.test_utils import kill_process_tree

_START_S: Final = 180.0


@dataclass(frozen=True, slots=True)
class Certificates:
    """PEM files of a server on loopback, and of the authority that clients trust."""

    certfile: Path
    keyfile: Path
    authority: Path

    @classmethod
    def make(cls, directory: Path) -> Certificates:
        """Make them in `directory`."""
        authority = trustme.CA()
        issued = authority.issue_cert("127.0.0.1", "localhost")
        made = cls(directory / "cert.pem", directory / "key.pem", directory / "ca.pem")
        for number, blob in enumerate(issued.cert_chain_pems):
            blob.write_to_path(str(made.certfile), append=number > 0)
        issued.private_key_pem.write_to_path(str(made.keyfile))
        authority.cert_pem.write_to_path(str(made.authority))
        return made

    def flags(self) -> list[str]:
        return ["--ssl-certfile", str(self.certfile), "--ssl-keyfile", str(self.keyfile)]

    def context(self) -> ssl.SSLContext:
        """Context of clients that trust the authority alone."""
        return ssl.create_default_context(cafile=str(self.authority))

    def client(self) -> httpx.Client:
        return httpx.Client(verify=self.context(), timeout=120)


@contextmanager
def tls_server(
    certificates: Certificates, log: Path, *flags: str, env: Mapping[str, str] | None = None
) -> Iterator[str]:
    """The https URL of a server with the built-in model; its output goes to `log`."""
    port = get_free_port()
    url = f"https://127.0.0.1:{port}"
    words = ["--port", str(port), "--device", "cpu", "--max-total-tokens", "4096"]
    process = ForkedProcess([*words, *certificates.flags(), *flags], log, env)
    try:
        _await_health(certificates, url, process, log)
        yield url
    finally:
        kill_process_tree(process.pid)
        process.wait()


def _await_health(certificates: Certificates, url: str, process: ForkedProcess, log: Path) -> None:
    deadline = time.monotonic() + _START_S
    with certificates.client() as client:
        while time.monotonic() < deadline:
            assert process.poll() is None, log.read_text(errors="replace")
            try:
                if client.get(f"{url}/health").status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.2)
    raise AssertionError(log.read_text(errors="replace"))
