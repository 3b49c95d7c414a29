"""Base of server and offline engine: checked arguments, processes, `TokenizerManager`."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any, Final

from sglang.srt.arg_groups.disaggregation import (
    DisaggregationMode,
    TransferBackend,
    moves_pages,
    prefill_hosts,
)
from sglang.srt.disaggregation.base.bootstrap_route import Route
from sglang.srt.disaggregation.common.bootstrap_server import CommonKVBootstrapServer
from sglang.srt.disaggregation.control.control_link import DeploymentSecret
from sglang.srt.entrypoints.engine_processes import EngineProcesses, launch_subprocesses
from sglang.srt.entrypoints.http.server_context import ServerContext
from sglang.srt.entrypoints.local_model import with_local_model
from sglang.srt.entrypoints.start_checks import check_start
from sglang.srt.managers.tokenizer.chat_template import ChatTemplate
from sglang.srt.managers.tokenizer.generate_request import EngineUnavailable
from sglang.srt.managers.tokenizer.request_limits import RequestLimits
from sglang.srt.managers.tokenizer.tokenizer_manager import TokenizerManager
from sglang.srt.observability.engine_metrics import ServerMetrics
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.hf_tokenizer import get_tokenizer
from sglang.srt.utils.portable_tokenizer import TokenizerData, tokenizer_data
from sglang.srt.utils.process import postponing_signals

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from sglang.srt.configs.model_config import ModelConfig

logger = logging.getLogger(__name__)

WRITE_BACK_SECONDS: Final = 30.0
"""Seconds that the scheduler has in a shutdown, to finish its requests and to write back to L3."""
_MARGIN_SECONDS: Final = 5.0


def _load_model_files(
    args: ServerArgs,
) -> tuple[ModelConfig, PreTrainedTokenizerBase, ChatTemplate]:
    """The part of the model that the server process itself needs; no weights.

    Raises:
        ValueError: A file is missing or broken; names it in one line.
    """
    assert args.model_path is not None, "resolved arguments name the model"
    with postponing_signals():
        # Imported late, since it takes seconds, during which the scheduler's process imports the
        # same.
        from sglang.srt.configs.model_config import ModelConfig

        config = ModelConfig.from_path(
            args.model_path,
            dtype=args.dtype,
            context_length=args.context_length,
            trust_remote_code=args.trust_remote_code,
            quantization=args.quantization,
        )
        tokenizer = get_tokenizer(
            args.tokenizer_path or args.model_path, trust_remote_code=args.trust_remote_code
        )
    return config, tokenizer, ChatTemplate(tokenizer, args.chat_template)


class EngineFront:
    """One running engine in the server process. Constructed before the event loop runs."""

    def __init__(self, args: ServerArgs) -> None:
        """Start the engine's processes; takes as long as loading the model.

        Args:
            args: Resolved arguments.

        Raises:
            ValueError: The model's files are missing or broken, the hub does not have them, L3
                cannot work, or the bootstrap port is in use.
            StartError: A process could not start.
        """
        args = with_local_model(args)
        check_start(args)
        loaded: list[tuple[ModelConfig, PreTrainedTokenizerBase, ChatTemplate]] = []

        def load() -> TokenizerData | None:
            loaded.append(_load_model_files(args))
            return tokenizer_data(loaded[0][1])

        self._bootstrap: CommonKVBootstrapServer | None = None
        if args.disaggregation_mode == DisaggregationMode.PREFILL and moves_pages(args):
            # Decode servers find this server there.
            self._bootstrap = CommonKVBootstrapServer(
                args.host,
                args.disaggregation_bootstrap_port,
                DeploymentSecret.of(args.disaggregation_secret),
            )
        try:
            self.processes: EngineProcesses = launch_subprocesses(args, load)
        except BaseException:
            if self._bootstrap is not None:
                self._bootstrap.close()
            raise
        config, tokenizer, chat_template = loaded[0]
        details = self.processes.ready_details
        if self._bootstrap is not None:
            for route in details["routes"]:
                self._bootstrap.register(Route(**route))
        self.manager = TokenizerManager(
            ipc=self.processes.ipc,
            tokenizer=tokenizer,
            limits=RequestLimits(
                vocab_size=config.vocab_size,
                context_len=config.context_len,
                max_input_len=int(details["max_req_input_len"]),
                max_queued_requests=args.max_queued_requests,
                disaggregation_mode=args.disaggregation_mode,
                prefill_hosts=prefill_hosts(args),
                draws_rooms=args.disaggregation_transfer_backend == TransferBackend.FAKE,
            ),
            metrics=ServerMetrics() if args.enable_metrics else None,
            log_requests=args.log_requests,
        )
        self.context = ServerContext(
            args=args,
            manager=self.manager,
            chat_template=chat_template,
            ready_details=details,
            model_info=_model_info(args, config, details),
        )

    async def drain(self, timeout: float) -> bool:
        """Shut down in order: the scheduler finishes running requests and writes back, then all
        processes end.

        Args:
            timeout: Seconds for the scheduler.

        Returns:
            Whether the scheduler ended by itself, with status 0.
        """
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
        if self._bootstrap is not None:
            await asyncio.to_thread(self._bootstrap.close)
        await asyncio.to_thread(self.processes.kill)
        return ended_well


def _model_info(args: ServerArgs, config: ModelConfig, details: dict[str, Any]) -> dict[str, Any]:
    return {
        "model_path": args.model_path,
        "tokenizer_path": args.tokenizer_path,
        "served_model_name": args.served_model_name,
        "is_generation": True,
        "preferred_sampling_params": None,
        "model_type": config.model_type,
        "architectures": [config.architecture],
        "vocab_size": config.vocab_size,
        "context_length": config.context_len,
        "max_req_input_len": details["max_req_input_len"],
        "max_total_num_tokens": details["max_total_num_tokens"],
        "eos_token_ids": list(config.eos_token_ids),
    }
