"""The engine in the server process; and `sglang.Engine(...).generate(...)`, which has no HTTP."""

from __future__ import annotations

import asyncio
import atexit
import logging
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, TypeVar

from sglang.srt.arg_groups.checks import reports_held_pages
from sglang.srt.arg_groups.disaggregation import (
    DisaggregationMode,
    TransferBackend,
    prefill_hosts,
)
from sglang.srt.arg_groups.remote_weights import START_SEED
from sglang.srt.configs.generation_config import SamplingDefaults, sampling_defaults
from sglang.srt.entrypoints.engine_processes import EngineProcesses, launch_subprocesses
from sglang.srt.entrypoints.http.errors import ApiError
from sglang.srt.entrypoints.http.pd_role import PDRole
from sglang.srt.entrypoints.http.server_context import ServerContext
from sglang.srt.entrypoints.local_model import with_local_model
from sglang.srt.entrypoints.native_protocol import GenerateBody, to_requests
from sglang.srt.entrypoints.native_routes import stream_answers, whole_answers
from sglang.srt.entrypoints.openai.parser_choice import with_parsers
from sglang.srt.entrypoints.start_checks import check_start
from sglang.srt.managers.tokenizer.chat_template import ChatTemplate
from sglang.srt.managers.tokenizer.dp_groups import DPGroups, sums_of
from sglang.srt.managers.tokenizer.generate_request import EngineUnavailable, GenerateRequest
from sglang.srt.managers.tokenizer.group_prefixes import GroupPrefixes
from sglang.srt.managers.tokenizer.request_limits import RequestLimits
from sglang.srt.managers.tokenizer.server_channel import internal_states
from sglang.srt.managers.tokenizer.tokenizer_manager import TokenizerManager
from sglang.srt.observability.engine_metrics import ServerMetrics, model_label
from sglang.srt.observability.trace_recorder import TraceRecorder
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.hf_tokenizer import get_tokenizer
from sglang.srt.utils.logging_utils import configure_logger
from sglang.srt.utils.portable_tokenizer import TokenizerData, tokenizer_data
from sglang.srt.utils.process import postponing_signals

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from transformers import PreTrainedTokenizerBase

    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.observability.tracing import Tracer


logger = logging.getLogger(__name__)

WRITE_BACK_SECONDS: Final = 30.0
"""Seconds that the scheduler has in a shutdown, to finish its requests and to write back to L3."""
_MARGIN_SECONDS: Final = 5.0


@dataclass(frozen=True, slots=True)
class _ModelFiles:
    """The part of the model that the server process itself needs; no weights."""

    args: ServerArgs
    """The server's, with the parsers that fit the chat template."""
    config: ModelConfig
    tokenizer: PreTrainedTokenizerBase
    chat_template: ChatTemplate
    sampling_defaults: SamplingDefaults


def _load_model_files(args: ServerArgs) -> _ModelFiles:
    """A ValueError names a file that is missing or broken, or a parser that does not fit."""
    assert args.model_path is not None, "resolved arguments name the model"
    with postponing_signals():
        # Imported late, since it takes seconds, during which the scheduler's process imports the
        # same.
        from sglang.srt.configs.model_config import ModelConfig

        config = ModelConfig.from_args(args)
        tokenizer = get_tokenizer(
            args.tokenizer_path or args.model_path, trust_remote_code=args.trust_remote_code
        )
    defaults = sampling_defaults(args.model_path, args.sampling_defaults, config.vocab_size)
    template = ChatTemplate(tokenizer, args.chat_template)
    args = with_parsers(args, template, config.architecture)
    return _ModelFiles(args, config.with_end_of(tokenizer), tokenizer, template, defaults)


class EngineFront:
    """One running engine in the server process. Constructed before the event loop runs."""

    def __init__(self, args: ServerArgs) -> None:
        """Start the engine's processes; takes as long as loading the model. `args` are resolved.

        Raises:
            ValueError: The model's files are missing or broken, the hub does not have them, L3
                cannot work, or the bootstrap port is in use.
            StartError: A process could not start.
        """
        args = with_local_model(args)
        check_start(args)
        loaded: list[_ModelFiles] = []

        def load() -> TokenizerData | None:
            loaded.append(_load_model_files(args))
            return tokenizer_data(loaded[0].tokenizer)

        self._role = PDRole(args)
        try:
            self.processes: EngineProcesses = launch_subprocesses(args, load)
        except BaseException:
            self._role.close()
            raise
        [files] = loaded
        args, config = files.args, files.config
        logger.info("%s", files.sampling_defaults.line())
        details = _least_limits(self.processes.ready_details)
        self._role.args = args
        self._role.register(details["routes"])
        metrics = ServerMetrics(model_label(args)) if args.enable_metrics else None
        self.manager = TokenizerManager(
            ipc=self.processes.ipc,
            tokenizer=files.tokenizer,
            limits=RequestLimits(
                vocab_size=config.vocab_size,
                context_len=config.context_len,
                max_input_len=int(details["max_req_input_len"]),
                max_queued_requests=args.max_queued_requests,
                disaggregation_mode=args.disaggregation_mode,
                prefill_hosts=prefill_hosts(args, args.host),
                draws_rooms=args.disaggregation_transfer_backend == TransferBackend.FAKE,
                num_dp_groups=args.attn_dp_size,
            ),
            metrics=metrics,
            log_requests=args.log_requests,
            tracer=make_tracer(args, None if metrics is None else metrics.registry),
            groups=_dp_groups(args),
            recorder=make_recorder(args),
        )
        self.context = ServerContext(
            args=args,
            manager=self.manager,
            chat_template=files.chat_template,
            sampling_defaults=files.sampling_defaults,
            ready_details=details,
            model_info=describe_model(args, config, details),
            pd_role=self._role,
        )

    async def drain(self, timeout: float) -> bool:
        """Shut down in order: the scheduler finishes running requests and writes back, for at most
        `timeout` seconds, then all processes end. True: the scheduler ended by itself, with status
        0."""
        self.manager.refusal = "the server is shutting down"
        self.processes.expect_end()
        try:
            await self.manager.shut_down_scheduler(timeout)
            ended_well = await asyncio.to_thread(
                self.processes.wait_for_scheduler, timeout + _MARGIN_SECONDS
            )
        except EngineUnavailable:
            ended_well = False
        await self.manager.close()
        if self.manager.tracer is not None:
            await asyncio.to_thread(self.manager.tracer.close)
        await asyncio.to_thread(self._role.close)
        await asyncio.to_thread(self.processes.kill)
        return ended_well


def _dp_groups(args: ServerArgs) -> DPGroups:
    size, prefixes = args.attn_dp_size, None
    if reports_held_pages(args):
        assert args.page_size is not None, "resolved"
        prefixes = GroupPrefixes(size, args.page_size)
    return DPGroups(size, args.load_balance_method, prefixes)


def _least_limits(details: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The ready message of the first DP group, with limits that hold in every group, and the routes
    of all."""
    names = ("max_total_num_tokens", "max_req_input_len", "max_running_requests")
    least = {name: min(one[name] for one in details) for name in names}
    return {**details[0], **least, "routes": [route for one in details for route in one["routes"]]}


def make_tracer(args: ServerArgs, registry: CollectorRegistry | None) -> Tracer | None:
    """The tracer of a server with `--enable-trace`, whose packages `check_start` has found; None
    without. Raises ValueError if the endpoint is wrong."""
    if not args.enable_trace:
        return None
    from sglang.srt.observability import tracing

    exporter = tracing.make_exporter(args.otlp_traces_endpoint)
    mode = args.disaggregation_mode
    is_fixed = mode != DisaggregationMode.NULL and not args.enable_pd_role_switch
    service = f"sglang-{mode}" if is_fixed else "sglang"
    return tracing.Tracer(exporter, service, f"{args.host}:{args.port}", registry)


def make_recorder(args: ServerArgs) -> TraceRecorder | None:
    """The recorder of a server with `--record-trace`. Raises ValueError if the file is wrong."""
    if args.record_trace is None:
        return None
    return TraceRecorder(args.record_trace, args.record_trace_share, args.record_trace_mb)


def describe_model(
    args: ServerArgs, config: ModelConfig, details: Mapping[str, Any]
) -> dict[str, Any]:
    """`/model_info`: SGLang's fields, and sizes. `details` are those of the ready message."""
    return {
        "model_path": args.model_path,
        "tokenizer_path": args.tokenizer_path,
        "served_model_name": args.served_model_name,
        "is_generation": True,
        "preferred_sampling_params": None,
        "weight_version": "default",
        "has_image_understanding": False,
        "has_audio_understanding": False,
        "model_type": config.model_type,
        "architectures": [config.architecture],
        "vocab_size": config.vocab_size,
        "context_length": config.context_len,
        "max_req_input_len": details["max_req_input_len"],
        "max_total_num_tokens": details["max_total_num_tokens"],
        "eos_token_ids": list(config.eos_token_ids),
    }


T = TypeVar("T")

_SHUTDOWN_SECONDS: Final = 30.0
_START_SECONDS: Final = 10.0


class Engine:
    """An engine with child processes of its own; any thread may call `generate`.

    Its event loop runs in the thread `engine-loop`. `with Engine(...) as engine:` shuts it down.
    """

    def __init__(self, *, server_args: ServerArgs | None = None, **kwargs: Any) -> None:
        """Start the engine, which takes as long as loading the model.

        Args:
            server_args: All settings; None: they are given as keywords (`model_path=...`).

        Raises:
            ValueError: A setting is unknown or wrong, the model's files are missing or broken, or
                the store of L3 does not answer.
            StartError: A process could not start.
        """
        if server_args is not None and kwargs:
            raise ValueError("give server_args or keywords, not both")
        if server_args is None:
            server_args = ServerArgs.from_kwargs(**{"log_level": "error", **kwargs})
        if server_args.remote_instance_weight_loader_start_seed_via_transfer_engine:
            raise ValueError(
                f"{START_SEED} has no effect here: other servers ask over HTTP for the addresses "
                "of weights; start a server"
            )
        configure_logger(server_args.log_level, style=server_args.log_format)
        self.server_args = server_args.resolve()
        self._front = EngineFront(self.server_args)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="engine-loop", daemon=True
        )
        self._thread.start()
        self._closed = False
        self._submit(self._front.manager.start(), _START_SECONDS)
        self._front.processes.watch(self._front.manager.fail_all_threadsafe)
        atexit.register(self.shutdown)

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.shutdown()

    def generate(
        self,
        prompt: str | list[str] | None = None,
        sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None,
        input_ids: list[Any] | None = None,
        *,
        stream: bool = False,
        **fields: Any,
    ) -> Any:
        """Complete prompts, like `POST /generate`: give one text or several as `prompt`, or the
        token ids of one prompt or several as `input_ids`.

        Args:
            sampling_params: Parameters for all prompts, or a list with one for each.
            stream: Return an iterator of cumulative answers.
            fields: Other fields of the endpoint (`return_logprob`, `rid`, `extra_key`, ...).

        Returns:
            An answer, a list of them for a batch, or their iterator.

        Raises:
            ValueError: A field is wrong; names it.
            EngineUnavailable: The engine has died or was shut down.
            RequestFailed: The engine refused the request or failed on it.
        """
        requests, is_batch = self._requests(prompt, sampling_params, input_ids, stream, fields)
        with_text = bool(fields.get("return_text_in_logprobs"))
        if stream:
            return self._iterate(requests, is_batch, with_text)
        answers = self._submit(whole_answers(self._front.manager, requests, with_text))
        return answers if is_batch else answers[0]

    async def async_generate(
        self,
        prompt: str | list[str] | None = None,
        sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None,
        input_ids: list[Any] | None = None,
        *,
        stream: bool = False,
        **fields: Any,
    ) -> Any:
        """Like `generate`, for callers with an event loop of their own; streams are async
        iterators."""
        requests, is_batch = self._requests(prompt, sampling_params, input_ids, stream, fields)
        with_text = bool(fields.get("return_text_in_logprobs"))
        if stream:
            return self._iterate_async(requests, is_batch, with_text)
        work = whole_answers(self._front.manager, requests, with_text)
        answers = await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))
        return answers if is_batch else answers[0]

    def flush_cache(self, timeout: float = 0.0) -> bool:
        """Empty L1 and L2, after waiting at most `timeout` seconds for the engine to be idle;
        return whether it was done."""
        return self._submit(self._front.manager.flush_cache(timeout)).success

    def get_server_info(self) -> dict[str, Any]:
        """Settings without secrets, and the engine's present state."""
        states = self._submit(internal_states(self._front.manager.control))
        details = self._front.context.ready_details
        return {
            **self.server_args.to_public_dict(),
            **details,
            "default_sampling_params": self._front.context.sampling_defaults.all_values,
            "transfer_engine": states[0]["transfer_engine"],
            "internal_states": states,
            "sums": sums_of(states),
        }

    def shutdown(self) -> None:
        """End the engine's processes in order. Idempotent."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.shutdown)
        drained = asyncio.run_coroutine_threadsafe(self._front.drain(_SHUTDOWN_SECONDS), self._loop)
        try:
            drained.result()
        finally:
            self._front.processes.kill()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def _submit(self, work: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
        if self._closed:
            work.close()
            raise EngineUnavailable("the engine has been shut down")
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout)

    def _requests(
        self,
        prompt: str | list[str] | None,
        sampling_params: dict[str, Any] | list[dict[str, Any]] | None,
        input_ids: list[Any] | None,
        stream: bool,
        fields: dict[str, Any],
    ) -> tuple[list[GenerateRequest], bool]:
        unknown = fields.keys() - set(GenerateBody.__struct_fields__)
        if unknown:
            raise ValueError(f"generate() has no field {sorted(unknown)[0]!r}")
        body = GenerateBody(
            text=prompt,
            sampling_params=sampling_params,
            input_ids=input_ids,
            stream=stream,
            **fields,
        )
        try:
            return to_requests(body, self._front.context.sampling_defaults.values)
        except ApiError as error:
            raise ValueError(error.message) from None

    def _iterate(
        self, requests: list[GenerateRequest], is_batch: bool, with_text: bool
    ) -> Iterator[dict[str, Any]]:
        answers = stream_answers(self._front.manager, requests, is_batch, with_text)
        try:
            while (answer := self._submit(_next(answers))) is not None:
                yield answer
        finally:
            if not self._closed:
                self._submit(answers.aclose())

    async def _iterate_async(
        self, requests: list[GenerateRequest], is_batch: bool, with_text: bool
    ) -> AsyncIterator[dict[str, Any]]:
        queue: asyncio.Queue[dict[str, Any] | BaseException | None] = asyncio.Queue()
        home = asyncio.get_running_loop()

        async def pump() -> None:
            answers = stream_answers(self._front.manager, requests, is_batch, with_text)
            end: BaseException | None = None
            try:
                async with aclosing(answers):
                    async for answer in answers:
                        home.call_soon_threadsafe(queue.put_nowait, _snapshot(answer))
            except Exception as error:  # noqa: BLE001 - raised again where the caller waits
                end = error
            home.call_soon_threadsafe(queue.put_nowait, end)

        running = asyncio.run_coroutine_threadsafe(pump(), self._loop)
        try:
            while isinstance(item := await queue.get(), dict):
                yield item
            if item is not None:
                raise item
        finally:
            running.cancel()


async def _next(answers: AsyncGenerator[dict[str, Any], None]) -> dict[str, Any] | None:
    async for answer in answers:
        return _snapshot(answer)
    return None


def _snapshot(answer: dict[str, Any]) -> dict[str, Any]:
    """A copy for another thread, since the lists inside grow with the next step."""
    meta = {k: list(v) if isinstance(v, list) else v for k, v in answer["meta_info"].items()}
    return {**answer, "output_ids": list(answer["output_ids"]), "meta_info": meta}
