"""Incremental detokenization: any text in any increments, never half a character."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence

import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from rigs.servers.fake_engine import EOS_ID, byte_tokenizer
from sglang.srt.managers.detokenizer.detokenizer_manager import (
    Detokenizer,
    TextDecoder,
    WindowDecoder,
    make_decoder_factory,
    open_sockets,
    serve,
)
from sglang.srt.messages.io_struct import (
    BatchStrOutput,
    BatchTokenIDOutput,
    FinishReason,
    RequestOutput,
    encode,
)
from sglang.srt.messages.ipc import IpcAddresses, make_ipc_directory, push_socket
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=2, suite="base-a-test-cpu")

BYTES = byte_tokenizer()
NEW_BYTES = make_decoder_factory(BYTES)


def byte_fallback_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer like Llama 2's: words with a leading space, every other byte as `<0xNN>`."""
    vocab = {f"<0x{i:02X}>": i for i in range(256)}
    vocab.update({"▁a": 256, "▁b": 257, "c": 258, "▁": 259, "é": 260})
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend)  # type: ignore[no-untyped-call]


FALLBACK = byte_fallback_tokenizer()


def pieces(decoder: TextDecoder, ids: Sequence[int], cuts: Sequence[int]) -> list[str]:
    """Texts of the decoder for `ids`, which come in parts that end at `cuts`."""
    bounds = [0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
    parts = [decoder.feed(ids[a:b]) for a, b in itertools.pairwise(bounds)]
    return [*parts, decoder.finish()]


def byte_ids(text: str) -> list[int]:
    return [int(i) for i in BYTES.encode(text, add_special_tokens=False)]


@given(st.text(max_size=60), st.lists(st.integers(0, 250), max_size=30))
@settings(max_examples=300, deadline=None)
def test_any_text_survives_any_increments(text: str, cuts: list[int]) -> None:
    assert "".join(pieces(NEW_BYTES(True), byte_ids(text), cuts)) == text


@given(st.text(alphabet="aé漢😀 ", max_size=30))
@settings(max_examples=100, deadline=None)
def test_single_tokens_never_show_half_a_character(text: str) -> None:
    parts = pieces(NEW_BYTES(True), byte_ids(text), range(200))
    assert "".join(parts) == text
    assert "\ufffd" not in "".join(parts)


@given(st.lists(st.integers(0, 257), max_size=60), st.lists(st.integers(0, 60), max_size=10))
@settings(max_examples=200, deadline=None)
def test_any_tokens_decode_as_the_tokenizer_would(ids: list[int], cuts: list[int]) -> None:
    for skips in (True, False):
        whole = BYTES.decode(ids, skip_special_tokens=skips)
        assert "".join(pieces(NEW_BYTES(skips), ids, cuts)) == whole


@given(st.lists(st.integers(0, 260), max_size=40), st.lists(st.integers(0, 40), max_size=40))
@settings(max_examples=200, deadline=None)
def test_window_decoder_on_words_and_stray_bytes(ids: list[int], cuts: list[int]) -> None:
    valid = [i for i in ids if i < 0x80 or i >= 256]
    decoder = WindowDecoder(FALLBACK, frozenset())
    assert "".join(pieces(decoder, valid, cuts)) == FALLBACK.decode(valid)


@given(st.text(alphabet="aé漢😀", max_size=100))
@settings(max_examples=100, deadline=None)
def test_window_decoder_holds_unfinished_characters_back(text: str) -> None:
    ids = [256, *text.encode()]
    parts = pieces(WindowDecoder(FALLBACK, frozenset()), ids, range(len(ids)))
    assert "".join(parts) == "a" + text
    assert "\ufffd" not in "".join(parts)


def test_window_decoder_is_bounded_under_bytes_that_are_no_text() -> None:
    decoder = WindowDecoder(FALLBACK, frozenset())
    parts = [decoder.feed([0xFF]) for _ in range(1000)]
    assert len(decoder._window) <= 65
    assert "".join([*parts, decoder.finish()]) == "\ufffd" * 1000


def output(ids: list[int], reason: FinishReason | None = None, **fields: bool) -> RequestOutput:
    return RequestOutput(rid="r", output_ids=ids, finish_reason=reason, **fields)  # type: ignore[arg-type]


def texts(*outputs: RequestOutput) -> list[str]:
    detokenizer = Detokenizer(NEW_BYTES)
    batches = [detokenizer.process(BatchTokenIDOutput(outputs=[o])) for o in outputs]
    assert len(detokenizer) == (outputs[-1].finish_reason is None)
    return [batch.outputs[0].text for batch in batches]


def test_unfinished_bytes_come_out_at_the_end() -> None:
    half = byte_ids("é")[:1]
    length = FinishReason(type="length", length=2)
    assert texts(output(byte_ids("a")), output(half), output([], length)) == ["a", "", "\ufffd"]


def test_the_matched_stop_token_is_cut() -> None:
    a, b = byte_ids("ab")
    stop = FinishReason(type="stop", matched=b)
    assert texts(output([a, b], stop)) == ["a"]
    assert texts(output([a, b], FinishReason(type="length", length=2))) == ["ab"]


def test_special_tokens_are_left_out_unless_asked_for() -> None:
    [a] = byte_ids("a")
    assert texts(output([a, EOS_ID, a])) == ["aa"]
    assert texts(output([a, EOS_ID, a], skip_special_tokens=False)) == ["a<eos>a"]


def test_ids_beyond_the_tokenizer_are_no_text() -> None:
    assert texts(output([259])) == [""]


def test_state_is_bounded_and_requests_do_not_mix() -> None:
    detokenizer = Detokenizer(NEW_BYTES, max_requests=2)
    half = byte_ids("é")
    for rid in "abc":
        batch = BatchTokenIDOutput(outputs=[RequestOutput(rid=rid, output_ids=half[:1])])
        detokenizer.process(batch)
    assert len(detokenizer) == 2
    rest = [RequestOutput(rid=rid, output_ids=half[1:]) for rid in "cb"]
    assert [t.text for t in detokenizer.process(BatchTokenIDOutput(outputs=rest)).outputs] == [
        "é",
        "é",
    ]


def test_a_context_that_ends_in_the_middle_of_a_batch_ends_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    directory = make_ipc_directory()
    ipc = IpcAddresses(directory.path)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    source, sink = open_sockets(context, ipc)
    scheduler = push_socket(context, ipc.detokenizer_input)
    ending = threading.Thread(target=context.term)

    def process(_: Detokenizer, batch: BatchTokenIDOutput) -> BatchStrOutput:
        ending.start()
        with pytest.raises(zmq.ContextTerminated):
            scheduler.poll()
        return BatchStrOutput(outputs=[])

    monkeypatch.setattr(Detokenizer, "process", process)
    scheduler.send(encode(BatchTokenIDOutput(outputs=[])))
    try:
        serve(Detokenizer(make_decoder_factory(byte_tokenizer())), source, sink)
    finally:
        for socket in (source, sink, scheduler):
            socket.close(linger=0)
        directory.remove()
    ending.join(20.0)
    assert not ending.is_alive()
