"""A prefill process with HiCache, a Mooncake Store and a Transfer Engine, ended again and again.

    python -m rigs.disaggregation.pd_restarts --times 50 [--transport nixl]

Mooncake is loaded twice in one process, as store client and as Transfer Engine, over TCP. Each
process serves what the last one left in the store to a decode process of the same kind. Every other
process ends in order and must exit with 0; the others are killed while a prompt is read from them,
or over NIXL, whose reads cannot be held, before it is computed.
"""

from __future__ import annotations

import argparse
import json
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from rigs.disaggregation.pd_pair import NEVER_ASKED
from rigs.disaggregation.pd_processes import RoleProcess
from rigs.schedulers import checkable_model
from rigs.schedulers.scheduler_rig import greedy, prompt
from rigs.stores.mooncake_cluster import MooncakeCluster
from sglang.embedded_mooncake import LOOPBACK
from sglang.srt.arg_groups.disaggregation import DisaggregationMode, TransferBackend
from sglang.srt.mem_cache.tree.radix_key import token_array
from sglang.srt.messages.io_struct import (
    Bootstrap,
    FlushCacheReqInput,
    TokenizedGenerateReqInput,
)

PAGE: Final = 16
_LENGTH: Final = 20 * PAGE
_ENV: Final = {
    "MOONCAKE_PROTOCOL": "tcp",
    "SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL": "1",
    "SGLANG_DISAGGREGATION_HEARTBEAT_MAX_FAILURE": "6",  # A busy machine may pause for seconds.
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "2",
    "MC_TCP_STATUS_TIMEOUT_SEC": "2",
}
_ARGS: Final[dict[str, Any]] = {
    "page_size": PAGE,
    "pool_tokens": 1024,
    "hicache_storage_backend": "mooncake",
    "hicache_storage_prefetch_policy": "wait_complete",
    "hicache_storage_backend_extra_config": json.dumps({"prefetch_threshold": PAGE}),
}


@dataclass(slots=True)
class Outcome:
    """Counts and results of a run."""

    ended: int = 0
    """Processes that exited with 0."""
    killed: int = 0
    from_storage: list[int] = field(default_factory=list)
    """Tokens of the prompt that came from the store, process by process."""
    seconds: float = 0.0


def run_restarts(times: int, over: TransferBackend = TransferBackend.MOONCAKE_TCP) -> Outcome:
    """One run. Raises AssertionError for wrong words, a crash, or a prompt that the store has
    lost."""
    began = time.monotonic()
    outcome = Outcome()
    with MooncakeCluster(segment_size="64mb") as cluster:
        env = {**_ENV, **cluster.engine_env()}
        with RoleProcess(DisaggregationMode.DECODE, env, over=over, **_ARGS) as decode:
            for number in range(times):
                with RoleProcess(DisaggregationMode.PREFILL, env, over=over, **_ARGS) as prefill:
                    _live(prefill, decode, number, over, outcome)
            decode.until(lambda facts: facts.is_idle and not facts.num_reads)
            decode.check()
            assert decode.stop() == 0
    outcome.seconds = time.monotonic() - began
    return outcome


def _live(
    prefill: RoleProcess,
    decode: RoleProcess,
    number: int,
    over: TransferBackend,
    outcome: Outcome,
) -> None:
    """One prefill process, to its end."""
    message = _message(f"shared {number}", prompt(1, _LENGTH, 1000), prefill, 2 * number + 1)
    for process in (prefill, decode):
        process.send(message)
    ended = decode.end_of(message.rid)
    words = checkable_model.words(message.input_ids.tolist(), message.seed, 8)
    assert ended.output_ids == words, ended
    outcome.from_storage.append(ended.from_storage)
    # The next process finds in the store what this one has written by now.
    prefill.until(lambda facts: facts.is_idle)
    if number % 2:
        prefill.check()
        status = prefill.stop()
        assert status == 0, f"process {number} exited with {status}"
        outcome.ended += 1
    else:
        holds = over != TransferBackend.NIXL
        decode.set(hold=holds)
        prefill.set(pause=not holds)
        read = _message(f"read {number}", prompt(number, 100, 1000), prefill, 2 * number + 2)
        for process in (prefill, decode):
            process.send(read)
        if holds:
            decode.until(lambda facts: facts.num_reads > 0)
        prefill.signal(signal.SIGKILL)
        decode.set(hold=False)
        assert decode.end_of(read.rid).reason.status_code == 503
        outcome.killed += 1
    # The next process may find its prompt only in the store.
    decode.until(lambda facts: facts.is_idle and not facts.num_reads)
    decode.send(FlushCacheReqInput(req_id=str(number)))


def _message(
    rid: str, ids: list[int], prefill: RoleProcess, room: int
) -> TokenizedGenerateReqInput:
    return TokenizedGenerateReqInput(
        rid=rid,
        input_ids=token_array(ids),
        sampling_params=greedy(8),
        seed=7,
        bootstrap=Bootstrap(prefill.endpoint or LOOPBACK, NEVER_ASKED, room),
    )


def assert_good(outcome: Outcome, times: int) -> None:
    """All processes have served, and all but the first from the store."""
    assert outcome.ended + outcome.killed == times
    assert outcome.from_storage[0] == 0
    assert min(outcome.from_storage[1:]) >= _LENGTH - PAGE, outcome.from_storage


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--times", type=int, default=50)
    parser.add_argument("--transport", type=TransferBackend, default=TransferBackend.MOONCAKE_TCP)
    args = parser.parse_args(argv)
    outcome = run_restarts(args.times, args.transport)
    assert_good(outcome, args.times)
    print(outcome)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
