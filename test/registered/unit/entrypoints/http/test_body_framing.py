"""Chunked bodies: decoded however they are cut, and no more than llhttp would take."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Final

import pytest
from aiohttp.base_protocol import BaseProtocol
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.http_parser import HttpRequestParser
from hypothesis import example, given
from hypothesis import strategies as st

from sglang.srt.entrypoints.http.body_framing import ChunkDecoder
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="base-a-test-cpu")

HEAD: Final = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
PIECES: Final = (
    b"0\r\n\r\n", b"3\r\nabc\r\n", b"A;b=c\r\n0123456789\r\n", b"0\r\nX: y\r\n\r\n", b"1 \r\na\r\n",
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\r\n", b"\r", b"\n", b"0", b"00", b" ", b"-1", b"g",
    b"ffffffffffffffff", b";", b"X", b": ", b"\0", b"\x0b",
)  # fmt: skip


def decoded(data: bytes, cuts: list[int]) -> tuple[bytes, bytes] | None:
    """Body and rest of `data`, fed in parts; None: it is refused or not complete."""
    decoder = ChunkDecoder()
    bounds = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    body = rest = b""
    for begin, end in pairwise(bounds):
        if decoder.has_ended:
            rest += data[begin:end]
            continue
        try:
            part, rest = decoder.feed(data[begin:end])
        except ValueError:
            return None
        body += part
    return (body, rest) if decoder.has_ended else None


async def decoded_by_llhttp(data: bytes) -> bytes | None:
    """The body of `data`, which ends with it; None: it is refused or not complete."""
    loop = asyncio.get_running_loop()
    parser = HttpRequestParser(BaseProtocol(loop), loop, 1 << 20)
    ((_, stream),), _, _ = parser.feed_data(HEAD)
    try:
        parser.feed_data(data)
    except HttpProcessingError:
        return None
    return stream.read_nowait(-1) if stream.is_eof() else None


@given(st.lists(st.binary(min_size=1, max_size=40)), st.binary(), st.lists(st.integers(0, 999)))
def test_a_body_is_decoded_however_it_is_cut(
    chunks: list[bytes], behind: bytes, cuts: list[int]
) -> None:
    data = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks)
    data += b"0\r\nTrailer: x\r\n\r\n" + behind
    assert decoded(data, cuts) == (b"".join(chunks), behind)


@example([b"1 \r\na\r\n", b"0\r\n\r\n"], [])
@given(st.lists(st.sampled_from(PIECES), max_size=8), st.lists(st.integers(0, 99)))
def test_what_is_taken_llhttp_takes_as_the_same(pieces: list[bytes], cuts: list[int]) -> None:
    data = b"".join(pieces)
    whole = decoded(data, [])
    assert decoded(data, cuts) == whole
    if whole is not None:
        body, rest = whole
        assert asyncio.run(decoded_by_llhttp(data[: len(data) - len(rest)])) == body


@pytest.mark.parametrize(
    "data",
    [
        b"1 \r\na\r\n", b"1;a b\r\na\r\n", b"0\r\nA\xa4: b\r\n\r\n", b"0\r\nA: \x0b\r\n\r\n",
        b"x\r\n", b"\r\n", b"-1\r\n", b"+1\r\na\r\n", b"0x1\r\na\r\n", b"1\na\r\n", b"1\r\nab\r\n",
        b"1\r\na\n", b"0\r\nno header\r\n\r\n", b"0\r\n: x\r\n\r\n", b"0" * 17 + b"\r\n", b" 1\r\n",
    ],
)  # fmt: skip
def test_what_is_no_chunk_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"chunk|trailer"):
        ChunkDecoder().feed(data)


def test_a_line_without_an_end_is_not_kept() -> None:
    decoder = ChunkDecoder()
    decoder.feed(b"0;" + b"x" * 4000)
    with pytest.raises(ValueError, match="larger ones"):
        decoder.feed(b"x" * 100)
