"""Prefill and decode processes under load, of which some are killed and stopped all the time.

    python -m rigs.disaggregation.pd_soak --minutes 30 [--seed N]

Two processes of each kind. A request goes to one prefill and one decode process, as a router would
send it; some go to only one of them, some are aborted. A killed process is replaced; a stopped one
continues after up to twice the time that the others wait for it. Now and then the faults pause:
then every request must have ended, with its words or with an error that names what failed, all
processes must be idle, and their page ownership exact: no page is lost, none lingers.
"""

from __future__ import annotations

import argparse
import random
import re
import secrets
import signal
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from rigs.disaggregation.nixl_package import NOT_DRAWN, has_nixl
from rigs.disaggregation.pd_pair import NEVER_ASKED
from rigs.disaggregation.pd_processes import Ended, RoleProcess
from rigs.schedulers import checkable_model
from rigs.schedulers.scheduler_rig import greedy, prompt
from sglang.srt.arg_groups.disaggregation import DisaggregationMode, TransferBackend
from sglang.srt.mem_cache.tree.radix_key import token_array
from sglang.srt.messages.io_struct import (
    CLIENT_ABORT_STATUS,
    AbortReq,
    Bootstrap,
    TokenizedGenerateReqInput,
)

SILENT_S: Final = 2
ENV: Final = {
    "MOONCAKE_PROTOCOL": "tcp",
    "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": "4",
    "SGLANG_DISAGGREGATION_UNKNOWN_ROOM_TIMEOUT": "4",
    "SGLANG_DISAGGREGATION_WAITING_TIMEOUT": "10",
    "SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL": "1",
    "SGLANG_DISAGGREGATION_HEARTBEAT_MAX_FAILURE": str(SILENT_S),
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "2",
    "MC_TCP_STATUS_TIMEOUT_SEC": "2",
}
ARGS: Final[dict[str, Any]] = {
    "page_size": 4,
    "pool_tokens": 1024,
    "max_requests": 16,
    "chunked_prefill_size": 32,
}
_TRANSPORTS: Final = (TransferBackend.MOONCAKE_TCP, TransferBackend.NIXL)
_MODES: Final = (DisaggregationMode.PREFILL, DisaggregationMode.DECODE)
_NUM_EACH: Final = 2
_MAX_PENDING: Final = 24
_ROUND_S: Final = 15.0
_HANG_S: Final = 60.0
_NAMED: Final = re.compile(
    "|".join(
        (
            r"^the prefill server (at \S+ has not answered for|ended the request: .)",
            r"^the prefill server (let go of the pages|was replaced|does not know the request)",
            r"^the prefill server (has not computed more|'s pages could not be read)",
            r"^the prefill server's pages could not be read within",
            r"^reading (the metadata )?from the prefill server failed",
            r"^no slots were free for the request within",
            r"^reads of \d+ earlier prompts from the prefill server have not ended",
            r"^the decode server (gave it up: .|has not been heard of for)",
            r"^no decode server has asked for it within",
        )
    )
)


@dataclass(slots=True)
class _Pending:
    """A request under way."""

    message: TokenizedGenerateReqInput
    sent: float
    to_come: dict[DisaggregationMode, RoleProcess]
    """Processes, by mode, that have not reported the request's end yet."""
    was_aborted: bool = False

    @property
    def words(self) -> list[int]:
        message = self.message
        wanted = message.sampling_params.max_new_tokens
        return checkable_model.words(message.input_ids.tolist(), message.seed, wanted)


@dataclass(slots=True)
class Outcome:
    """Counts and results of a run."""

    counts: Counter[str] = field(default_factory=Counter)
    slowest: float = 0.0
    """Longest time from a request to its end in a process that was not stopped, in seconds."""
    wrong: list[str] = field(default_factory=list)
    hung: list[str] = field(default_factory=list)


class PdSoak:
    """Context manager: one run over one transport."""

    def __init__(self, seed: int, over: TransferBackend = TransferBackend.MOONCAKE_TCP) -> None:
        self._rng = random.Random(seed)
        self._over = over
        self.outcome = Outcome()
        self._processes: dict[str, list[RoleProcess]] = {mode: [] for mode in _MODES}
        self._stopped: dict[RoleProcess, float] = {}
        """Time at which each stopped process continues, in `time.monotonic()` seconds."""
        self._pending: dict[str, _Pending] = {}
        self._num_requests = 0
        self._prefixes: list[list[int]] = [prompt(seed, 120, 1000) for seed in range(4)]

    def __enter__(self) -> PdSoak:
        try:
            for mode in _MODES:
                for _ in range(_NUM_EACH):
                    self._processes[mode].append(self._start(mode))
        except BaseException:
            self._kill_all()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._kill_all()

    def _kill_all(self) -> None:
        for processes in self._processes.values():
            for process in processes:
                process.kill()

    def _start(self, mode: DisaggregationMode) -> RoleProcess:
        return RoleProcess(mode, ENV, holds=False, over=self._over, **ARGS)

    def run(self, seconds: float) -> Outcome:
        """Run rounds for `seconds`, at least one."""
        began = time.monotonic()
        while True:
            self._round()
            if time.monotonic() - began >= seconds:
                return self.outcome

    def _round(self) -> None:
        rng = self._rng
        end = time.monotonic() + _ROUND_S
        faults = rng.choice((0.0, 0.5, 1.0, 2.0))
        """Faults per second."""
        next_fault = time.monotonic() + rng.random()
        while (now := time.monotonic()) < end:
            if len(self._pending) < _MAX_PENDING:
                self._arrive()
            if rng.random() < 0.03:
                self._abort()
            if faults and now >= next_fault:
                self._fault()
                next_fault = now + rng.expovariate(faults)
            self._look()
            time.sleep(0.005)
        self._come_to_rest()
        self.outcome.counts["rounds with faults" if faults else "rounds without"] += 1

    # ---- requests ------------------------------------------------------------------------------

    def _running(self, mode: DisaggregationMode) -> list[RoleProcess]:
        return [one for one in self._processes[mode] if one not in self._stopped]

    def _arrive(self) -> None:
        rng = self._rng
        candidates = {mode: self._running(mode) for mode in _MODES}
        if not all(candidates.values()):
            return
        sides = {mode: rng.choice(candidates[mode]) for mode in _MODES}
        self._num_requests += 1
        number = self._num_requests
        ids = prompt(10_000 + number, rng.randint(1, 60), 1000)
        if rng.random() < 0.6:
            ids = rng.choice(self._prefixes)[: rng.randint(1, 120)] + ids
        message = TokenizedGenerateReqInput(
            rid=f"r{number}",
            input_ids=token_array(ids),
            sampling_params=greedy(rng.randint(1, 40)),
            seed=7,  # The cached tokens depend on it.
            bootstrap=Bootstrap(sides[DisaggregationMode.PREFILL].endpoint, NEVER_ASKED, number),
        )
        if rng.random() < 0.03:
            del sides[rng.choice(_MODES)]
            self.outcome.counts["requests that one side alone gets"] += 1
        for process in sides.values():
            process.send(message)
        self._pending[message.rid] = _Pending(message, time.monotonic(), sides)
        self.outcome.counts["requests"] += 1

    def _abort(self) -> None:
        if not self._pending:
            return
        rid = self._rng.choice(list(self._pending))
        pending = self._pending[rid]
        pending.was_aborted = True
        for process in pending.to_come.values():
            if process not in self._stopped:
                process.send(AbortReq(rid=rid))

    def _look(self) -> None:
        """Collect ended requests, and continue processes that were stopped for long enough."""
        now = time.monotonic()
        for process, until in list(self._stopped.items()):
            if now >= until:
                self._resume(process)
        for mode in _MODES:
            for process in self._running(mode):
                for rid, ended in process.take_ended().items():
                    self._on_end(rid, mode, ended)
        for rid, pending in list(self._pending.items()):
            if any(one in self._stopped for one in pending.to_come.values()):
                pending.sent = now  # No server can answer.
            elif now - pending.sent > _HANG_S:
                self.outcome.hung.append(f"{rid} at {[*pending.to_come]}")
                del self._pending[rid]

    def _on_end(self, rid: str, mode: DisaggregationMode, ended: Ended) -> None:
        pending = self._pending.get(rid)
        if pending is None:
            return  # The request hung.
        del pending.to_come[mode]
        self._forget(rid)
        counts, reason = self.outcome.counts, ended.reason
        words = pending.words if mode == DisaggregationMode.DECODE else pending.words[:1]
        if reason.type != "abort":
            self.outcome.slowest = max(self.outcome.slowest, time.monotonic() - pending.sent)
            if ended.output_ids == words:
                counts[f"{mode}: right"] += 1
            else:
                self.outcome.wrong.append(f"{rid} at {mode}: wrong words")
        elif ended.output_ids != words[: len(ended.output_ids)]:
            self.outcome.wrong.append(f"{rid} at {mode}: wrong words before {ended.why}")
        elif reason.status_code == CLIENT_ABORT_STATUS and pending.was_aborted:
            counts[f"{mode}: aborted"] += 1
        elif _NAMED.search(ended.why):
            counts[f"{mode}: failed"] += 1
        else:
            self.outcome.wrong.append(f"{rid} at {mode}: ended by {reason}")

    def _forget(self, rid: str) -> None:
        if not self._pending[rid].to_come:
            del self._pending[rid]

    # ---- faults --------------------------------------------------------------------------------

    def _fault(self) -> None:
        rng = self._rng
        mode = rng.choice(_MODES)
        running = self._running(mode)
        if not running:
            return
        victim = rng.choice(running)
        if rng.random() < 0.3:
            self._replace(mode, victim)
        else:
            victim.signal(signal.SIGSTOP)
            self._stopped[victim] = time.monotonic() + rng.uniform(0.1, 2 * SILENT_S)
            self.outcome.counts[f"{mode}: stopped"] += 1

    def _replace(self, mode: DisaggregationMode, victim: RoleProcess) -> None:
        victim.kill()
        for rid, pending in list(self._pending.items()):
            if pending.to_come.get(mode) is victim:
                del pending.to_come[mode]
                self._forget(rid)
                self.outcome.counts[f"{mode}: lost with its process"] += 1
        place = self._processes[mode].index(victim)
        self._processes[mode][place] = self._start(mode)
        self.outcome.counts[f"{mode}: killed"] += 1

    def _resume(self, process: RoleProcess) -> None:
        process.signal(signal.SIGCONT)
        del self._stopped[process]

    # ---- rest ----------------------------------------------------------------------------------

    def _come_to_rest(self) -> None:
        for process in list(self._stopped):
            self._resume(process)
        while self._pending:
            self._look()
            time.sleep(0.005)
        for mode in _MODES:
            for process in self._processes[mode]:
                process.until(lambda facts: facts.is_idle and not facts.num_lingering)
                process.check()
                self.outcome.counts["ownership checks"] += 1


def run_soak(
    seconds: float, seed: int, over: TransferBackend = TransferBackend.MOONCAKE_TCP
) -> Outcome:
    """One run. Raises AssertionError if a process does not come to rest, or pages are lost."""
    with PdSoak(seed, over) as soak:
        try:
            return soak.run(seconds)
        except BaseException as error:
            error.add_note(f"seed {seed}, so far {soak.outcome}")
            raise


def draw_transport(seed: int) -> TransferBackend:
    """A transport of this environment."""
    return _TRANSPORTS[seed % len(_TRANSPORTS)] if has_nixl() else _TRANSPORTS[0]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, help="[random]")
    parser.add_argument("--transport", type=TransferBackend, help="nixl or mooncake_tcp [drawn]")
    args = parser.parse_args(argv)
    seed = secrets.randbits(31) if args.seed is None else args.seed
    if not has_nixl():
        print(NOT_DRAWN)
    over = args.transport or draw_transport(seed)
    print(f"seed {seed}, {over}", flush=True)
    outcome = run_soak(60 * args.minutes, seed, over)
    print("\n".join(f"{n:10} {what}" for what, n in sorted(outcome.counts.items())))
    print(f"slowest {outcome.slowest:.1f} s")
    print(f"wrong: {outcome.wrong or 'none'}\nhung: {outcome.hung or 'none'}")
    return 1 if outcome.wrong or outcome.hung else 0


if __name__ == "__main__":
    raise SystemExit(main())
