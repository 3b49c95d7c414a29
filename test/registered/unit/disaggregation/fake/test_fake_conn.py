"""The transport that moves nothing: each role ends its requests alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from rigs.disaggregation.pd_rig import RigSettings
from rigs.schedulers.scheduler_rig import SchedulerRig, greedy, prompt
from sglang.srt.arg_groups.disaggregation import DisaggregationMode, TransferBackend
from sglang.srt.disaggregation.base.conn import KVArgs
from sglang.srt.disaggregation.roles import role_of
from sglang.srt.disaggregation.utils import KVClassType, get_kv_class
from sglang.srt.distributed.rank_group import SingleRank
from sglang.srt.messages.io_struct import Bootstrap
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="base-a-test-cpu")


def make_rig(model: Path, mode: DisaggregationMode, **args: Any) -> SchedulerRig:
    manager_class = get_kv_class(TransferBackend.FAKE, KVClassType.MANAGER)
    manager = manager_class(cast(KVArgs, None), mode, RigSettings())
    assert manager.register_to_bootstrap() == []
    role = role_of(mode, manager, SingleRank(), TransferBackend.FAKE)
    settings = {"page_size": 4, "pool_tokens": 64, "chunked_prefill_size": 8, **args}
    return SchedulerRig(model, make_role=lambda pools: role, **settings)


@pytest.mark.parametrize(
    ("mode", "length"), [(DisaggregationMode.PREFILL, 1), (DisaggregationMode.DECODE, 6)]
)
@pytest.mark.parametrize("overlap", [False, True])
def test_requests_end_alone(
    model: Path, mode: DisaggregationMode, length: int, overlap: bool
) -> None:
    rig = make_rig(model, mode, overlap=overlap)
    messages = [
        rig.request(
            f"r{room}",
            prompt(room, 20),
            greedy(6),
            bootstrap=Bootstrap("2.2.2.2", 8998, room),
            return_logprob=True,
            top_logprobs_num=2,
        )
        for room in range(6)
    ]
    rig.run(*messages)
    for message in messages:
        got = rig.results[message.rid]
        assert got.finish_reason is not None and got.finish_reason.type == "length"
        assert len(got.output_ids) == len(got.logprobs) == length
    assert (rig.scheduler.state.counters.prefill_tokens > 0) == (length == 1)
    rig.assert_clean()
    rig.check()
    rig.close()


@pytest.mark.parametrize("mode", [DisaggregationMode.PREFILL, DisaggregationMode.DECODE])
def test_aborts_give_all_back(model: Path, mode: DisaggregationMode) -> None:
    rig = make_rig(model, mode, pool_tokens=32)
    for room in range(3):
        fields = {"bootstrap": Bootstrap("2.2.2.2", 8998, room)}
        rig.step(rig.request(f"r{room}", prompt(room, 20), greedy(40), **fields))
    rig.run(*(rig.abort(f"r{room}") for room in range(3)))
    rig.assert_clean()
    rig.check()
    rig.close()


@pytest.mark.parametrize("wanted", [0, 1])
def test_a_decode_server_says_no_more_than_is_wanted(model: Path, wanted: int) -> None:
    rig = make_rig(model, DisaggregationMode.DECODE)
    fields = {"bootstrap": Bootstrap("2.2.2.2", 8998, 1)}
    rig.run(rig.request("a", prompt(1, 20), greedy(wanted), **fields))
    assert len(rig.results["a"].output_ids) == wanted
    rig.close()


@pytest.mark.parametrize("mode", [DisaggregationMode.PREFILL, DisaggregationMode.DECODE])
def test_profiles_are_bounded_by_the_silence_that_peers_bear(
    model: Path, mode: DisaggregationMode
) -> None:
    rig = make_rig(model, mode)
    assert rig.scheduler._control._profiler._most_silence_s() == 10
    rig.close()
