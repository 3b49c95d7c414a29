"""Real prefill and decode servers with DP groups, over Mooncake's TCP on loopback."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, NamedTuple

import httpx
from prometheus_client.parser import text_string_to_metric_families

from rigs.disaggregation.pd_servers import TCP, ask_both, decode_server, prefill_server
from rigs.models.tiny_models import save_tiny_checkpoint
from rigs.schedulers.scheduler_rig import SchedulerRig, prompt
from rigs.servers.engine_server import EngineServer
from rigs.words_of_ranks import FAMILIES
from sglang.srt.constants import BUILTIN_MODEL_DIR
from sglang.srt.utils.network import wait_until

HOST: Final = "127.0.0.1"
IDS: Final = [prompt(seed, length) for seed, length in enumerate((1, 40, 100, 200))]
NEW_TOKENS: Final = 12
LIMITS: Final = (
    "--max-total-tokens", "2048", "--max-running-requests", "8", "--chunked-prefill-size", "64",
    "--device", "cpu", "--tokenizer-path", str(BUILTIN_MODEL_DIR),
)  # fmt: skip
ENV: Final = {
    **TCP,
    "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": "15",
    "SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL": "1",
    "SGLANG_DISAGGREGATION_HEARTBEAT_MAX_FAILURE": "6",  # A busy machine may pause for seconds.
}


class Side(NamedTuple):
    """Sizes of a server.

    Attributes:
        dp: DP groups.
        tp: Ranks of each group.
        more: Further flags.
    """

    dp: int = 1
    tp: int = 1
    more: tuple[str, ...] = ()

    @property
    def flags(self) -> tuple[str, ...]:
        sizes = "--tp-size", str(self.dp * self.tp), "--attn-dp-size", str(self.dp)
        return (*LIMITS, *sizes, *self.more)


class GroupedPair:
    """Context manager: both servers.

    Attributes:
        bootstrap: Host and port of the prefill server's bootstrap server.
    """

    def __init__(self, model: Path, prefill: Side, decode: Side) -> None:
        self.sides = prefill, decode
        self.prefill, port = prefill_server(*prefill.flags, model=str(model), env=ENV)
        self.decode = decode_server(*decode.flags, model=str(model), env=ENV)
        self.bootstrap = HOST, port
        self._stack = ExitStack()

    def __enter__(self) -> GroupedPair:
        for server in (self.prefill, self.decode):
            self._stack.enter_context(server)
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def ask(
        self, ids: list[int], groups: tuple[int | None, int | None] = (None, None), **fields: Any
    ) -> tuple[httpx.Response, httpx.Response]:
        """Answers of both servers; `groups` of `ask_both`."""
        body = body_of(ids) | fields
        return ask_both(self.prefill, self.bootstrap, self.decode, body, groups=groups)

    def words(self, ids: list[int], groups: tuple[int | None, int | None]) -> list[int]:
        _, answer = self.ask(ids, groups)
        assert answer.status_code == 200, answer.text
        found: list[int] = answer.json()["output_ids"]
        return found

    def assert_words(self, wanted: Sequence[list[int]]) -> None:
        """Assert that each group of one server gives `wanted` through each group of the other, one
        prompt at a time, and all at once where servers choose."""
        places = [(p, d) for p in range(self.sides[0].dp) for d in range(self.sides[1].dp)]
        for groups in places:
            found = [self.words(ids, groups) for ids in IDS]
            assert found == wanted, (self.sides, groups)
        with ThreadPoolExecutor(len(IDS)) as pool:
            found = list(pool.map(lambda ids: self.words(ids, (None, None)), IDS))
        assert found == wanted, self.sides
        self.assert_given_back()

    def assert_given_back(self) -> None:
        """Assert that nothing is held in any group, and no slot is lost."""
        for server in (self.prefill, self.decode):
            assert wait_until(lambda one=server: not any(_busy(one)), 30)  # type: ignore[misc]
            for state in states(server):
                free = state["free_tokens"] + state["evictable_tokens"]
                assert free == state["max_total_num_tokens"]


def states(server: EngineServer) -> list[dict[str, Any]]:
    """State of each group."""
    found: list[dict[str, Any]] = server.request("GET", "/server_info").body["internal_states"]
    return found


def metric(server: EngineServer, name: str) -> dict[str, float]:
    """Values of a metric by `dp_rank`."""
    text = httpx.get(f"{server.url}/metrics", timeout=60).text
    return {
        sample.labels["dp_rank"]: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name
    }


def _busy(server: EngineServer) -> list[Any]:
    return [state["busy"] for state in states(server)]


def body_of(ids: list[int], wanted: int = NEW_TOKENS) -> dict[str, Any]:
    sampling = {"temperature": 0, "max_new_tokens": wanted, "ignore_eos": True}
    return {"input_ids": ids, "sampling_params": sampling}


def tiny(directory: Path, family: str, *, mtp: bool = False) -> Path:
    """A tiny model of a family of `FAMILIES`; `mtp`: with layers that draft."""
    model = directory / family
    save_tiny_checkpoint(model, family, mtp=mtp, **FAMILIES[family])
    return model


def words_of_one_rank(model: Path, **args: Any) -> list[list[int]]:
    rig = SchedulerRig(model, pool_tokens=2048, page_size=16, dtype="float32", **args)
    return [rig.generate([ids], NEW_TOKENS)[0] for ids in IDS]
