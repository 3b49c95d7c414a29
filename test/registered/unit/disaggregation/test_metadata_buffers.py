"""Rows of metadata: where they are by the settings, who has which, and what is in them."""

from __future__ import annotations

import threading

import pytest
import torch

from sglang.srt.disaggregation.common.metadata_reader import ROW_BYTES, BadRow, host_identity
from sglang.srt.disaggregation.utils import (
    MetadataBuffers,
    ReqToMetadataIdxAllocator,
    metadata_device,
)
from sglang.srt.messages.first_token import FirstToken
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=2, suite="base-a-test-cpu")

WORDS = FirstToken(token_id=7, prompt_len=9, prompt_digest="d")
CPU = torch.device("cpu")
POOL = "SGLANG_MOONCAKE_CUSTOM_MEM_POOL"
FLAG = "SGLANG_MOONCAKE_SEND_AUX_TCP"


# ---- where they are ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pool", "flag", "on_cuda", "on_cpu"),
    [
        ("", "", None, None),
        ("", "0", "cpu", "cpu"),
        ("", "1", None, None),
        ("INTRA_NODE_NVLINK", "", "cuda:1", "cpu"),
        ("INTRA_NODE_NVLINK", "0", "cuda:1", "cpu"),
        ("INTRA_NODE_NVLINK", "1", None, None),
        # Its name is a part of the one above.
        ("NVLINK", "", None, None),
        ("NVLINK", "0", None, None),
        ("NVLINK", "1", None, None),
        ("BAREX", "", None, None),
        ("BAREX", "0", "cpu", "cpu"),
        ("BAREX", "1", None, None),
    ],
)
def test_the_settings_say_where_rows_are(
    monkeypatch: pytest.MonkeyPatch,
    pool: str,
    flag: str,
    on_cuda: str | None,
    on_cpu: str | None,
) -> None:
    monkeypatch.setenv(POOL, pool)
    monkeypatch.setenv(FLAG, flag)
    for pages, want in (("cuda:1", on_cuda), ("cpu", on_cpu)):
        assert metadata_device(torch.device(pages)) == (want and torch.device(want))


@pytest.mark.parametrize("pool", ["NVLIN", "nvlink", "INTRA_NODE", "NVLINK,BAREX", "true"])
def test_an_unknown_pool_is_refused(monkeypatch: pytest.MonkeyPatch, pool: str) -> None:
    monkeypatch.setenv(POOL, pool)
    with pytest.raises(ValueError, match=f"{POOL}='{pool}' is unknown; use one of: NVLINK, BAREX"):
        metadata_device(CPU)


def test_an_unclear_flag_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FLAG, "maybe")
    with pytest.raises(ValueError, match=f"{FLAG}='maybe': expected 1/true"):
        metadata_device(CPU)


def test_a_host_is_the_same_for_all_its_processes() -> None:
    assert host_identity() == host_identity() != ""


# ---- who has which -----------------------------------------------------------------------------


def test_each_row_has_one_owner() -> None:
    rows = ReqToMetadataIdxAllocator(3)
    taken = [rows.alloc() for _ in range(4)]
    assert taken == [0, 1, 2, None] and rows.available_size() == 0
    rows.free(1)
    assert (rows.available_size(), rows.alloc(), rows.alloc()) == (1, 1, None)


def test_a_row_is_given_back_once() -> None:
    rows = ReqToMetadataIdxAllocator(2)
    row = rows.alloc()
    assert row is not None
    rows.free(row)
    with pytest.raises(AssertionError, match="row 0 is free already"):
        rows.free(row)


def test_who_waits_gets_the_row_that_comes_back() -> None:
    rows = ReqToMetadataIdxAllocator(1)
    assert (rows.alloc(), rows.alloc(0.01)) == (0, None)
    got: list[int | None] = []
    waits = threading.Thread(target=lambda: got.append(rows.alloc(30)))
    waits.start()
    rows.free(0)
    waits.join(30)
    assert got == [0]


# ---- what is in them ---------------------------------------------------------------------------


def test_rows_are_apart() -> None:
    buffers = MetadataBuffers(4, CPU)
    others = [FirstToken(token_id=n, prompt_len=9, prompt_digest="d") for n in range(4)]
    assert all(buffers.set_buf(n, 100 + n, words) for n, words in enumerate(others))
    assert [buffers.get_buf(n, 100 + n) for n in range(4)] == others
    buffers.clear(2)
    with pytest.raises(BadRow, match="empty"):
        buffers.get_buf(2, 102)
    assert buffers.get_buf(3, 103) == others[3]


def test_metadata_that_does_not_fit_is_not_written() -> None:
    buffers = MetadataBuffers(1, CPU)
    assert buffers.set_buf(0, 1, WORDS)
    assert not buffers.set_buf(0, 2, FirstToken(token_id=1, prompt_len=1, prompt_digest="d" * 9999))
    assert buffers.get_buf(0, 1) == WORDS


def test_what_is_registered_is_all_of_them() -> None:
    buffers = MetadataBuffers(4, CPU)
    (address,), (num_bytes,), (row_bytes,) = buffers.get_buf_infos()
    assert (num_bytes, row_bytes) == (4 * ROW_BYTES, ROW_BYTES)
    assert buffers.allocations() == {address: num_bytes}
    assert [buffers.address(n) - address for n in range(4)] == [n * ROW_BYTES for n in range(4)]


def test_rows_have_room_for_a_hidden_state() -> None:
    """Rows are whole words."""
    words = FirstToken(token_id=1, prompt_len=1, prompt_digest="d", hidden=bytes(range(256)) * 20)
    assert not MetadataBuffers(1, CPU).set_buf(0, 7, words)
    buffers = MetadataBuffers(2, CPU, hidden_bytes=5119)
    assert buffers.row_bytes == ROW_BYTES + 5120
    assert buffers.address(1) - buffers.address(0) == buffers.row_bytes
    assert buffers.set_buf(1, 7, words)
    assert buffers.get_buf(1, 7) == words
