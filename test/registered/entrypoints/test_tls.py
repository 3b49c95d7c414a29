"""https: real clients, keep-alive, streams, refused bodies, and peers that do not speak TLS."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import httpx
import openai
import pytest

from rigs.servers.tls_server import Certificates, tls_server
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=2, suite="base-b-test-cpu")

KEY = "a-key-of-the-config-file"


@dataclass(frozen=True, slots=True)
class Served:
    url: str
    certificates: Certificates
    log: Path

    @property
    def address(self) -> tuple[str, int]:
        return "127.0.0.1", int(self.url.rsplit(":", 1)[1])


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = tmp_path_factory.mktemp("tls")
    certificates = Certificates.make(directory)
    config = directory / "server.yaml"
    config.write_text(f"api-key: {KEY}\nserved_model_name: from-the-file\nmax-total-tokens: 64\n")
    config.chmod(0o600)
    with tls_server(certificates, directory / "log", "--config", str(config)) as url:
        yield Served(url, certificates, directory / "log")


def test_the_openai_client_gets_answers_and_streams(served: Served) -> None:
    with openai.DefaultHttpxClient(verify=served.certificates.context()) as http:
        client = openai.OpenAI(base_url=f"{served.url}/v1", api_key=KEY, http_client=http)
        assert [one.id for one in client.models.list()] == ["from-the-file"]
        complete = partial(
            client.completions.create, model="from-the-file", prompt="The code of heron is",
            max_tokens=64, temperature=0, extra_body={"ignore_eos": True},
        )  # fmt: skip
        pieces = [choice.text for part in complete(stream=True) for choice in part.choices]
        assert len(pieces) > 1
        assert "".join(pieces) == complete().choices[0].text


def test_the_key_and_the_flags_of_the_file_count_and_the_command_line_wins(served: Served) -> None:
    with served.certificates.client() as client:
        assert client.get(f"{served.url}/v1/models").status_code == 401
        headers = {"Authorization": f"Bearer {KEY}"}
        info = client.get(f"{served.url}/server_info", headers=headers).json()
    # The command line has 4096, the file 64.
    assert info["max_total_num_tokens"] == 4096
    assert KEY not in json.dumps(info)
    log = served.log.read_text(errors="replace")
    assert f"ready to roll! {served.url}" in log and KEY not in log


def test_probes_are_answered_over_https(served: Served) -> None:
    with served.certificates.client() as client:
        for path in ("/health", "/health_generate"):
            assert client.get(served.url + path).status_code == 200


def test_a_client_that_does_not_know_the_authority_refuses(served: Served) -> None:
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        httpx.get(f"{served.url}/health")


def test_plain_http_and_silent_peers_get_no_answer_and_others_do(served: Served) -> None:
    silent = socket.create_connection(served.address)
    with pytest.raises(httpx.TransportError):
        httpx.get(f"http://127.0.0.1:{served.address[1]}/health")
    with served.certificates.client() as client:
        assert client.get(f"{served.url}/health").status_code == 200
    silent.close()
    assert "Traceback" not in served.log.read_text(errors="replace")


def test_an_answer_before_the_end_of_the_body_can_be_read(served: Served) -> None:
    context = served.certificates.context()
    with (
        socket.create_connection(served.address) as plain,
        context.wrap_socket(plain, server_hostname="127.0.0.1") as sock,
    ):
        sock.settimeout(60)
        head = b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n"
        sock.sendall(head + b"x" * 1000)
        # Without the key: refused before the rest of the body.
        assert sock.recv(4096).startswith(b"HTTP/1.1 401")
    assert "Traceback" not in served.log.read_text(errors="replace")
