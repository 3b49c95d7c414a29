"""Legal fields in odd company: streams, samples, grammars, logprobs, sessions, priorities, salts
and aborts at the same time. Each answer has the words that its request gets alone."""

from __future__ import annotations

import asyncio
import json
import random
import re
from typing import Any, Final

import httpx
import pytest

from rigs.servers.engine_server import ADMIN_KEY, EXACT
from rigs.servers.forked_servers import ForkedServer
from sglang.srt.constants import BUILTIN_HYBRID_MODEL_DIR
from sglang.srt.environ import envs
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=25, suite="base-b-test-cpu")

NUM_REQUESTS: Final = 60
ADMIN: Final = {"Authorization": f"Bearer {ADMIN_KEY}"}
FACTS: Final = "".join(f"The code of bird {nth} is {1000 + 37 * nth}. " for nth in range(40))
GRAMMARS: Final[tuple[dict[str, Any], ...]] = (
    {},
    {"regex": "(heron|otter){2,5}!"},
    {"ebnf": 'root ::= ("ab" | "cd")+ "."'},
    {"json_schema": json.dumps({
        "type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}},
        "required": ["a", "b"], "additionalProperties": False})},
)  # fmt: skip


def drawn(own: random.Random, number: int) -> dict[str, Any]:
    """A body of `/generate`."""
    sampling: dict[str, Any] = {
        "max_new_tokens": own.choice((0, 1, 2, 8, 24, 60)), "temperature": 0,
        **own.choice(GRAMMARS),
    }  # fmt: skip
    if own.random() < 0.3:
        sampling |= {"temperature": 0.8, "sampling_seed": own.randrange(100)}
    optional: tuple[tuple[str, Any], ...] = (
        ("n", own.randint(2, 4)), ("ignore_eos", True), ("min_new_tokens", 1),
        ("stop", ["e", "zz"]), ("stop_regex", ["[0-9]{3}"]), ("no_stop_trim", True),
        ("frequency_penalty", 0.7), ("logit_bias", {"300": 3.0, "301": -100}),
    )  # fmt: skip
    for name, value in optional:
        if own.random() < 0.2:
            sampling[name] = value
    if sampling.get("min_new_tokens", 0) > sampling["max_new_tokens"]:
        del sampling["min_new_tokens"]
    body: dict[str, Any] = {
        "text": FACTS[: own.choice((20, 200, 900, len(FACTS)))] + f"Bird {own.randrange(9)}?",
        "sampling_params": sampling, "rid": f"r{number}",
    }  # fmt: skip
    extra: tuple[tuple[str, Any], ...] = (
        ("stream", True), ("return_logprob", True), ("session_id", f"s{own.randrange(3)}"),
        ("priority", own.choice((-(2**31) + 1, -1, 0, 7, 2**31 - 1))), ("extra_key", "e"),
        ("cache_salt", f"c{own.randrange(3)}"), ("return_cache_report", True),
    )  # fmt: skip
    for name, value in extra:
        if own.random() < 0.4:
            body[name] = value
    if body.get("return_logprob") and own.random() < 0.5:
        body |= {"top_logprobs_num": 2, "logprob_start_len": own.choice((0, 5))}
    return body


async def asked(client: httpx.AsyncClient, body: dict[str, Any]) -> list[dict[str, Any]] | str:
    """The answers, one of each sample in order; of a refusal its message."""
    if not body.get("stream"):
        reply = await client.post("/generate", json=body)
        if reply.status_code != 200:
            assert reply.status_code == 400, reply.text
            return str(reply.json()["error"]["message"])
        found = reply.json()
        return found if isinstance(found, list) else [found]
    last: dict[int, dict[str, Any]] = {}
    has_ended = False
    async with client.stream("POST", "/generate", json=body) as stream:
        if stream.status_code != 200:
            assert stream.status_code == 400
            return str(json.loads(await stream.aread())["error"]["message"])
        async for line in stream.aiter_lines():
            assert not has_ended or not line, "nothing follows the end"
            if line == "data: [DONE]":
                has_ended = True
            elif line:
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    return str(event["error"]["message"])
                index = event.get("index", 0)
                before = last.get(index, {"text": "", "output_ids": []})
                assert event["text"].startswith(before["text"])
                assert event["output_ids"][: len(before["output_ids"])] == before["output_ids"]
                last[index] = event
    assert has_ended
    return [last[index] for index in sorted(last)]


def content(answers: list[dict[str, Any]] | str) -> Any:
    """The parts of answers that neither time nor other requests change."""
    if isinstance(answers, str):
        return answers
    return [(one["text"], one["output_ids"], one["meta_info"]["finish_reason"]) for one in answers]


def check(body: dict[str, Any], answers: list[dict[str, Any]] | str, *, may_end: bool) -> None:
    """An answer keeps what its request asked for."""
    assert not isinstance(answers, str) or may_end, (body, answers)
    if isinstance(answers, str):
        return
    sampling = body["sampling_params"]
    assert len(answers) == sampling.get("n", 1) or may_end
    for one in answers:
        meta = one["meta_info"]
        count = meta["completion_tokens"]
        assert count == len(one["output_ids"]) <= sampling["max_new_tokens"]
        if body.get("return_logprob"):
            assert len(meta["output_token_logprobs"]) == count
            assert [entry[1] for entry in meta["output_token_logprobs"]] == one["output_ids"]
            assert len(meta.get("output_top_logprobs") or []) in (0, count)
        if isinstance(meta["finish_reason"].get("matched"), int):
            if "regex" in sampling:
                assert re.fullmatch(sampling["regex"], one["text"])
            if "json_schema" in sampling:
                assert json.loads(one["text"]).keys() == {"a", "b"}


async def all_at_once(url: str, bodies: list[dict[str, Any]], seed: int) -> dict[int, Any]:
    """Answers by number, of those that nobody aborts. Others are aborted by id, or left."""
    own = random.Random(seed)
    whole: dict[int, Any] = {}
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:

        async def one(number: int, body: dict[str, Any], fate: str, delay: float) -> None:
            await asyncio.sleep(delay)
            call = asyncio.ensure_future(asked(client, body))
            if fate == "stays":
                whole[number] = await call
                check(body, whole[number], may_end=False)
                return
            await asyncio.sleep(delay)
            if fate == "leaves":
                call.cancel()
                await asyncio.gather(call, return_exceptions=True)
                return
            rid = body["rid"] if fate == "is aborted" else "nobody"
            done = await client.post("/abort_request", json={"rid": rid}, headers=ADMIN)
            assert done.status_code == 200
            check(body, await call, may_end=True)

        fates = ("stays", "stays", "leaves", "is aborted", "is aborted by another name")
        await asyncio.gather(*(
            one(number, body, own.choice(fates), 0.3 * own.random())
            for number, body in enumerate(bodies)
        ))  # fmt: skip
    return whole


@pytest.mark.parametrize(
    "more", [(), ("--speculative-algorithm", "NEXTN", "--max-mamba-cache-size", "48")]
)
def test_company_changes_no_answer(more: tuple[str, ...], tmp_path: Any) -> None:
    model = str(BUILTIN_HYBRID_MODEL_DIR) if more else None
    flags = (
        *EXACT, *more, "--enable-metrics", "--enable-cache-report", "--page-size", "16",
        "--max-total-tokens", "4096", "--max-running-requests", "12",
        "--chunked-prefill-size", "256", "--hicache-storage-backend", "file",
    )  # fmt: skip
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")
    own = random.Random(seed)
    bodies = [drawn(own, number) for number in range(NUM_REQUESTS)]
    env = {envs.SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR.name: str(tmp_path)}
    with ForkedServer(*flags, model=model, env=env) as server:
        in_company = asyncio.run(all_at_once(server.url, bodies, seed))
        server.flush()
        assert server.metrics()["sglang:num_running_reqs"] == 0

        async def alone() -> dict[int, Any]:
            async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
                return {number: await asked(client, bodies[number]) for number in in_company}

        for number, answers in asyncio.run(alone()).items():
            assert content(answers) == content(in_company[number]), bodies[number]
        log = server.process.log_path.read_text(errors="replace")
        raised = [word for word in ("Traceback", " E ", "raised exception") if word in log]
        assert not raised, log[-2000:]
        assert server.stop() == 0
