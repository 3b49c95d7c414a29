"""Messages between the server process, the scheduler and the detokenizer.

Every message is a tagged `msgspec.Struct`, encoded as msgpack (never pickle). `encode`, `frame_of`
and the decoders at the end are the only codec. The server's messages to the scheduler share one
frame for each turn of its event loop; every other frame is one message. Times are
`time.monotonic()` seconds of the machine on which all three run, counts are tokens.

At the end is the tick: rank 0's message to every rank at the start of a step. It has the inputs
that ranks could see differently: the messages, the time, and which grammars are compiled. On other
such inputs the ranks agree by the cache's tick sync or the status of transfers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Literal, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from sglang.srt.arg_groups.disaggregation import DisaggregationMode
from sglang.srt.messages.cache_report import CacheReport
from sglang.srt.sampling.sampling_params import SamplingParams

PackedTokens: TypeAlias = npt.NDArray[np.uint32]
"""Token ids. A message has their bytes, u32 little-endian, so that long prompts need no
conversion."""

TopLogprobs: TypeAlias = list[tuple[float, int]]
"""(logprob, token id), most likely first."""


class Message(msgspec.Struct, tag=True, kw_only=True, omit_defaults=True):
    """Base of everything on a socket."""


# ---- server -> scheduler -------------------------------------------------------------------


MAX_ROOM: Final = 2**63 - 1


class Bootstrap(msgspec.Struct, frozen=True):
    """The room of a request that a prefill and a decode server share, and the bootstrap server."""

    host: str
    """Host of the prefill server's bootstrap server, in the form of `canonical_host`."""
    port: int
    room: int
    """Number from 0 to `MAX_ROOM`. The sender of the request, usually a router, draws it."""


class TokenizedGenerateReqInput(Message):
    """One request, checked against every limit and ready to be scheduled."""

    rid: str
    input_ids: PackedTokens
    sampling_params: SamplingParams
    seed: int
    """Seed of sampling: `sampling_params.sampling_seed`, or drawn by the server."""
    stream: bool = False
    return_logprob: bool = False
    top_logprobs_num: int = 0
    logprob_start_len: int = -1
    """First prompt token of the prompt logprobs, which itself has none; -1: no prompt logprobs."""
    extra_key: str | None = None
    """`extra_key` and `cache_salt` in one unambiguous string, or None."""
    session_id: str | None = None
    """Session that will come back to this prefix."""
    priority: int = 0
    sample_of: str | None = None
    """Id of the request with the same prompt that has to be computed first."""
    return_cache_report: bool = False
    is_traced: bool = False
    """True if the last message has a cache report with the times of the request's stages."""
    bootstrap: Bootstrap | None = None
    """Set on a server that only prefills or only decodes; None: this server does both."""
    created_time: float = 0.0


class DeclineRoomReq(Message):
    """Tell the other server of a request that the request was refused before it came to
    the scheduler; else that server would wait for it."""

    bootstrap: Bootstrap
    reason: str


class AbortReq(Message):
    """End one request in any state, or with `abort_all` every request."""

    rid: str = ""
    abort_all: bool = False


class ControlReq(Message, kw_only=True):
    """A request without a prompt. A `ControlReqOutput` with the same id answers it."""

    req_id: str = ""
    """Set by `ControlClient.ask`."""


class FlushCacheReqInput(ControlReq):
    """Empty L1 and L2 once the scheduler is idle; wait at most `timeout` seconds for that."""

    timeout: float = 0.0
    only_asks: bool = False
    """True: only answer whether the scheduler became idle in time."""


class GetInternalStateReq(ControlReq):
    """Ask for a snapshot of the scheduler's state."""


class GetMetricsReq(ControlReq):
    """Ask for the scheduler's metrics: `data["text"]` has Prometheus' text format."""


class GetCacheViewReq(ControlReq):
    """Ask what is in the cache, for people: see `cache_view`."""


class SessionReqInput(ControlReq):
    """A session goes on: what is kept for it is kept longer."""

    session_id: str
    extra_key: str | None = None
    """See `TokenizedGenerateReqInput`."""
    is_closed: bool = False
    """The session has ended: nothing is kept for it any more."""


class PauseGenerationReqInput(ControlReq):
    """Launch no step until `ContinueGenerationReqInput` or `ShutdownReq`; the answer comes after
    the results of the step in flight. All other work goes on."""


class ContinueGenerationReqInput(ControlReq):
    """End a pause, if there is one."""


class StartProfileReqInput(ControlReq):
    """Profile the next steps, on every rank; the answer has the file of rank 0."""

    profile_id: str
    """Begin of the names of files."""
    num_steps: int
    activities: list[str] | None = None
    """Some of `CPU` and `GPU`; None means all activities of the device."""
    record_shapes: bool = False


class StopProfileReqInput(ControlReq):
    """End the profile under way before its last step."""


class AttachHiCacheStorageReqInput(ControlReq):
    """Attach an L3 backend, or update the policies of the one that is attached."""

    hicache_storage_backend: str
    hicache_storage_backend_extra_config_json: str | None = None
    hicache_storage_prefetch_policy: str | None = None
    hicache_write_policy: str | None = None
    only_prepares: bool = False
    """True: connect, and change nothing before a `SettleHiCacheStorageReqInput`."""


class SettleHiCacheStorageReqInput(ControlReq):
    """Take up what an `AttachHiCacheStorageReqInput` has prepared, or (not `keeps`) undo it."""

    keeps: bool


class DetachHiCacheStorageReqInput(ControlReq):
    """Detach the L3 backend; its objects stay."""


class ClearHiCacheReqInput(ControlReq):
    """Remove this namespace's objects from L3."""


class GetHiCacheStorageReqInput(ControlReq):
    """Ask which L3 backend is attached, and for the policies."""


class GetWeightSeedReq(ControlReq):
    """Ask where the weights of a rank are, for a server that reads them."""

    rank: int


class PDRoleSwitchReqInput(ControlReq):
    """Become a prefill or a decode server. The answer has the `role` and, after a change, the
    `routes` of all ranks; or what is under way (`busy`): then nothing has changed."""

    new_role: DisaggregationMode


class ShutdownReq(Message):
    """Finish running requests within `timeout` seconds, complete pending write-backs, then exit
    0."""

    timeout: float


# ---- scheduler -> server -------------------------------------------------------------------


class StepCall(Message):
    """One DP group to the others: take part in a step."""

    number: int
    """Which one it is: the groups count them together."""


class ControlReqOutput(Message):
    """The answer to a `ControlReq`."""

    req_id: str
    success: bool
    message: str = ""
    """The work done, or the reason why not. Safe to show to a user."""
    data: dict[str, Any] = {}


# ---- scheduler -> detokenizer -> server ----------------------------------------------------


class FinishReason(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Reason why a request ended, as `meta_info.finish_reason` shows it."""

    type: str
    """`stop`, `length` or `abort`."""
    matched: int | str | None = None
    """The stop token or stop string."""
    length: int | None = None
    message: str | None = None
    """abort: the cause."""
    status_code: int | None = None
    """abort: the HTTP status that fits the cause."""


def abort_reason(message: str, status_code: int) -> FinishReason:
    """Why the engine refuses or ends a request; `status_code` is the HTTP status that fits."""
    return FinishReason(type="abort", message=message, status_code=status_code)


CLIENT_ABORT_STATUS: Final = 499
"""Status of a request that was aborted on demand. Such a request did not fail: it keeps its
output."""
ABORTED_BY_CLIENT: Final = abort_reason("aborted by its client or an operator", CLIENT_ABORT_STATUS)


Tier: TypeAlias = Literal["none", "device", "host", "storage"]
"""Origin of a prefix; `none` if no token was cached."""


class CachedTokensDetails(msgspec.Struct, kw_only=True, frozen=True):
    """Tokens of the prefix that a request reused when it was first scheduled, by tier."""

    device: int = 0
    host: int = 0
    storage: int = 0
    storage_backend: str | None = None
    """Class name of the L3 backend; None without one."""

    @property
    def total(self) -> int:
        return self.device + self.host + self.storage

    @property
    def lowest_tier(self) -> Tier:
        """The lowest tier that contributed."""
        if self.storage:
            return "storage"
        if self.host:
            return "host"
        return "device" if self.device else "none"


class Verifications(msgspec.Struct, kw_only=True):
    """Verifications of drafted tokens, one for each request and decode step."""

    count: int = 0
    accepted: int = 0
    """Drafts that became output."""

    @property
    def accept_length(self) -> float:
        """Output tokens of one on average: the accepted drafts and one more. 0 without any."""
        return (self.count + self.accepted) / self.count if self.count else 0.0


class Stages(msgspec.Struct, kw_only=True):
    """Durations of a request's stages, in seconds. The clock of one machine measures each.

    None: the request was not in that stage. The sum may differ from the whole: messages take time,
    and pages are read while later ones are computed.
    """

    queue: float | None = None
    """Time from its arrival to the first step for it. On a decode server: the wait for slots, plus
    the time on the prefill server from the first question for it to that step."""
    l3_wait: float | None = None
    """The part of `queue` in which it had its turn, and waited for its read from L3. On a
    decode server: this wait plus that of the prefill server."""
    prefill: float | None = None
    """Time from the first step for it to its first token, on the server that computed them."""
    transfer: float | None = None
    """Time with a read of its pages in flight. On a prefill server: time from its first token until
    the decode server has all pages, which is the part that computing did not hide."""
    decode: float | None = None
    """Time from its first token to its end; on a decode server, from the arrival of that token."""


class RequestOutput(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The new output of one request since the last message about it."""

    rid: str
    output_ids: list[int]
    """New tokens. The one that stopped the request is included."""
    finish_reason: FinishReason | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    """Output tokens so far, the new ones included."""
    cached_tokens_details: CachedTokensDetails = CachedTokensDetails()
    output_logprobs: list[float] | None = None
    """One for each of `output_ids`."""
    output_top_logprobs: list[TopLogprobs] | None = None
    input_logprobs: list[float] | None = None
    """Logprobs of the prompt's tokens after `logprob_start_len`; only in the first message."""
    input_top_logprobs: list[TopLogprobs] | None = None
    queue_time: float = 0.0
    stages: Stages | None = None
    """Only in the last message."""
    verifications: Verifications | None = None
    """Verifications so far, or None before the first."""
    cache_report: CacheReport | None = None
    """Only in the last message of a request that asks for it or is traced, if it was
    scheduled."""
    skip_special_tokens: bool = True
    shown_chars: int | None = None
    """Characters of the output that may be shown: up to the stop string or pattern that ended it,
    or up to the place where one may begin. None: no bound."""


class BatchTokenIDOutput(Message):
    """Scheduler to detokenizer: all new outputs of one step."""

    outputs: list[RequestOutput]


class TextOutput(msgspec.Struct, kw_only=True, omit_defaults=True):
    """`RequestOutput` with its text: `text` continues the text of the last message."""

    output: RequestOutput
    text: str


class BatchStrOutput(Message):
    """Detokenizer to server: the same outputs with their text."""

    outputs: list[TextOutput]


class HeldPagesReport(Message):
    """Scheduler of a DP group to server: how the set of its tree's pages has changed. Pages have
    numbers by `hash_str_to_int64`, and a message has their bytes, int64 of the machine."""

    dp_rank: int
    is_cleared: bool = False
    """True: the tree has forgotten all pages, before the others came."""
    stored: bytes = b""
    removed: bytes = b""


ToScheduler: TypeAlias = (
    TokenizedGenerateReqInput
    | DeclineRoomReq
    | AbortReq
    | FlushCacheReqInput
    | GetInternalStateReq
    | GetMetricsReq
    | GetCacheViewReq
    | SessionReqInput
    | PauseGenerationReqInput
    | ContinueGenerationReqInput
    | StartProfileReqInput
    | StopProfileReqInput
    | AttachHiCacheStorageReqInput
    | SettleHiCacheStorageReqInput
    | DetachHiCacheStorageReqInput
    | ClearHiCacheReqInput
    | GetHiCacheStorageReqInput
    | GetWeightSeedReq
    | PDRoleSwitchReqInput
    | ShutdownReq
    | StepCall
)
SchedulerOutput: TypeAlias = BatchTokenIDOutput | ControlReqOutput | HeldPagesReport
"""Messages of the first: to the detokenizer; of the others: to the server."""
ToServer: TypeAlias = BatchStrOutput | ControlReqOutput | HeldPagesReport

_WIRE_TOKEN = np.dtype("<u4")


def _pack(value: object) -> bytes:
    assert isinstance(value, np.ndarray), f"no message has a {type(value).__name__}"
    return value.astype(_WIRE_TOKEN, copy=False).tobytes()


def unpack_tokens(_: object, value: object) -> PackedTokens:
    """Decoding hook for the one type that msgspec does not know; msgspec wraps the errors it
    raises."""
    if not isinstance(value, bytes):
        raise TypeError("token ids are bytes, four for each")
    return np.frombuffer(value, dtype=_WIRE_TOKEN)


_encoder = msgspec.msgpack.Encoder(enc_hook=_pack)


encode: Final = _encoder.encode
"""Encodes one message, or a struct that contains messages."""


def frame_of(messages: Sequence[bytes]) -> bytes:
    """A frame for the scheduler: encoded messages, in order."""
    return _encoder.encode([msgspec.Raw(message) for message in messages])


SCHEDULER_DECODER: Final[msgspec.msgpack.Decoder[list[ToScheduler]]] = msgspec.msgpack.Decoder(
    list[ToScheduler], dec_hook=unpack_tokens
)
"""Decoder of the frames that the scheduler receives. Raises `msgspec.DecodeError` on hostile
bytes."""
DETOKENIZER_DECODER: Final = msgspec.msgpack.Decoder(BatchTokenIDOutput)
"""Decoder of the frames that the detokenizer receives."""
SERVER_DECODER: Final[msgspec.msgpack.Decoder[ToServer]] = msgspec.msgpack.Decoder(ToServer)
"""Decoder of the frames that the server process receives."""


class GrammarResult(msgspec.Struct, frozen=True, omit_defaults=True):
    """Result of compiling the grammar of a request."""

    rid: str
    failure: str | None = None
    """Reason for the client why it failed; None: the grammar is ready."""


class Tick(msgspec.Struct, frozen=True, omit_defaults=True):
    """Input of all ranks at the start of a step."""

    now: float
    """`time.monotonic()` of rank 0."""
    messages: Sequence[ToScheduler] = ()
    grammars: Sequence[GrammarResult] = ()
    """Grammars of requests that wait or are among the messages."""
    is_idle: bool = False
    """True: nothing happens but a part of the check of page ownership, since the scheduler has been
    idle for a while."""


decode_tick: Final = msgspec.msgpack.Decoder(Tick, dec_hook=unpack_tokens).decode
"""Decodes an encoded `Tick`. Raises `msgspec.DecodeError` on anything else."""
