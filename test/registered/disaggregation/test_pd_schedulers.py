"""Prefill and decode apart give the words of one scheduler, over Mooncake's TCP on the loopback."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from rigs.disaggregation.control_proxy import ControlProxy
from rigs.disaggregation.pd_rig import EngineMover, PdRig
from rigs.models.letters import Letters
from rigs.schedulers.scheduler_rig import RIG_DEVICE, Collected, SchedulerRig, greedy, prompt
from sglang.srt.arg_groups.disaggregation import DisaggregationMode
from sglang.srt.disaggregation.control import control_client
from sglang.srt.distributed.device_communicators.mooncake_transfer_engine import (
    MooncakeTransferEngine,
)
from sglang.srt.distributed.device_context import mark_device_set
from sglang.srt.environ import envs
from sglang.srt.messages.io_struct import (
    CachedTokensDetails,
    FlushCacheReqInput,
    TokenizedGenerateReqInput,
)
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=12, suite="base-b-test-cpu")

PAGE: Final = 16
CHUNK: Final = 64
LENGTHS: Final = (1, 5, 16, 17, 64, 100, 200)
PROMPTS: Final = [prompt(seed, length) for seed, length in enumerate(LENGTHS)]
FAMILIES: Final = ("qwen3", "qwen3_moe", "deepseek_v3", "deepseek_v32")
ARGS: Final[dict[str, Any]] = {
    "page_size": PAGE,
    "chunked_prefill_size": CHUNK,
    "pool_tokens": 2048,
    "max_requests": 16,
    "tokenizer": Letters(),
}


@pytest.fixture(scope="module")
def engine() -> Iterator[MooncakeTransferEngine]:
    torch.set_num_threads(1)
    mark_device_set(RIG_DEVICE)
    with envs.MOONCAKE_PROTOCOL.override("tcp"):
        engine = MooncakeTransferEngine("127.0.0.1")
        yield engine
        engine.close()


@pytest.fixture(scope="module")
def models(tiny_model: Callable[..., Path]) -> dict[str, Path]:
    # Fewer tokens attended to than prompts have, where a model chooses them.
    few: dict[str, dict[str, Any]] = {"deepseek_v32": {"index_topk": 12}}
    return {one: tiny_model(one, eos_token_id=None, **few.get(one, {})) for one in FAMILIES}


L3: Final[dict[str, Any]] = {
    "enable_hierarchical_cache": True,
    "hicache_storage_backend": "file",
    "hicache_storage_prefetch_policy": "wait_complete",
    "hicache_storage_backend_extra_config": json.dumps({"prefetch_threshold": PAGE}),
}
"""A file store, from which short prompts are read too."""
OFFLOAD: Final[dict[str, Any]] = {
    "disaggregation_mode": DisaggregationMode.DECODE,
    "disaggregation_decode_enable_offload_kvcache": True,
    "hicache_storage_backend": "file",
}
"""Arguments of a decode scheduler that writes to L3."""


def make_pair(engine: MooncakeTransferEngine, model: Path, **args: Any) -> PdRig:
    return PdRig(model, engine, **{**ARGS, **args})


@pytest.fixture(scope="module")
def pair(
    engine: MooncakeTransferEngine, models: dict[str, Path], request: pytest.FixtureRequest
) -> Iterator[PdRig]:
    """A pair with the dense model. Its parameter: whether metadata is inline; None: the default."""
    with envs.SGLANG_MOONCAKE_SEND_AUX_TCP.override(getattr(request, "param", None)):
        pair = make_pair(engine, models["qwen3"])
    with pair:
        yield pair


both_ways = pytest.mark.parametrize("pair", [None, False], indirect=True, ids=["inline", "in rows"])


@pytest.fixture(scope="module")
def single(models: dict[str, Path]) -> SchedulerRig:
    """One scheduler that does both, of the dense model."""
    return SchedulerRig(models["qwen3"], **ARGS)


def said(rig: SchedulerRig, *messages: TokenizedGenerateReqInput) -> list[Collected]:
    """Outputs of `rig` alone for `messages`."""
    for message in messages:
        rig.results.pop(message.rid, None)
    rig.run(*(replaced(message) for message in messages))
    return [rig.results.pop(message.rid) for message in messages]


def replaced(message: TokenizedGenerateReqInput) -> TokenizedGenerateReqInput:
    """The message without its room."""
    fields = {name: getattr(message, name) for name in message.__struct_fields__}
    return TokenizedGenerateReqInput(**{**fields, "bootstrap": None})


def assert_same(got: Collected, want: Collected) -> None:
    """Words, logprobs and the reason of the end."""
    assert got.output_ids == want.output_ids
    assert got.finish_reason == want.finish_reason
    assert got.logprobs == pytest.approx(want.logprobs, abs=1e-4)
    tops, wanted_tops = (of.last.output_top_logprobs if of.last else None for of in (got, want))
    assert (tops is None) == (wanted_tops is None)
    for row, wanted in zip(tops or [], wanted_tops or [], strict=True):
        assert [token for _, token in row] == [token for _, token in wanted]
        assert [p for p, _ in row] == pytest.approx([p for p, _ in wanted], abs=1e-4)


def check(pair: PdRig, single: SchedulerRig, *messages: TokenizedGenerateReqInput) -> None:
    """Prefill and decode server together say what one scheduler does."""
    for rid in [message.rid for message in messages]:
        pair.prefill.results.pop(rid, None)
        pair.decode.results.pop(rid, None)
    pair.run(*messages)
    for message, want in zip(messages, said(single, *messages), strict=True):
        assert_same(pair.result(message.rid), want)


@pytest.mark.parametrize(
    ("family", "unit_bytes"),
    [*((family, None) for family in FAMILIES), ("qwen3", 1 << 16), ("deepseek_v32", 1 << 16)],
)
def test_every_kind_of_model_says_the_same_cold_and_cached(
    engine: MooncakeTransferEngine, models: dict[str, Path], family: str, unit_bytes: int | None
) -> None:
    alone = SchedulerRig(models[family], **ARGS)
    with make_pair(engine, models[family], unit_bytes=unit_bytes) as pair:
        for turn in ("cold", "cached on both sides"):
            messages = [
                pair.request(f"{turn} {number}", ids, greedy(24), return_logprob=True)
                for number, ids in enumerate(PROMPTS)
            ]
            check(pair, alone, *messages)
        (again,) = said(alone, pair.request("again", PROMPTS[-1]))
        last = pair.result(f"cached on both sides {len(PROMPTS) - 1}").last
        assert last is not None and again.last is not None
        assert last.cached_tokens_details == again.last.cached_tokens_details, "prefill's count"
        assert pair.decode.scheduler.state.counters.prefill_tokens == 0, "nothing is computed twice"
        assert pair.prefill.scheduler.state.counters.decode_steps == 0
        staging = pair.decode.prefill_servers.rank.reads.staging
        assert bool(staging._num_made) == (unit_bytes is not None), "pages came as units"


def test_either_side_may_have_a_prefix(
    engine: MooncakeTransferEngine, models: dict[str, Path], single: SchedulerRig
) -> None:
    with make_pair(engine, models["qwen3"]) as pair:
        check(pair, single, pair.request("first", PROMPTS[5], greedy(20)))
        longer = [*PROMPTS[5], *pair.result("first").output_ids, 7, 8]
        pair.prefill.step(FlushCacheReqInput(req_id="flush"))
        check(pair, single, pair.request("decode has it", longer))
        last = pair.result("decode has it").last
        assert last is not None and last.cached_tokens_details == CachedTokensDetails()
        pair.decode.step(FlushCacheReqInput(req_id="flush"))
        check(pair, single, pair.request("prefill has it", longer))
        last = pair.result("prefill has it").last
        assert last is not None
        assert last.cached_tokens_details.device == len(longer) // PAGE * PAGE


def sampled(max_new_tokens: int) -> SamplingParams:
    params = SamplingParams(
        temperature=1.3, top_p=0.9, top_k=40, max_new_tokens=max_new_tokens, ignore_eos=True
    )
    params.normalize()
    return params


def test_seeds_draw_the_words_of_one_server(pair: PdRig, single: SchedulerRig) -> None:
    messages = [pair.request(f"seed {n}", PROMPTS[5], sampled(30), seed=n) for n in range(4)]
    check(pair, single, *messages)
    words = {tuple(pair.result(f"seed {n}").output_ids) for n in range(4)}
    assert len(words) == 4, "each seed gives words of its own"


def test_penalties_count_the_first_token_too(pair: PdRig, single: SchedulerRig) -> None:
    params = greedy(30, frequency_penalty=0.9, repetition_penalty=1.4, presence_penalty=0.3)
    check(pair, single, pair.request("penalties", PROMPTS[4], params))


@both_ways
def test_logprobs_are_those_of_one_server(pair: PdRig, single: SchedulerRig) -> None:
    message = pair.request(
        "tops", PROMPTS[6], greedy(9), return_logprob=True, top_logprobs_num=3, stream=False
    )
    check(pair, single, message)
    last = pair.result("tops").last
    assert last is not None and last.output_top_logprobs is not None
    assert [len(row) for row in last.output_top_logprobs] == [3] * 9


def test_logprobs_of_the_prompt_are_prefills(pair: PdRig, single: SchedulerRig) -> None:
    message = pair.request(
        "inputs", PROMPTS[5], greedy(5), return_logprob=True, logprob_start_len=10
    )
    check(pair, single, message)
    (want,) = said(single, message)
    got = pair.prefill.results["inputs"]
    assert len(want.input_logprobs) == len(PROMPTS[5]) - 11
    assert got.input_logprobs == pytest.approx(want.input_logprobs, abs=1e-4)
    assert pair.result("inputs").input_logprobs == []


@pytest.mark.parametrize("place", [0, 1, 7])
def test_stop_tokens_and_stop_strings(pair: PdRig, single: SchedulerRig, place: int) -> None:
    """A stop ends a request at the first word, which prefill finds, or later."""
    (free,) = said(single, pair.request("free", PROMPTS[3], greedy(20)))
    token = free.output_ids[place]
    text = Letters().decode([token])
    messages = [
        pair.request("id", PROMPTS[3], greedy(20, ignore_eos=False, stop_token_ids=[token])),
        pair.request("text", PROMPTS[3], greedy(20, stop=[text])),
    ]
    check(pair, single, *messages)
    assert pair.result("id").output_ids == free.output_ids[: free.output_ids.index(token) + 1]
    reason = pair.result("text").finish_reason
    assert reason is not None and (reason.type, reason.matched) == ("stop", text)


@both_ways
@pytest.mark.parametrize("length", [5, 16, 100])
@pytest.mark.parametrize("wanted", [0, 1, 2])
def test_few_tokens_come(pair: PdRig, single: SchedulerRig, wanted: int, length: int) -> None:
    message = pair.request("few", prompt(40 + wanted, length), greedy(wanted))
    check(pair, single, message)
    assert len(pair.result("few").output_ids) == wanted
    check(pair, single, pair.request("few", prompt(40 + wanted, length), greedy(wanted)))


def test_samples_have_rooms_of_their_own(pair: PdRig, single: SchedulerRig) -> None:
    params, ids = sampled(12), prompt(77, 90)
    computed = pair.prefill.scheduler.state.counters.prefill_tokens
    messages = [
        pair.request(f"sample {n}", ids, params, seed=n, sample_of=None if n == 0 else "sample 0")
        for n in range(4)
    ]
    assert len({message.bootstrap.room for message in messages if message.bootstrap}) == 4
    check(pair, single, *messages)
    computed = pair.prefill.scheduler.state.counters.prefill_tokens - computed
    # Which of them is asked for first, and computes what they share, is open.
    assert computed < len(messages) * len(ids), "the shared pages are not computed by each"


def test_a_stream_has_its_tokens_one_by_one(pair: PdRig, single: SchedulerRig) -> None:
    check(pair, single, pair.request("stream", PROMPTS[2], greedy(6), stream=True))
    assert pair.result("stream").pieces == [1] * 5 + [1]


@pytest.mark.parametrize("page_size", [1, 4])
def test_pages_of_other_sizes_give_the_same_output(
    engine: MooncakeTransferEngine, models: dict[str, Path], single: SchedulerRig, page_size: int
) -> None:
    """Pages of one token let the cache hold a whole prompt."""
    with make_pair(engine, models["qwen3"], page_size=page_size) as pair:
        for turn in "ab":
            check(pair, single, *(pair.request(f"{turn}{i}", p) for i, p in enumerate(PROMPTS)))


def test_prefill_reads_prompts_from_l3(
    engine: MooncakeTransferEngine, models: dict[str, Path], single: SchedulerRig, tmp_path: Path
) -> None:
    with (
        envs.SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR.override(str(tmp_path)),
        make_pair(engine, models["qwen3"], prefill=L3) as pair,
    ):
        check(pair, single, *(pair.request(f"a{i}", p) for i, p in enumerate(PROMPTS)))
        pair.prefill.settle()
        pair.prefill.step(FlushCacheReqInput(req_id="flush"))
        pair.decode.step(FlushCacheReqInput(req_id="flush"))
        check(pair, single, *(pair.request(f"b{i}", p) for i, p in enumerate(PROMPTS)))
        last = pair.result(f"b{len(PROMPTS) - 1}").last
        assert last is not None and last.cached_tokens_details.storage >= LENGTHS[-1] - PAGE


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
def test_what_decode_generates_reaches_l3_and_prefill_reads_it(
    engine: MooncakeTransferEngine,
    models: dict[str, Path],
    single: SchedulerRig,
    tmp_path: Path,
    policy: str,
) -> None:
    """Prefill has computed none of what it reads of the second turn's prompt but the first's."""
    decode = {**OFFLOAD, "hicache_write_policy": policy, "pool_tokens": 320}
    with (
        envs.SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR.override(str(tmp_path)),
        make_pair(engine, models["qwen3"], prefill=L3, decode=decode) as pair,
    ):
        first = pair.request("first", PROMPTS[5], greedy(60))
        check(pair, single, first)
        conversation = [*PROMPTS[5], *pair.result("first").output_ids, 7, 8, 9]
        # Under write_back a page is written when it gives way.
        check(pair, single, *(pair.request(f"o{n}", prompt(90 + n, 200)) for n in range(2)))
        for rig in pair.rigs:
            rig.settle()
            rig.step(FlushCacheReqInput(req_id="flush"))
        second = pair.request("second", conversation, greedy(5))
        check(pair, single, second)
        last = pair.result("second").last
        assert last is not None
        written = len(PROMPTS[5]) + 60 - 1  # The last token is never computed.
        assert last.cached_tokens_details.storage == written // PAGE * PAGE


# ---- what does not fit -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"page_size": 8}, "page size 16 there, 8 here"),
        ({"identity": "another"}, "weights rig there, another here"),
        ({"model": "deepseek_v32"}, "pool indexer none there"),
    ],
)
def test_unlike_servers_refuse_each_other_by_name(
    engine: MooncakeTransferEngine,
    models: dict[str, Path],
    single: SchedulerRig,
    fields: dict[str, Any],
    named: str,
) -> None:
    fields = {**fields, "model": models[fields.get("model", "qwen3")]}
    with make_pair(engine, models["qwen3"]) as pair:
        with make_pair(engine, **fields) as unlike:
            unlike.other = pair.prefill
            message = pair.request("unlike", PROMPTS[5])
            pair.prefill.step(message)
            unlike.until(lambda: "unlike" in unlike.decode.results, message)
            reason = unlike.result("unlike").finish_reason
            assert reason is not None and reason.status_code == 503
            assert named in (reason.message or "")
            # Prefill learns of it, so it does not wait for a reader.
            pair.until(lambda: pair.prefill.scheduler.is_idle())
            reason = pair.prefill.results["unlike"].finish_reason
            assert reason is not None and named in (reason.message or "")
            unlike.prefill.step()
            unlike.decode.assert_clean()
        pair.assert_clean()
        check(pair, single, pair.request("goes on", PROMPTS[5]))


def test_prompts_too_long_for_prefill_end_at_once(
    engine: MooncakeTransferEngine, models: dict[str, Path], single: SchedulerRig
) -> None:
    """Decode hears of it at once, not after a deadline."""
    with make_pair(engine, models["qwen3"], prefill={"pool_tokens": 128}) as pair:
        pair.run(pair.request("long", PROMPTS[6]), pair.request("short", PROMPTS[5]))
        reason = pair.result("long").finish_reason
        assert reason is not None and reason.status_code == 503
        assert "the prompt has 200 tokens, at most 127 can ever fit" in (reason.message or "")
        (want,) = said(single, pair.request("short", PROMPTS[5]))
        assert_same(pair.result("short"), want)


# ---- faults ------------------------------------------------------------------------------------


def test_an_aborted_read_lands_on_pages_that_nobody_uses(
    engine: MooncakeTransferEngine, models: dict[str, Path], single: SchedulerRig
) -> None:
    """The read is slow, its request is aborted, others run on all that is left, then it lands."""
    mover = EngineMover(engine)
    with PdRig(models["qwen3"], mover, **{**ARGS, "pool_tokens": 640}) as pair:
        mover.hold = True
        pair.until(lambda: bool(mover.begun), pair.request("slow", prompt(50, 300), greedy(4)))
        # Prefill still has what is to be read, and lets it be overwritten from now on.
        pair.step([pair.prefill.abort("slow")], [pair.decode.abort("slow")])
        assert {"slow"} == pair.prefill.results.keys() == pair.decode.results.keys()
        held = list(mover.begun)
        mover.hold = False
        others = [pair.request(f"o{n}", prompt(60 + n, 90), greedy(40)) for n in range(6)]
        pair.until(lambda: all(one.rid in pair.decode.results for one in others), *others)
        assert not any(transfer.is_settled for transfer in held)
        longer = [
            pair.request(f"l{n}", [*one.input_ids.tolist(), *pair.result(one.rid).output_ids])
            for n, one in enumerate(others)
        ]
        mover.release()
        pair.until(pair.decode.scheduler.is_idle)
        pair.run(*longer)
        for message, want in zip([*others, *longer], said(single, *others, *longer), strict=True):
            assert_same(pair.result(message.rid), want)
        check(pair, single, pair.request("once more", prompt(50, 300), greedy(4)))


def test_a_taken_room_is_refused(
    engine: MooncakeTransferEngine, models: dict[str, Path], single: SchedulerRig
) -> None:
    mover = EngineMover(engine)
    with PdRig(models["qwen3"], mover, **ARGS) as pair:
        mover.hold = True
        first = pair.request("first", PROMPTS[6], room=77)
        pair.until(lambda: bool(mover.begun), first)
        pair.step(*[[pair.request("second", PROMPTS[5], room=77)]] * 2)
        for rig in pair.rigs:
            reason = rig.results["second"].finish_reason
            assert reason is not None and reason.status_code == 400
            assert "bootstrap_room 77 belongs to another request" in (reason.message or "")
        mover.release()
        pair.until(lambda: all(rig.scheduler.is_idle() for rig in pair.rigs))
        (want,) = said(single, first)
        assert_same(pair.result("first"), want)
        pair.assert_clean()


@pytest.mark.parametrize("offloads", [False, True])
def test_decode_out_of_slots(
    engine: MooncakeTransferEngine,
    models: dict[str, Path],
    single: SchedulerRig,
    tmp_path: Path,
    offloads: bool,
) -> None:
    """A request retracted there is computed there, or loaded from its L2, with the same output."""
    decode = {
        "pool_tokens": 256,
        "schedule_conservativeness": 0.01,
        **(OFFLOAD if offloads else {}),
    }
    with (
        envs.SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR.override(str(tmp_path)),
        make_pair(engine, models["qwen3"], decode=decode) as pair,
    ):
        messages = [pair.request(f"r{n}", prompt(80 + n, 50), greedy(60)) for n in range(8)]
        check(pair, single, *messages)
        counters = pair.decode.scheduler.state.counters
        assert counters.retractions > 0 and counters.prefill_tokens > 0


@pytest.mark.parametrize("share", [0.01, 0.2])
def test_control_messages_may_be_lost_doubled_and_late(
    engine: MooncakeTransferEngine,
    models: dict[str, Path],
    single: SchedulerRig,
    monkeypatch: pytest.MonkeyPatch,
    share: float,
) -> None:
    rng = random.Random(3)

    def fate(message: bytes, is_question: bool) -> Sequence[float]:
        kind = rng.random() / share
        if kind < 1:
            return ()
        return (0.0, rng.random() * 0.05) if kind < 2 else (rng.random() * 0.005,)

    monkeypatch.setattr(control_client, "REPEAT_S", 0.1)
    pair = make_pair(engine, models["qwen3"])
    with pair, ControlProxy(pair.prefill.endpoint, fate) as proxy:
        pair.endpoints[0] = proxy.endpoint
        for turn in range(3):
            prompts = [prompt(200 + 10 * turn + n, 20 + 17 * n) for n in range(8)]
            names = (f"{share} {turn} {n}" for n in range(8))
            check(pair, single, *map(pair.request, names, prompts))
        assert proxy.counts["lost"] and proxy.counts["doubled"]
