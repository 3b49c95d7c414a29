"""Attention DP 2 with EP 2 beside TP 2 of the same model, and the cost of the groups' agreement.

The first layers of DeepSeek-V3.2 in fp8 blocks, random weights. The servers run one after the other
with equal `--mem-fraction-static`. Sections:
`servers`: tokens of L1, TTFT of single prompts of 8,192 tokens, and decoding of 128 requests that
all fit into L1. `bounded`: the same load, where L1 of a rank holds half of the requests.
`agreement`: decode steps of two schedulers, in turn with the agreement and without.
`--device cpu`: the same with a tiny model.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from benchmark.command import Command
from benchmark.gpu_eight.shapes import SHAPES, Shape
from benchmark.report import Report
from benchmark.servers import ask, load, started
from benchmark.timing import median_ratio
from rigs.groups.counted_steps import StepRig
from rigs.schedulers.rank_processes import run_ranks
from rigs.schedulers.scheduler_rig import greedy
from rigs.servers.engine_server import EngineServer
from sglang.srt.distributed.parallel_state import get_world_group
from sglang.srt.hardware_backend.device_kinds import device_kind
from sglang.srt.hardware_backend.device_runtime import device_runtime
from sglang.srt.layers.forward_batch_info import GroupStep
from sglang.srt.managers.scheduler.group_scheduler import GroupScheduler
from sglang.srt.managers.scheduler.step_agreement import StepAgreement
from sglang.srt.messages.io_struct import StepCall
from sglang.srt.model_executor.grouped_runner import GroupPlan
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.model_executor.runner_config import ModelRunnerConfig

SECTIONS: Final = ("servers", "agreement", "bounded")
LAYOUTS: Final[Mapping[str, tuple[str, ...]]] = {
    "TP 2": (),
    "DP 2, EP 2": (
        *("--attn-dp-size", "2", "--ep-size", "2"),
        *("--load-balance-method", "round_robin"),
    ),
}
UNBOUNDED: Final = 1 << 40
"""Tokens of L1; `--mem-fraction-static` bounds it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Sizes of a run. Lengths are tokens."""

    shape: str
    layers: int | None
    mem_fraction: float
    prompt: int
    prompts: int
    requests: int
    input_len: int
    output_len: int
    steps: int
    """Steps of a round with the agreement, and of one without."""
    expected: Mapping[str, float]
    """Ratios, written before the measurement."""


SIZES: Final = {
    "cuda": Size(
        shape="deepseek_v32",
        layers=10,
        mem_fraction=0.85,
        prompt=8192,
        prompts=7,
        requests=128,
        input_len=2048,
        output_len=256,
        steps=64,
        expected={
            "l1_ratio": 1.915,
            "ttft_ratio": 1.4,
            "decode_ratio": 1.0,
            "bounded_ratio": 1.45,
            "step_ratio": 1.003,
        },
    ),
    "cpu": Size(
        shape="tiny",
        layers=None,
        mem_fraction=0.005,
        prompt=256,
        prompts=2,
        requests=4,
        input_len=32,
        output_len=8,
        steps=4,
        expected={},
    ),
}
_WARM_UP_SEED: Final = 1_000_000
_RANKS_S: Final = 280.0


def flags_of(shape: Shape, size: Size, layout: str, l1: int = UNBOUNDED) -> tuple[str, ...]:
    return (
        *shape.server_flags(l1),
        *("--tp-size", "2", *LAYOUTS[layout]),
        *("--mem-fraction-static", str(size.mem_fraction)),
        *("--max-running-requests", str(size.requests)),
    )


def measure_l1(server: EngineServer, layout: str, report: Report) -> int:
    """Tokens of L1: what all ranks hold once, or each group for itself."""
    info = server.request("GET", "/server_info").body
    tokens: int = info.get("sums", info)["max_total_num_tokens"]
    report.add("max_total_num_tokens", tokens, "tokens", {"server": layout})
    return tokens


def measure_ttft(server: EngineServer, layout: str, shape: Shape, size: Size,
                 report: Report) -> float:  # fmt: skip
    """Returns the median milliseconds of single prompts."""
    for seeds in (range(_WARM_UP_SEED, _WARM_UP_SEED + 4), range(size.prompts)):
        found = ask(server, [shape.prompt(seed, size.prompt) for seed in seeds], 2)
    ttft_ms = [one.ttft * 1e3 for one in found]
    median = statistics.median(ttft_ms)
    case = {"server": layout, "tokens": size.prompt}
    report.add("ttft", median, "ms", case, raw=ttft_ms)
    return median


def measure_decoding(server: EngineServer, layout: str, load_name: str, shape: Shape, size: Size,
                     report: Report) -> dict[str, float]:  # fmt: skip
    """Returns output tokens/s, in all and while every request decodes."""
    first = 2 * _WARM_UP_SEED
    for count in (size.requests // 2, size.requests):
        # The first load compiles what the second one needs.
        prompts = [shape.prompt(first + i, size.input_len) for i in range(count)]
        result = load(server.url, prompts, size.output_len)
        first += count
    gap = statistics.median(gap for one in result.results for gap in one.itl)
    figures = {
        "output_throughput": size.requests * size.output_len / result.duration,
        "decode_throughput": size.requests / gap,
    }
    case = {"server": layout, "load": load_name, "requests": size.requests}
    report.add_all("token/s", figures, case)
    report.add("median_between_tokens", gap * 1e3, "ms", case)
    return figures


def measure_servers(shape: Shape, size: Size, model: str, report: Report) -> None:
    l1, ttft, decode = {}, {}, {}
    for layout in LAYOUTS:
        server = EngineServer(*flags_of(shape, size, layout), model=model)
        with started({layout: server}, report):
            l1[layout] = measure_l1(server, layout, report)
            ttft[layout] = measure_ttft(server, layout, shape, size, report)
            found = measure_decoding(server, layout, "all fit", shape, size, report)
            decode[layout] = found["decode_throughput"]
    tp, dp = LAYOUTS
    case = {"server": f"{dp} over {tp}"}
    for name, ratio, target in (
        ("l1_ratio", l1[dp] / l1[tp], "at least 1.9"),
        ("ttft_ratio", ttft[dp] / ttft[tp], "at most 1.1"),
        ("decode_ratio", decode[dp] / decode[tp], "at least 1.3"),
    ):
        report.add(name, ratio, "ratio", case, expected=size.expected.get(name), target=target)


def measure_bounded(shape: Shape, size: Size, model: str, report: Report) -> None:
    pages = -(-(size.input_len + size.output_len) // shape.page_size) + 1
    l1 = size.requests // 2 * pages * shape.page_size
    rates = {}
    for layout in LAYOUTS:
        server = EngineServer(*flags_of(shape, size, layout, l1), model=model)
        with started({layout: server}, report):
            found = measure_decoding(server, layout, "half fit", shape, size, report)
            rates[layout] = found["output_throughput"]
    tp, dp = LAYOUTS
    case = {"server": f"{dp} over {tp}", "load": "half fit"}
    report.add("bounded_ratio", rates[dp] / rates[tp], "ratio", case,
               expected=size.expected.get("bounded_ratio"))  # fmt: skip


class ScheduledRig(StepRig):
    """One rank with random weights, which steps as a server does."""

    captures_graphs = True

    def make_runner(self, config: ModelRunnerConfig) -> ModelRunner:
        return super().make_runner(replace(config, load_format="dummy"))

    def take_turn(self, steps: int) -> float:
        """Milliseconds of a step, of `steps`."""
        assert self.agreement is not None
        begun = time.perf_counter()
        for _ in range(steps):
            # The other group would call.
            self.step(StepCall(number=self.agreement._next))
        return (time.perf_counter() - begun) / steps * 1e3


class Agreed(StepAgreement):
    """An agreement whose outcome is known: nothing is sent."""

    def __init__(self, known: GroupStep) -> None:
        self._known = known
        self.is_called, self.all_have_stopped = True, False

    def on_call(self, number: int) -> None:
        pass

    def join(self, plan: GroupPlan | None, **said: bool) -> GroupStep | None:
        assert plan is not None and plan.requests == self._known.tokens[0], "each has equal work"
        return self._known


def measure_steps(model: str, device: str, repeats: int) -> dict[str, list[float]]:
    """One rank's part: milliseconds of a decode step in each round, with the agreement and
    without."""
    size, kind = SIZES[device], device_kind(device)
    shape, requests = SHAPES[size.shape], size.requests // 2
    turns = 2 * (repeats + 1)
    output = (turns + 4) * size.steps
    pages = -(-(size.input_len + output) // shape.page_size) + 1
    ScheduledRig.device = device
    rig = ScheduledRig(
        Path(model), 2, 2,
        pool_tokens=(requests + 1) * pages * shape.page_size,
        max_requests=requests,
        overlap=kind.overlaps_steps,
        page_size=shape.page_size,
        **_fields_of(shape),
    )  # fmt: skip
    scheduler, agreement = rig.scheduler, rig.agreement
    assert isinstance(scheduler, GroupScheduler) and agreement is not None
    seed = get_world_group().rank * requests
    prompts = [shape.prompt(seed + i, size.input_len) for i in range(requests)]
    messages = [rig.request(f"{i}", one, greedy(output)) for i, one in enumerate(prompts)]
    rig.step(*messages)
    rig.take_turn(size.steps)  # Prefills, and first steps.
    assert len(scheduler.state.queues.decoding) == requests, "all requests decode"
    both = requests, requests
    known = Agreed(GroupStep(both, both, requests if kind.captures_graphs else None))
    found: dict[str, list[float]] = {"with": [], "without": []}
    for turn in range(turns):
        way = ("with", "without")[turn % 2]
        scheduler._agreement = known if way == "without" else agreement
        device_runtime(device).synchronize()
        found[way].append(rig.take_turn(size.steps))
    return {way: ms[1:] for way, ms in found.items()}


def _fields_of(shape: Shape) -> dict[str, Any]:
    """The flags of `shape` as fields of `ServerArgs`."""
    names = [flag.removeprefix("--").replace("-", "_") for flag in shape.flags[::2]]
    return dict(zip(names, shape.flags[1::2], strict=True))


def measure_agreement(device: str, model: str, repeats: int, report: Report) -> None:
    work = model, device, repeats
    first, _ = run_ranks(2, measure_steps, *work, attn_dp_size=2, device=device, timeout_s=_RANKS_S)
    for way, step_ms in first.items():
        case = {"step": f"{way} the agreement", "requests": SIZES[device].requests}
        report.add("step", statistics.median(step_ms), "ms", case, raw=step_ms)
    report.add(
        "step_ratio",
        median_ratio(first["with"], first["without"]),
        "ratio",
        {"step": "with over without"},
        expected=SIZES[device].expected.get("step_ratio"),
        target="at most 1.01",
    )


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--layers", type=int, help="only the first so many layers")


def run(args: argparse.Namespace, report: Report) -> None:
    size = SIZES[args.device]
    shape = SHAPES[size.shape]
    with shape.model(8, args.layers or size.layers) as model:
        if "servers" in args.sections:
            measure_servers(shape, size, model, report)
        if "agreement" in args.sections:
            measure_agreement(args.device, model, args.repeats, report)
        if "bounded" in args.sections:
            measure_bounded(shape, size, model, report)


COMMAND: Final = Command(
    run=run,
    add_options=add_options,
    repeats=5,
    devices=("cuda", "cpu"),
    gpus=2,
    quick={"device": "cpu", "repeats": 1},
)
