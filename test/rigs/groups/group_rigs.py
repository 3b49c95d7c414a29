"""Whole schedulers of several DP groups in one process, one rank each, which share the experts of a
real tiny model. Each runs its own loop in a thread, as processes of a server do."""

from __future__ import annotations

import dataclasses
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from rigs.caches.memory_ranks import MemoryExchange, MemoryTensorGroup, PlaceInGroup
from rigs.schedulers.scheduler_rig import SchedulerRig
from sglang.srt.layers.forward_batch_info import GroupStep
from sglang.srt.layers.placement import ExpertRanks
from sglang.srt.layers.token_exchange import TokenExchange
from sglang.srt.managers.scheduler.group_scheduler import GroupScheduler
from sglang.srt.managers.scheduler.scheduler import Scheduler, SchedulerResources
from sglang.srt.managers.scheduler.step_agreement import StepAgreement
from sglang.srt.messages.io_struct import (
    BatchTokenIDOutput,
    ControlReqOutput,
    SchedulerOutput,
    ShutdownReq,
    StepCall,
    ToScheduler,
)
from sglang.srt.model_executor.grouped_runner import GroupedModelRunner, GroupPlan
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.model_executor.runner_config import ModelRunnerConfig
from sglang.srt.utils.network import wait_until

_END_S: Final = 60.0


class NotedAgreement(StepAgreement):
    """Keeps what each round has given."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.steps: list[GroupStep | None] = []

    def join(self, plan: GroupPlan | None, **said: bool) -> GroupStep | None:
        step = super().join(plan, **said)
        self.steps.append(step)
        return step


class GroupRig(SchedulerRig):
    """One group: a scheduler, and the channel of its loop."""

    agreement: NotedAgreement

    def __init__(self, groups: GroupRigs, dp_rank: int, model_path: Path, **args: Any) -> None:
        self._groups, self._dp_rank = groups, dp_rank
        self._inbox: queue.SimpleQueue[ToScheduler] = queue.SimpleQueue()
        self._then: dict[str, tuple[int, Callable[[], None]]] = {}
        super().__init__(model_path, **args)

    def make_runner(self, config: ModelRunnerConfig) -> ModelRunner:
        groups = self._groups
        experts = ExpertRanks(
            group=PlaceInGroup(self._dp_rank, groups.size),
            is_whole=groups.is_whole,
            exchange=TokenExchange(MemoryTensorGroup(groups.tokens, self._dp_rank)),
        )
        return GroupedModelRunner(dataclasses.replace(config, experts=experts))

    def make_scheduler(self, resources: SchedulerResources) -> Scheduler:
        world = self._groups.rounds.group(self._dp_rank)
        runner = self.worker._runner
        assert isinstance(runner, GroupedModelRunner)
        self.agreement = NotedAgreement(world, self._dp_rank, self._groups.size, self._call)
        return GroupScheduler(self.server_args, resources, self.agreement, runner)

    def capture(self) -> None:
        """Capture decode steps, at the same time as the other groups."""
        runner = self.worker._runner
        runner.capture_decoding(runner.model.forward)

    def _call(self, number: int) -> None:
        for other in self._groups.rigs:
            if other is not self:
                other.post(StepCall(number=number))

    def post(self, *messages: ToScheduler) -> None:
        """Send messages to the scheduler. Any thread."""
        for message in messages:
            self._inbox.put(message)

    def receive(self, timeout_ms: int) -> list[ToScheduler]:
        """See `Channel`."""
        found: list[ToScheduler] = []
        try:
            # A loop of Python threads that never waits would starve the others.
            found.append(self._inbox.get(timeout=max(timeout_ms, 0.1) / 1000))
            while True:
                found.append(self._inbox.get_nowait())
        except queue.Empty:
            return found

    def send(self, output: SchedulerOutput) -> None:
        """See `Channel`."""
        if isinstance(output, ControlReqOutput):
            self.answers.append(output)
            return
        assert isinstance(output, BatchTokenIDOutput)
        for of_request in output.outputs:
            self._collect(of_request)
            tokens, then = self._then.get(of_request.rid, (0, None))
            if then is not None and self.num_tokens(of_request.rid) >= tokens:
                del self._then[of_request.rid]
                then()

    def on_tokens(self, rid: str, tokens: int, then: Callable[[], None]) -> None:
        """Call `then` once the request, which is not sent yet, has that many output tokens; in the
        loop's thread. From the second on, each round until its end has work of the request; behind
        the first, a round without any may come."""
        self._then[rid] = tokens, then

    def has_ended(self, rid: str) -> bool:
        """True if all of a request's output is there."""
        return rid in self.results and self.results[rid].finish_reason is not None

    def num_tokens(self, rid: str) -> int:
        """Output tokens of a request until now."""
        return len(self.results[rid].output_ids) if rid in self.results else 0


class GroupRigs:
    """`size` groups whose loops run inside the `with` block, which ends with a shutdown.

    Args:
        model_path: A checkpoint with experts.
        is_whole: True if each rank has some experts whole.
        captures: True if decode steps are captured; drafting workers do that by themselves.
        args: Arguments of `SchedulerRig`, or a function of a group's number that gives them.

    Attributes:
        rounds: The rounds of the groups' agreement.
        tokens: The exchanges of tokens.
    """

    def __init__(
        self,
        model_path: Path,
        size: int,
        *,
        is_whole: bool = False,
        captures: bool = False,
        args: Callable[[int], dict[str, Any]] = lambda dp_rank: {},
    ) -> None:
        self.size, self.is_whole = size, is_whole
        self.rounds, self.tokens = MemoryExchange(size), MemoryExchange(size)
        self._pool = ThreadPoolExecutor(size)

        def make(dp_rank: int) -> GroupRig:
            return GroupRig(self, dp_rank, model_path, **args(dp_rank))

        # Captured steps of all groups meet.
        self.rigs = list(self._pool.map(make, range(size)))
        if captures and self.rigs[0].worker.num_draft_tokens == 1:
            list(self._pool.map(GroupRig.capture, self.rigs))
        self._loops: list[Future[None]] = []
        self._failed = threading.Event()

    def __enter__(self) -> GroupRigs:
        self._loops = [self._pool.submit(self._run, rig) for rig in self.rigs]
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.stop()
        for loop in self._loops:
            loop.result(_END_S)
        self._pool.shutdown()
        for rig in self.rigs:
            if kind is None:
                rig.assert_clean()
            rig.close()

    def stop(self, timeout: float = 0.0) -> None:
        """Ask all groups to end."""
        for rig in self.rigs:
            rig.post(ShutdownReq(timeout=timeout))

    def _run(self, rig: GroupRig) -> None:
        try:
            rig.scheduler.run(rig)
        except BaseException as error:
            self._failed.set()
            for exchange in (self.rounds, self.tokens):
                exchange.fail(error)
            raise

    def wait(self, condition: Callable[[], bool]) -> None:
        """Wait until it holds. Fails if it does not in time, or if a loop has failed."""
        assert wait_until(lambda: self._failed.is_set() or condition(), _END_S)
        if self._failed.is_set():
            for loop in self._loops:
                loop.result(_END_S)
