"""Faults of one DP group: others go on, and a lost rank of any group ends the server."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import psutil
import pytest

from rigs.nightly_cases import nightly
from rigs.schedulers import rank_faults
from rigs.schedulers.scheduler_rig import prompt
from rigs.servers.engine_server import HttpReply
from rigs.servers.forked_servers import ForkedServer, InRank
from rigs.words_of_ranks import FAMILIES, PAGE, SOURCES, flags
from sglang.srt.constants import BUILTIN_MODEL_DIR
from sglang.srt.utils.network import wait_until
from sglang.srt.utils.process import is_alive
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=35, suite="base-b-test-cpu")

END_S: Final = 40.0


@pytest.fixture(scope="module", params=["qwen3", "qwen3_moe"])
def model(tiny_model: Callable[..., Path], request: pytest.FixtureRequest) -> Path:
    """Groups of the second one step together."""
    return tiny_model(request.param, **FAMILIES[request.param])


def server_of(
    model: Path, size: int, *more: str, store: Path | None = None, in_rank: InRank | None = None
) -> ForkedServer:
    """Two groups, with all tiers if there is a `store`."""
    words = ["--tp-size", str(size), "--device", "cpu", "--tokenizer-path", str(BUILTIN_MODEL_DIR)]
    env = {}
    if store is not None:
        words = flags("qwen3", size)
        env = {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(store)}
    words += ["--attn-dp-size", "2", *more]
    return ForkedServer(*words, env=env, model=str(model), in_rank=in_rank)


def states(server: ForkedServer) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = server.request("GET", "/server_info").body["internal_states"]
    return found


def end_after(model: Path, sig: signal.Signals) -> list[str]:
    """The last lines of a server whose last rank gets the signal."""
    with server_of(model, 4) as server:
        family = psutil.Process(server.process.pid).children(recursive=True)
        titles = {" ".join(child.cmdline()).strip(): child for child in family}
        ranks = sorted(title for title in titles if title.startswith("sglang::scheduler"))
        names = [f"sglang::scheduler_DP{rank // 2}_TP{rank}" for rank in range(4)]
        assert ranks == names
        titles[names[-1]].send_signal(sig)
        assert server.process.wait(END_S) == 1
        assert wait_until(lambda: not any(map(is_alive, family)), 60), "processes are left"
        return server.process.log_tail(60).splitlines()


@pytest.mark.parametrize("model", [nightly("qwen3"), "qwen3_moe"], indirect=True)
def test_a_lost_rank_of_any_group_ends_the_server_with_its_name(model: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        killed, stopped = pool.map(
            lambda sig: end_after(model, sig), (signal.SIGKILL, signal.SIGSTOP)
        )
    assert any("process scheduler_DP1_TP3 (pid" in line for line in killed), killed
    assert any("rank 3 has given no sign of life" in line for line in stopped), stopped
    assert killed[-1].endswith("; the server ends")


def test_a_group_whose_l3_hangs_does_not_stop_the_other(model: Path, tmp_path: Path) -> None:
    extra = {"prefetch_threshold": PAGE, "prefetch_timeout_base": 5, "prefetch_timeout_max": 5}
    policy = ("--hicache-storage-prefetch-policy", "timeout")
    config = ("--hicache-storage-backend-extra-config", json.dumps(extra))
    server = server_of(
        model, 2, *policy, *config, store=tmp_path, in_rank=rank_faults.l3_hangs
    )  # fmt: skip
    with server, ThreadPoolExecutor(1) as pool:
        first = server.generate(prompt(1, 200), routed_dp_rank=0)
        server.flush()
        hanging = pool.submit(server.generate, prompt(1, 200), routed_dp_rank=1)
        assert wait_until(lambda: states(server)[1]["num_waiting_reqs"] == 1, 20)
        again = server.generate(prompt(1, 200), routed_dp_rank=0)
        assert again.output_ids == first.output_ids
        assert again.cached["storage"] == SOURCES["L3"][2]
        assert not hanging.done(), "it waits for its own store"
        late = hanging.result()
        assert late.output_ids == first.output_ids
        assert late.cached.get("storage", 0) == 0


def test_a_group_out_of_memory_retracts_alone(model: Path) -> None:
    sampling = {"max_new_tokens": 150, "ignore_eos": True}
    with server_of(
        model, 2, "--max-total-tokens", "512", "--schedule-conservativeness", "0.01"
    ) as server:
        alone = server.generate(prompt(0, 60), sampling=sampling, routed_dp_rank=0)
        with ThreadPoolExecutor(7) as pool:
            many = [
                pool.submit(server.generate, prompt(seed, 60), sampling=sampling, routed_dp_rank=1)
                for seed in range(6)
            ]
            beside = pool.submit(
                server.generate, prompt(0, 60), sampling=sampling, routed_dp_rank=0
            )
            assert beside.result().output_ids == alone.output_ids
            words = [one.result().output_ids for one in many]
        assert words[0] == alone.output_ids
        retractions = [state["counters"]["retractions"] for state in states(server)]
        assert retractions[0] == 0 and retractions[1] > 0, retractions
        for seed in range(1, 6):
            quiet = server.generate(prompt(seed, 60), sampling=sampling, routed_dp_rank=0)
            assert quiet.output_ids == words[seed]


@pytest.mark.parametrize("model", [nightly("qwen3"), "qwen3_moe"], indirect=True)
def test_a_server_that_ends_lets_every_group_finish(model: Path) -> None:
    body = {
        "input_ids": prompt(1, 20),
        "routed_dp_rank": 1,
        "sampling_params": {"max_new_tokens": 30, "ignore_eos": True},
    }
    server = server_of(model, 2, "--drain-seconds", "30", in_rank=rank_faults.steps_are_slow)
    with server, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.request, "POST", "/generate", body)
        assert wait_until(lambda: states(server)[1]["num_running_reqs"] == 1, 20)
        assert server.stop(signal.SIGTERM) == 0
        reply: HttpReply = answer.result()
        assert reply.status == 200
        assert reply.body["meta_info"]["completion_tokens"] == 30
