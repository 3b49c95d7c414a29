"""The detokenizer process: token ids from the scheduler, text to the server process.

One thread, two sockets, and for each running request the state of its decoder.
"""

from __future__ import annotations

import logging
import multiprocessing
from collections import OrderedDict
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Final

import zmq

from sglang.srt.managers.detokenizer.incremental_detokenizer import (
    DecoderFactory,
    TextDecoder,
    make_decoder_factory,
)
from sglang.srt.managers.messages.io_struct import (
    DETOKENIZER_DECODER,
    BatchStrOutput,
    BatchTokenIDOutput,
    RequestOutput,
    TextOutput,
    encode,
)
from sglang.srt.managers.messages.ipc import (
    IpcAddresses,
    pull_socket,
    push_socket,
    send_error,
    send_ready,
)
from sglang.srt.utils.bad_messages import MALFORMED, BadMessages
from sglang.srt.utils.hf_tokenizer import get_tokenizer
from sglang.srt.utils.logging_utils import configure_logger
from sglang.srt.utils.portable_tokenizer import PortableTokenizer, TokenizerData
from sglang.srt.utils.process import freeze_heap, leave_signals_to_parent, start_parent_watch

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)

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
    """Read, convert, send, until the context of `source` is terminated.

    Bytes that are no message are dropped and counted in the log.
    """
    bad = BadMessages(logger, "message")
    while True:
        try:
            payload = source.recv()
        except zmq.ContextTerminated:
            return
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
    lost.

    Args:
        server_args: Resolved arguments.
        ipc: Socket addresses of this server.
        tokenizer: Data from the parent's tokenizer; None: the tokenizer is loaded here.
        ready_pipe: Gets one JSON message, by `send_ready` or `send_error`.
    """
    leave_signals_to_parent()
    configure_logger(server_args.log_level, "detokenizer")
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
