"""Pauses: no step is launched, all else goes on, and answers stay the same. Profiles of steps."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.profiler import profile

from rigs.disaggregation.decode_rig import DecodeRig
from rigs.disaggregation.prefill_rig import PrefillRig
from rigs.schedulers.rank_rigs import RankRigs
from rigs.schedulers.scheduler_rig import PROMPTS, SchedulerRig, greedy, prompt
from sglang.srt.environ import envs
from sglang.srt.managers.scheduler import profiler
from sglang.srt.messages.io_struct import (
    AbortReq,
    ContinueGenerationReqInput,
    FlushCacheReqInput,
    GetInternalStateReq,
    PauseGenerationReqInput,
    ShutdownReq,
    StartProfileReqInput,
    StopProfileReqInput,
)
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci

register_cpu_ci(est_time=9, suite="base-a-test-cpu")
register_cuda_ci(est_time=20, suite="base-b-test-1-gpu-large")

PAUSE, CONTINUE = PauseGenerationReqInput(req_id="pause"), ContinueGenerationReqInput(req_id="go")


def num_steps(rig: SchedulerRig) -> int:
    counters = rig.scheduler.state.counters
    return counters.prefill_batches + counters.decode_steps


def test_a_paused_scheduler_launches_nothing_and_then_goes_on(
    model: Path, alone: list[list[int]]
) -> None:
    rig = SchedulerRig(model, chunked_prefill_size=16)
    first, second, *others = [rig.request(str(n), ids) for n, ids in enumerate(PROMPTS)]
    rig.step(first, second)
    for _ in range(3):
        rig.step()
    rig.step(PAUSE, *others[:2])
    assert rig.answers[-1].success
    assert rig.scheduler.state.in_flight is None, "its results are there before the answer"
    before = num_steps(rig)
    for _ in range(5):
        rig.step(*others[2:], GetInternalStateReq(req_id="state"))
        others = others[:2]
        rig.check()
    assert num_steps(rig) == before
    assert rig.answers[-1].data["is_paused"]
    assert len(rig.answers) == 6, "it answers"
    assert rig.scheduler.poll_timeout_ms() == 20, "it does not spin"
    rig.run(CONTINUE)
    assert [rig.results[str(n)].output_ids for n in range(len(PROMPTS))] == alone


def test_a_paused_scheduler_ends_aborted_requests_and_flushes(model: Path) -> None:
    rig = SchedulerRig(model)
    rig.step(rig.request("runs", PROMPTS[2], greedy(30)))
    rig.step(PAUSE, rig.request("waits", PROMPTS[1]))
    rig.step(AbortReq(abort_all=True), FlushCacheReqInput(req_id="flush"))
    assert rig.answers[-1].success and rig.tree.total_size() == 0
    for rid in ("runs", "waits"):
        reason = rig.results[rid].finish_reason
        assert reason is not None and reason.status_code == 499
    assert rig.scheduler.poll_timeout_ms() == 1000, "nothing is left to do"
    rig.step(CONTINUE, CONTINUE)
    assert [answer.success for answer in rig.answers] == [True] * 4
    rig.assert_clean()


def test_a_shutdown_ends_the_pause(model: Path) -> None:
    rig = SchedulerRig(model)
    rig.step(rig.request("r", PROMPTS[0], greedy(5)))
    rig.step(PAUSE)
    rig.step(ShutdownReq(timeout=100.0), PauseGenerationReqInput(req_id="late"))
    late = rig.answers[-1]
    assert (late.req_id, late.success) == ("late", False) and "shutting down" in late.message
    for _ in range(20):
        rig.step()
    assert rig.scheduler.is_stopped
    assert len(rig.results["r"].output_ids) == 5


def test_ranks_pause_alike(
    model: Path, alone: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = RankRigs(model, 2, 1)
    try:
        ranks.step(ranks.request("0", PROMPTS[0]), ranks.request("1", PROMPTS[1]))
        for rig in ranks.rigs:
            monkeypatch.setattr(rig.scheduler._outputs, "answer", lambda output: None)
        ranks.step(PAUSE, ranks.request("2", PROMPTS[2]))
        before = list(map(num_steps, ranks.rigs))
        for _ in range(3):
            ranks.step()
        assert list(map(num_steps, ranks.rigs)) == before
        ranks.run(CONTINUE)
        assert [ranks.results[str(n)].output_ids for n in range(3)] == alone[:3]
    finally:
        ranks.close()


def test_a_paused_prefill_server_hands_over_what_it_has(model: Path) -> None:
    rig = PrefillRig(model)
    rig.compute(rig.ask("done", prompt(1, 18), 5))
    rig.step(PAUSE, rig.ask("waits", prompt(2, 18), 6))
    rig.manager.outcomes[5] = ""
    rig.step()
    assert rig.end("done").type == "length"
    for _ in range(3):
        rig.step()
    assert 6 not in rig.manager.tokens
    rig.step(CONTINUE)
    rig.run_until(lambda: 6 in rig.manager.tokens)
    rig.manager.outcomes[6] = ""
    rig.step()
    assert rig.end("waits").type == "length"
    rig.close()


def test_a_paused_decode_server_reads_prompts_and_decodes_later(model: Path) -> None:
    rig = DecodeRig(model)
    ids = prompt(1, 10)
    rig.step(PAUSE)
    rig.step(rig.ask("a", ids, 5, greedy(6), stream=True), rig.ask("gone", prompt(2, 10), 6))
    first, gone = rig.servers.begun
    first.come(ids)
    rig.step(AbortReq(rid="gone"))
    for _ in range(3):
        rig.step()
    assert gone.is_cancelled and num_steps(rig) == 0
    assert rig.results["a"].output_ids == [11], "the prefill server's"
    gone.is_settled = True
    rig.run(CONTINUE)
    assert len(rig.results["a"].output_ids) == 6
    rig.close()


# ---- profiles ------------------------------------------------------------------------------------


def start(num_steps: int, **fields: object) -> StartProfileReqInput:
    return StartProfileReqInput(req_id="start", profile_id="p", num_steps=num_steps, **fields)  # type: ignore[arg-type]


def written(rig: SchedulerRig) -> dict[str, object]:
    """The trace, once the thread has written it."""
    rig.scheduler._control._profiler.close()
    (file,) = Path(envs.SGLANG_TORCH_PROFILER_DIR.get()).iterdir()
    assert str(file) == rig.answers[0].data["file"] and file.name == "p-TP-0.trace.json.gz"
    with gzip.open(file) as text:
        found: dict[str, object] = json.load(text)
    return found


@pytest.fixture(autouse=True)
def folder(tmp_path: Path) -> Iterator[None]:
    with envs.SGLANG_TORCH_PROFILER_DIR.override(str(tmp_path / "traces")):
        yield


def test_a_profile_ends_after_its_steps(model: Path) -> None:
    rig = SchedulerRig(model)
    rig.step(rig.request("r", PROMPTS[0], greedy(8)), start(3))
    assert rig.answers[0].success, rig.answers[0].message
    rig.step(start(3))
    assert "under way" in rig.answers[1].message
    while rig.scheduler._control._profiler.is_running:
        assert num_steps(rig) <= 3
        rig.step()
    rig.run()
    assert "traceEvents" in written(rig)
    rig.step(StopProfileReqInput(req_id="stop"))
    assert not rig.answers[-1].success and "no profile" in rig.answers[-1].message
    rig.close()


def test_the_other_ranks_know_of_the_silence_at_the_end_of_a_profile(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch holds the interpreter's lock meanwhile."""
    rig, said = SchedulerRig(model), list[object]()
    stop = profile.stop

    def noted(ended: profile) -> None:
        said.append("stop")
        stop(ended)

    monkeypatch.setattr(profile, "stop", noted)
    ending = rig.scheduler._control._profiler
    ending._announce_silence = said.append
    rig.step(start(5))
    assert said == []
    rig.step(StopProfileReqInput(req_id="stop"))
    ending.close()
    assert said == [120.0, "stop", 0.0]


class SlowProfile:
    """A profile. Its end takes `seconds` for each step since its start, by a clock of its own."""

    seconds = 0.0
    now = 0.0
    longest = 0.0
    may_start = True

    def __init__(self, rig: SchedulerRig) -> None:
        self._rig = rig
        self._steps = 0

    def start(self) -> None:
        if not SlowProfile.may_start:
            raise RuntimeError("out of memory")
        self._first = num_steps(self._rig)

    def stop(self) -> None:
        self._steps = num_steps(self._rig) - self._first
        took = SlowProfile.seconds * self._steps
        SlowProfile.now += took
        SlowProfile.longest = max(SlowProfile.longest, took)

    def export_chrome_trace(self, path: str) -> None:
        Path(path).write_text(f"{self._steps} steps")


@pytest.fixture
def slow(model: Path, monkeypatch: pytest.MonkeyPatch) -> SchedulerRig:
    """Its profiles take half a second for each step."""
    rig = SchedulerRig(model)
    fresh = {"seconds": 0.5, "now": 0.0, "longest": 0.0, "may_start": True}
    for name, value in fresh.items():
        monkeypatch.setattr(SlowProfile, name, value)
    monkeypatch.setattr(profiler, "profile", lambda **_: SlowProfile(rig))
    monkeypatch.setattr(profiler, "time", SimpleNamespace(monotonic=lambda: SlowProfile.now))
    return rig


@pytest.mark.parametrize("is_bounded", [True, False])
def test_the_end_of_a_profile_is_no_silence_that_others_take_for_death(
    slow: SchedulerRig, caplog: pytest.LogCaptureFixture, is_bounded: bool
) -> None:
    control = slow.scheduler._control
    said = list[float]()
    control._profiler._announce_silence = said.append
    if is_bounded:
        slow.scheduler._role.most_silence_s = 10.0
    slow.run(start(30), slow.request("r", PROMPTS[0], greedy(40)))
    control._profiler.close()
    profiled = SlowProfile.longest / SlowProfile.seconds
    if is_bounded:
        assert profiled == 5
        assert said == [120.0, 0.0, 120.0, 0.0]
        assert "the profile has 5 of 30 steps: its end takes 0.500 s for a step" in caplog.text
    else:
        assert profiled == 30
        assert said == [120.0, 0.0]
    assert slow.answers[0].success and Path(slow.answers[0].data["file"]).exists()


@pytest.mark.parametrize(
    ("wanted", "seconds", "steps", "profiled"),
    [(1, 0.5, 1, 1), (4, 0.5, 10, 4), (4, 60.0, 10, 1), (4, 0.5, 1, 1), (4, 0.5, 3, 2)],
    ids=["one", "all", "slow", "only the first step", "stopped"],
)
def test_a_short_profile_has_its_steps(
    slow: SchedulerRig,
    caplog: pytest.LogCaptureFixture,
    wanted: int,
    seconds: float,
    steps: int,
    profiled: int,
) -> None:
    control, SlowProfile.seconds = slow.scheduler._control, seconds
    slow.scheduler._role.most_silence_s = 10.0
    slow.run(start(wanted), slow.request("r", PROMPTS[0], greedy(steps)))
    slow.step()
    assert control._profiler.is_running == (steps < wanted), "more steps may come"
    control._profiler.close()
    assert Path(slow.answers[0].data["file"]).read_text() == f"{profiled} steps"
    assert SlowProfile.longest == profiled * seconds
    assert ("has 1 of 4 steps" in caplog.text) == (seconds == 60.0)


def test_a_profile_that_cannot_begin_again_costs_no_request(
    slow: SchedulerRig, caplog: pytest.LogCaptureFixture
) -> None:
    control = slow.scheduler._control
    slow.scheduler._role.most_silence_s = 10.0
    slow.step(start(5), slow.request("r", PROMPTS[0], greedy(3)))
    SlowProfile.may_start = False
    slow.run()
    assert "torch cannot profile: out of memory" in caplog.text
    assert not control._profiler.is_running and len(slow.results["r"].output_ids) == 3
    SlowProfile.may_start = True
    slow.step(start(5), StopProfileReqInput(req_id="stop"))
    assert [answer.success for answer in slow.answers] == [True] * 3


def test_a_profile_ends_when_it_is_told_or_after_its_time(model: Path) -> None:
    rig = SchedulerRig(model)
    rig.step(start(100, activities=["CPU"], record_shapes=True))
    rig.step(rig.request("r", PROMPTS[0], greedy(8)), StopProfileReqInput(req_id="stop"))
    assert [answer.success for answer in rig.answers] == [True, True]
    written(rig)
    rig.step(start(100))
    rig.now += profiler._MOST_SECONDS
    rig.step()
    assert not rig.scheduler._control._profiler.is_running
    rig.run()
    rig.step(start(100))
    rig.close()
    assert not rig.scheduler._control._profiler.is_running


def test_a_profile_that_cannot_be_made_costs_no_request(
    model: Path, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    rig = SchedulerRig(model)
    if rig.device == "cpu":
        rig.step(start(1, activities=["GPU"]))
        assert "this server runs on cpu" in rig.answers[-1].message
    (tmp_path / "traces").write_text("")
    rig.step(rig.request("r", PROMPTS[0], greedy(3)), start(1))
    rig.run()
    rig.scheduler._control._profiler.close()
    assert "was not written" in caplog.text and len(rig.results["r"].output_ids) == 3
    rig.close()
