"""Metadata in rows: same output, nothing sent inline, and no row is lost."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from rigs.disaggregation.pd_ranks import PdRanks
from rigs.disaggregation.pd_rig import LocalMover, PdRig, make_manager
from rigs.disaggregation.prompt_scene import Place
from rigs.models.tiny_models import save_tiny_checkpoint
from rigs.schedulers import checkable_model
from rigs.schedulers.scheduler_rig import greedy, prompt
from sglang.srt.arg_groups.disaggregation import DisaggregationMode
from sglang.srt.constants import BUILTIN_MODEL_DIR
from sglang.srt.disaggregation import utils
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.conn import CommonKVSender
from sglang.srt.disaggregation.common.metadata_reader import ROW_BYTES, host_identity
from sglang.srt.disaggregation.decode import DecodeRole
from sglang.srt.disaggregation.prefill import PrefillRole
from sglang.srt.disaggregation.utils import NUM_ROWS, MetadataBuffers
from sglang.srt.distributed.device_communicators.transfer_types import (
    Block,
    PeerUnreachable,
    RegistrationError,
    TransferError,
)
from sglang.srt.environ import envs
from sglang.srt.messages.first_token import FirstToken
from sglang.srt.messages.io_struct import TokenizedGenerateReqInput
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=1, suite="base-a-test-cpu")

PROMPTS = [prompt(seed, length) for seed, length in enumerate((1, 4, 15, 17, 64))]


@pytest.fixture(autouse=True)
def in_rows() -> Iterator[None]:
    with envs.SGLANG_MOONCAKE_SEND_AUX_TCP.override(False):
        yield


def make_pair(mover: LocalMover | None = None, **args: Any) -> PdRig:
    settings = {"page_size": 4, "pool_tokens": 512, "chunked_prefill_size": 16}
    return PdRig(BUILTIN_MODEL_DIR, mover or LocalMover(), checkable=True, **{**settings, **args})


def metadata_bytes(pair: PdRig) -> tuple[float, float]:
    """Inline, and moved as pages are."""
    registry = pair.decode.scheduler.state.metrics.registry
    inline, moved = (
        registry.get_sample_value("sglang:kv_transfer_metadata_bytes_total", {"way": way})
        for way in ("control", "transport")
    )
    assert inline is not None and moved is not None
    return inline, moved


def free_rows(pair: PdRig) -> list[int]:
    """Number of free rows on each of both servers."""
    assert not any(rowless(pair))
    both: list[Any] = [rig.manager._args.aux_buffers for rig in pair.rigs]
    return [one.available_size() for one in both]


def rowless(pair: PdRig) -> tuple[list[CommonKVSender], list[CommonKVSender]]:
    """Senders with a row, and senders that wait for one."""
    role = pair.prefill.scheduler._role
    assert isinstance(role, PrefillRole)
    every = [room.sender for room in role._rooms.values()]
    senders = [one for one in every if isinstance(one, CommonKVSender)]
    with_row = [one for one in senders if one._room.row is not None]
    return with_row, [one for one in senders if one._unsent is not None]


def assert_said(pair: PdRig, *messages: TokenizedGenerateReqInput) -> None:
    for message in messages:
        got = pair.result(message.rid)
        ids = message.input_ids.tolist()
        wanted = message.sampling_params.max_new_tokens
        assert got.output_ids == checkable_model.words(ids, message.seed, wanted)


def run_all(pair: PdRig, turn: str, **fields: Any) -> list[TokenizedGenerateReqInput]:
    messages = [
        pair.request(f"{turn} {n}", ids, greedy(5), **fields) for n, ids in enumerate(PROMPTS)
    ]
    pair.run(*messages)
    assert_said(pair, *messages)
    return messages


# ---- the way -----------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [False, True])
def test_nothing_is_sent_inline(overlap: bool) -> None:
    with make_pair(overlap=overlap) as pair:
        for turn in ("cold", "cached"):
            run_all(pair, turn)
        assert metadata_bytes(pair) == (0, 2 * len(PROMPTS) * ROW_BYTES)
        assert free_rows(pair) == [NUM_ROWS] * 2


def test_without_the_setting_all_is_sent_inline() -> None:
    with envs.SGLANG_MOONCAKE_SEND_AUX_TCP.override(None), make_pair() as pair:
        run_all(pair, "inline")
        inline, moved = metadata_bytes(pair)
        assert inline > 0 and moved == 0


def test_requests_wait_for_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """One on each side: each prompt waits there until another has been read."""
    monkeypatch.setattr(utils, "NUM_ROWS", 1)
    mover = LocalMover()
    with make_pair(mover) as pair:
        role = pair.prefill.scheduler._role
        assert isinstance(role, PrefillRole)
        messages = [pair.request(f"r{n}", ids, greedy(5)) for n, ids in enumerate(PROMPTS)]
        mover.hold = True
        pair.until(
            lambda: sum(r.held is not None for r in role._rooms.values()) == len(PROMPTS), *messages
        )
        with_row, waiting = rowless(pair)
        assert (len(with_row), len(waiting)) == (1, len(PROMPTS) - 1)
        # One that is given up frees its row, or the place in which it waits.
        given_up = [role._rooms[one.bootstrap_room].rid for one in (with_row[0], waiting[0])]
        pair.step(
            [pair.prefill.abort(rid) for rid in given_up],
            [pair.decode.abort(rid) for rid in given_up],
        )
        mover.release()
        pair.until(lambda: all(rig.scheduler.is_idle() for rig in pair.rigs))
        pair.assert_clean()
        assert_said(pair, *(one for one in messages if one.rid not in given_up))
        assert free_rows(pair) == [1, 1]
        assert metadata_bytes(pair)[0] == 0


def test_metadata_that_does_not_fit_a_row_is_sent_inline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglang.srt.disaggregation.utils.ROW_BYTES", 60)
    with make_pair() as pair:
        run_all(pair, "long")
        inline, moved = metadata_bytes(pair)
        assert inline > 0 and moved == 0
        assert free_rows(pair) == [NUM_ROWS] * 2


@pytest.mark.parametrize("side", [DisaggregationMode.PREFILL, DisaggregationMode.DECODE])
def test_rows_of_one_server_alone_go_unused(
    side: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Settings differ: all is sent inline. The server that wanted it otherwise says so."""
    make = MetadataBuffers.beside
    sides = iter((DisaggregationMode.PREFILL, DisaggregationMode.DECODE))
    monkeypatch.setattr(
        MetadataBuffers, "beside", lambda *args: make(*args) if next(sides) == side else None
    )
    with caplog.at_level(logging.WARNING), make_pair() as pair:
        run_all(pair, "inline")
        inline, moved = metadata_bytes(pair)
    assert inline > 0 and moved == 0
    assert caplog.text.count("it has no rows") == (side == DisaggregationMode.DECODE)


# ---- faults ------------------------------------------------------------------------------------


def test_peers_that_share_no_link_for_rows(caplog: pytest.LogCaptureFixture) -> None:
    """Pages move, rows do not: all requests are served, with one warning."""

    def refuse(blocks: Sequence[Block]) -> TransferError | None:
        is_row = [block.length for block in blocks] == [ROW_BYTES]
        return PeerUnreachable("p", "maps no such memory") if is_row else None

    mover = LocalMover()
    mover.fails = refuse
    with caplog.at_level(logging.WARNING), make_pair(mover) as pair:
        for turn in ("cold", "cached"):
            run_all(pair, turn)
        inline, moved = metadata_bytes(pair)
        assert inline > 0 and moved == 0
        assert free_rows(pair) == [NUM_ROWS] * 2
    assert caplog.text.count("comes over the control connection (TCP)") == 1


def test_a_row_that_is_overwritten_fails_its_request_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with make_pair() as pair:
        role = pair.prefill.scheduler._role
        rows = pair.prefill.manager._args.aux_buffers
        assert isinstance(role, PrefillRole) and isinstance(rows, MetadataBuffers)
        complete = CommonKVSender.complete

        def spoil(sender: CommonKVSender, metadata: FirstToken, row: int | None) -> None:
            if role._rooms[sender.bootstrap_room].rid == "torn":
                rows._rows[row, 40] ^= 1
            complete(sender, metadata, row)

        monkeypatch.setattr(CommonKVSender, "complete", spoil)
        messages = [pair.request(rid, PROMPTS[4], greedy(5)) for rid in ("a", "torn", "b")]
        pair.run(*messages)
        assert_said(pair, messages[0], messages[2])
        reason = pair.result("torn").finish_reason
        assert reason is not None and reason.status_code == 503
        assert reason.message == (
            "reading the metadata from the prefill server failed: the row is torn: its checksum "
            "is of other bytes"
        )
        assert pair.result("torn").output_ids == []
        assert free_rows(pair) == [NUM_ROWS] * 2


@pytest.mark.parametrize("mode", [DisaggregationMode.PREFILL, DisaggregationMode.DECODE])
def test_memory_that_the_transport_refuses_ends_the_start(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mover = LocalMover()
    calls: list[Sequence[int]] = []

    def refuse(ptrs: Sequence[int], lengths: Sequence[int]) -> int:
        calls.append(ptrs)
        if len(calls) == 2:
            raise RegistrationError("Mooncake refused to register 2097152 bytes")
        return 0

    monkeypatch.setattr(mover, "batch_register", refuse)
    with pytest.raises(
        RuntimeError, match=r"metadata in memory of cpu: .*set SGLANG_MOONCAKE_SEND_AUX_TCP=1"
    ):
        make_manager(DisaggregationMode(mode), [Place(0).pool], mover)


def test_memory_is_registered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU pools and rows can be in an allocation of weights: it is not registered twice."""
    mover = LocalMover()
    monkeypatch.setattr(mover, "is_registered", lambda ptr, length: True)
    asked: list[Sequence[int]] = []
    monkeypatch.setattr(mover, "batch_register", lambda ptrs, lengths: asked.append(ptrs))
    make_manager(DisaggregationMode.DECODE, [Place(0).pool], mover)
    assert not asked


@pytest.mark.parametrize(("stays", "host"), [(True, host_identity()), (False, "")])
def test_rows_say_how_far_they_can_be_read(stays: bool, host: str) -> None:
    mover = LocalMover()
    mover.stays_on_host = stays
    with make_pair(mover) as pair:
        rows = pair.prefill.rooms._layout.rows
        assert rows is not None
        assert (rows.num_rows, rows.row_bytes, rows.host) == (NUM_ROWS, ROW_BYTES, host)
        run_all(pair, "here")
        assert metadata_bytes(pair)[0] == 0


# ---- ranks -------------------------------------------------------------------------------------


def test_a_rank_whose_metadata_has_not_come_holds_up_the_others(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    path = tmp_path_factory.mktemp("qwen3")
    save_tiny_checkpoint(path, "qwen3", num_attention_heads=8, eos_token_id=None)
    args: dict[str, Any] = {
        "page_size": 16,
        "pool_tokens": 512,
        "max_requests": 4,
        "chunked_prefill_size": 48,
    }
    with PdRanks(path, 2, 2, **args) as pair:
        slow = pair.movers[1]
        ids = prompt(5, 40)
        pair.run(pair.request("first", ids, greedy(4)))
        assert len(pair.result("first").output_ids) == 4

        slow.begun.clear()
        slow.hold = True
        message = pair.request("second", ids, greedy(4))
        # Its pages are there but for the last ones.
        pair.until(lambda: bool(slow.begun), message)
        slow.finish(slow.begun[0])
        pair.until(lambda: len(slow.begun) == 2)
        assert [block.length for block in slow.begun[1].blocks] == [ROW_BYTES]
        role = pair.decode.rigs[0].scheduler._role
        assert isinstance(role, DecodeRole)
        (coming,) = role._transferring.values()
        pair.until(lambda: coming.receiver.has_ended)
        for _ in range(20):
            pair.step()
        assert coming.receiver.poll() == KVPoll.Success, "this rank has all"
        assert "second" not in pair.decode.results, "and waits for the other one"
        slow.release()
        pair.until(lambda: "second" in pair.decode.results)
        assert pair.result("second").output_ids == pair.result("first").output_ids
