"""The detokenizer process: token ids from the scheduler, text to the server process.

One thread, two sockets, and for each running request the state of its decoder.
"""

from __future__ import annotations

import codecs
import contextlib
import logging
import multiprocessing
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Final, TypeAlias

import zmq

from sglang.srt.messages.io_struct import (
    DETOKENIZER_DECODER,
    BatchStrOutput,
    BatchTokenIDOutput,
    RequestOutput,
    TextOutput,
    encode,
)
from sglang.srt.messages.ipc import (
    IpcAddresses,
    pull_socket,
    push_socket,
    send_error,
    send_ready,
)
from sglang.srt.utils.bad_messages import MALFORMED, BadMessages
from sglang.srt.utils.hf_tokenizer import (
    get_tokenizer,
    is_byte_level,
    special_token_ids,
    token_bytes,
)
from sglang.srt.utils.logging_utils import configure_logger
from sglang.srt.utils.portable_tokenizer import DecodingTokenizer, PortableTokenizer, TokenizerData
from sglang.srt.utils.process import freeze_heap, leave_signals_to_parent, start_parent_watch

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)

REPLACEMENT: Final = "\N{REPLACEMENT CHARACTER}"

_WINDOW_TOKENS: Final = 64
_CHARACTER_TOKENS: Final = 4
"""Most tokens of one character: UTF-8 takes up to four bytes."""


class TextDecoder(ABC):
    """Decodes one request's output. The texts of all calls, joined, are the whole text."""

    @abstractmethod
    def feed(self, token_ids: Sequence[int]) -> str:
        """Text that became certain with `token_ids`; bytes of an unfinished character wait."""

    @abstractmethod
    def finish(self) -> str:
        """The text still held back, with U+FFFD for unfinished characters. Call it once, last."""


DecoderFactory: TypeAlias = Callable[[bool], TextDecoder]
"""Makes the decoder of one request; its argument is `skip_special_tokens`."""


def make_decoder_factory(tokenizer: DecodingTokenizer) -> DecoderFactory:
    """A factory of the decoders that are exact for `tokenizer`."""
    special = special_token_ids(tokenizer)
    if is_byte_level(tokenizer):
        vocabulary = ByteVocabulary(tokenizer)
        return lambda skip: ByteLevelDecoder(vocabulary, special if skip else frozenset())
    return lambda skip: WindowDecoder(tokenizer, special if skip else frozenset())


class ByteVocabulary:
    """Token id to bytes, filled as tokens appear; at most one entry for each token."""

    def __init__(self, tokenizer: DecodingTokenizer) -> None:
        self._tokenizer = tokenizer
        self._bytes: dict[int, bytes] = {}

    def __getitem__(self, token_id: int) -> bytes:
        found = self._bytes.get(token_id)
        if found is None:
            # The padding of the vocabulary has ids without a token.
            token = self._tokenizer.convert_ids_to_tokens(token_id)
            found = token_bytes(token) if isinstance(token, str) else b""
            self._bytes[token_id] = found
        return found


class ByteLevelDecoder(TextDecoder):
    """Decoder for byte-level BPE: constant work per token, a state of at most three bytes."""

    def __init__(self, vocabulary: ByteVocabulary, skipped: frozenset[int]) -> None:
        self._vocabulary = vocabulary
        self._skipped = skipped
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token_ids: Sequence[int]) -> str:
        vocabulary, skipped = self._vocabulary, self._skipped
        return self._decoder.decode(b"".join(vocabulary[i] for i in token_ids if i not in skipped))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class WindowDecoder(TextDecoder):
    """Decoder for all other tokenizers: decodes a sliding window of the last tokens.

    The text of a token may depend on its neighbours (spaces, byte fallback), so new text is the
    difference between the window decoded with and without the new tokens. All U+FFFD at the end are
    held back: byte fallback gives one for each byte of an incomplete run.
    """

    def __init__(self, tokenizer: DecodingTokenizer, skipped: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._window: list[int] = []
        self._context = 0
        """Leading tokens of the window that are only context: their text was sent before."""
        self._sent = 0
        """Characters of the decoded window that were sent."""

    def feed(self, token_ids: Sequence[int]) -> str:
        shown = [i for i in token_ids if i not in self._skipped]
        if not shown:
            return ""
        self._window += shown
        text = self._decode(self._window)
        certain = len(text.rstrip(REPLACEMENT))
        whole = certain == len(text)
        if len(self._window) > _WINDOW_TOKENS:
            # Invalid UTF-8: only the last few bytes can still become a character.
            certain = max(certain, len(text) - _CHARACTER_TOKENS)
        fresh = text[self._sent : certain]
        self._sent = max(self._sent, certain)
        self._slide(whole)
        return fresh

    def finish(self) -> str:
        return self._decode(self._window)[self._sent :]

    def _slide(self, whole: bool) -> None:
        """Drop old tokens; keep the tokens on which the text of the next ones may depend."""
        if whole:
            self._drop(self._context)
            self._context = len(self._window)
        elif len(self._window) > _WINDOW_TOKENS:
            self._drop(len(self._window) - 2 * _CHARACTER_TOKENS)
            self._context = 0

    def _drop(self, count: int) -> None:
        unsent = len(self._decode(self._window)) - self._sent
        del self._window[:count]
        self._sent = max(len(self._decode(self._window)) - unsent, 0)

    def _decode(self, token_ids: list[int]) -> str:
        text = self._tokenizer.decode(
            token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        assert isinstance(text, str)
        return text


MAX_REQUESTS: Final = 1 << 16
"""Limit of the decoders kept at once. A request's last output drops its decoder; the limit bounds
the memory in case last outputs are lost."""


class Detokenizer:
    """Turns batches of token ids into batches of text."""

    def __init__(self, new_decoder: DecoderFactory, max_requests: int = MAX_REQUESTS) -> None:
        self._new_decoder = new_decoder
        self._max_requests = max_requests
        self._decoders: OrderedDict[str, TextDecoder] = OrderedDict()

    def __len__(self) -> int:
        """Requests with state."""
        return len(self._decoders)

    def process(self, batch: BatchTokenIDOutput) -> BatchStrOutput:
        """The same outputs with their text, in the same order."""
        return BatchStrOutput(
            outputs=[TextOutput(output=o, text=self._text_of(o)) for o in batch.outputs]
        )

    def _text_of(self, output: RequestOutput) -> str:
        decoder = self._decoders.get(output.rid)
        if decoder is None:
            decoder = self._new_decoder(output.skip_special_tokens)
        if output.finish_reason is None:
            self._keep(output.rid, decoder)
            return decoder.feed(output.output_ids)
        self._decoders.pop(output.rid, None)
        return decoder.feed(_visible_ids(output)) + decoder.finish()

    def _keep(self, rid: str, decoder: TextDecoder) -> None:
        if rid not in self._decoders and len(self._decoders) >= self._max_requests:
            lost, _ = self._decoders.popitem(last=False)
            logger.warning("more than %d requests: dropped state of %s", self._max_requests, lost)
        self._decoders[rid] = decoder


def _visible_ids(output: RequestOutput) -> list[int]:
    """Tokens of `output` except the token that stopped the request."""
    reason = output.finish_reason
    ids = output.output_ids
    if reason is not None and reason.type == "stop" and ids and ids[-1] == reason.matched:
        return ids[:-1]
    return ids


def serve(detokenizer: Detokenizer, source: zmq.Socket[bytes], sink: zmq.Socket[bytes]) -> None:
    """Read, convert, send, until the context of the sockets is terminated.

    Bytes that are no message are dropped and counted in the log.
    """
    bad = BadMessages(logger, "message")
    with contextlib.suppress(zmq.ContextTerminated):
        while True:
            payload = source.recv()
            try:
                batch = DETOKENIZER_DECODER.decode(payload)
            except MALFORMED as error:
                bad.add(error)
                continue
            sink.send(encode(detokenizer.process(batch)))


def open_sockets(
    context: zmq.Context[zmq.Socket[bytes]], ipc: IpcAddresses
) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
    """The bound socket, to which the scheduler pushes, and the connected one, which pushes to the
    server."""
    source = pull_socket(context, ipc.detokenizer_input)
    sink = push_socket(context, ipc.server_input)
    sink.setsockopt(zmq.LINGER, 1000)
    return source, sink


def run_detokenizer_process(
    server_args: ServerArgs,
    ipc: IpcAddresses,
    tokenizer: TokenizerData | None,
    ready_pipe: Connection,
) -> None:
    """Entry point of the process; does not return while its parent lives.

    The parent handles signals for the process group, and ends this process last, so that no text is
    lost. `tokenizer` has data from the parent's tokenizer; None: it is loaded here. `ready_pipe`
    gets one JSON message, by `send_ready` or `send_error`.
    """
    leave_signals_to_parent()
    configure_logger(server_args.log_level, "detokenizer", server_args.log_format)
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid is not None:
        start_parent_watch(parent.pid, ipc.exit_as_orphan)
    try:
        detokenizer = _load(server_args, tokenizer)
    except ValueError as error:
        send_error(ready_pipe, str(error))
        raise SystemExit(1) from None
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    source, sink = open_sockets(context, ipc)
    freeze_heap()
    send_ready(ready_pipe, {})
    try:
        serve(detokenizer, source, sink)
    except Exception:
        logger.critical("the detokenizer failed", exc_info=True)
        raise SystemExit(1) from None


def _load(server_args: ServerArgs, data: TokenizerData | None) -> Detokenizer:
    if data is not None:
        return Detokenizer(make_decoder_factory(PortableTokenizer(data)))
    path = server_args.tokenizer_path or server_args.model_path
    assert path is not None, "resolved arguments name the model"
    tokenizer = get_tokenizer(path, trust_remote_code=server_args.trust_remote_code, is_known=True)
    return Detokenizer(make_decoder_factory(tokenizer))
