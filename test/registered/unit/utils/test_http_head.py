"""Heads of requests: what is read, and refusals that quote nothing."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp.http_parser import RawRequestMessage

from sglang.srt.utils.http_head import parse_head
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=2, suite="base-a-test-cpu")

GET = b"GET / HTTP/1.1\r\nHost: x\r\n"


@pytest.mark.parametrize(
    ("target", "path"),
    [
        ("/a%20b?c=%2F#d", "/a%20b?c=%2F"),
        ("http://other/p?q", "/p?q"),
        ("//a/b", "//a/b"),
    ],
)
def test_a_target_is_read_without_its_host(target: str, path: str) -> None:
    message = parse_head(f"GET {target} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    assert (message.method, message.url.raw_path_qs) == ("GET", path)


def parsed(lines: bytes) -> RawRequestMessage:
    """A request with a body, for whose reader the parser needs a loop."""

    async def parse() -> RawRequestMessage:
        return parse_head(GET + lines + b"\r\n")

    return asyncio.run(parse())


def test_an_upgrade_is_a_header_like_others() -> None:
    message = parsed(b"Connection: Upgrade\r\nUPGRADE: websocket\r\nContent-Length: 2\r\n")
    assert not (message.upgrade or message.should_close)
    assert message.headers["content-length"] == "2"


@pytest.mark.parametrize(
    "lines",
    [
        b"Host: s3cret\r\n",
        b"Authorization: s3cret\0\r\n",
        b"s3cret\r\n",
        b"Authorization : s3cret\r\n",
        b"A: b\r\n s3cret\r\n",
        b"A: b\ns3cret: c\r\n",
        b"Sec-WebSocket-Key1: s3cret\r\n",
        b"Content-Length: s3cret\r\n",
        b"Content-Length: 1\r\nContent-Length: 1\r\n",
        b"Content-Length: 1\r\nTransfer-Encoding: chunked\r\n",
        b"Transfer-Encoding: chunked, s3cret\r\n",
        b"Transfer-Encoding: s3cret\r\n",
        b"Transfer-Encoding: s3cret, chunked\r\n",
        b"Transfer-Encoding:\r\nContent-Length: 1\r\n",
        b"Content-Length: " + b"0" * 5000 + b"1\r\n",
    ],
)
def test_a_refusal_quotes_nothing(lines: bytes) -> None:
    with pytest.raises(ValueError) as refused:
        parsed(lines)
    assert str(refused.value)
    assert "s3cret" not in str(refused.value)


@pytest.mark.parametrize("target", ["*s3cret", "http://s3cret[/", "http://x:s3cret/"])
def test_a_refusal_quotes_no_target(target: str) -> None:
    with pytest.raises(ValueError) as refused:
        parse_head(f"GET {target} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    assert "the target is no URL" in str(refused.value)
    assert "s3cret" not in str(refused.value)


def test_the_case_of_a_coding_is_free() -> None:
    assert parsed(b"Transfer-Encoding:\tChunked \r\n").chunked
