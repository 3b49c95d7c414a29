"""Bodies by their length or by chunks: what is taken, and when chunks cost too much."""

from __future__ import annotations

import pytest

from sglang.srt.entrypoints.http.body_framing import BodyMeter
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=1, suite="base-a-test-cpu")


def test_a_body_with_a_length_takes_that_many_bytes() -> None:
    meter = BodyMeter(5)
    assert bytes(meter.take(memoryview(b"abc"))) == b"abc"
    assert bytes(meter.take(memoryview(b"defgh"))) == b"de"
    assert bytes(meter.take(memoryview(b"gh"))) == b""
    assert not meter.costs_too_much


@pytest.mark.parametrize(("body", "framing", "most_chunks"), [(1, 5, 13148), (512, 7, None)])
def test_small_chunks_cost_too_much_in_the_end(
    body: int, framing: int, most_chunks: int | None
) -> None:
    meter = BodyMeter(None)
    chunk = memoryview(bytes(body + framing))
    count = 0
    while not meter.costs_too_much and count < 200_000:
        assert len(meter.take(chunk)) == len(chunk)
        meter.note_body(body)
        count += 1
    assert count == (200_000 if most_chunks is None else most_chunks + 1)


def test_a_chunked_body_is_taken_in_pieces() -> None:
    meter = BodyMeter(None)
    assert len(meter.take(memoryview(bytes(100_000)))) == 16384
