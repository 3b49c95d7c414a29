"""`sglang.Engine` on the built-in model: the offline way to the same code."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import sglang
from rigs.nightly_cases import nightly
from rigs.servers.forked_servers import forking_engines
from sglang.srt.constants import BUILTIN_MODEL_DIR
from sglang.srt.environ import child_environment
from sglang.srt.managers.tokenizer.generate_request import EngineUnavailable
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=25, suite="base-b-test-cpu")

PROMPT = "<|im_start|>user\nthe code of heron is 7391<|im_end|>\n"
GREEDY = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}


@pytest.fixture(scope="module")
def engine() -> Iterator[sglang.Engine]:
    with forking_engines():
        made = sglang.Engine(max_total_tokens=4096, dtype="float32")
    with made:
        yield made


def test_a_checkpoint_gives_sampling_values_and_the_tokenizer_the_end(tmp_path: Path) -> None:
    """The model ends its turns with the tokenizer's end token, which neither file names."""
    for file in BUILTIN_MODEL_DIR.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "eos_token_id": 0}))
    generation = {"temperature": 0.5, "top_k": 1, "repetition_penalty": 1.0}
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    prompt = f"{PROMPT}<|im_start|>assistant\n"
    with forking_engines():
        made = sglang.Engine(model_path=str(tmp_path), max_total_tokens=4096, dtype="float32")
    with made:
        values = made.get_server_info()["default_sampling_params"]
        assert (values["temperature"], values["top_k"], values["min_p"]) == (0.5, 1, 0.0)
        first, *others = (made.generate(prompt, {"max_new_tokens": 64}) for _ in range(3))
    assert [one["output_ids"] for one in others] == [first["output_ids"]] * 2
    assert first["meta_info"]["finish_reason"] == {"type": "stop", "matched": 2}


def test_prompts_alone_many_and_by_ids_are_generated(engine: sglang.Engine) -> None:
    one = engine.generate(PROMPT, GREEDY)
    assert len(one["output_ids"]) == 8
    many = engine.generate([PROMPT, "hello"], GREEDY)
    assert many[0]["text"] == one["text"]
    ids = engine.generate(input_ids=[5, 6, 7], sampling_params=GREEDY, return_logprob=True)
    assert len(ids["meta_info"]["output_token_logprobs"]) == 8
    shown = engine.generate(
        PROMPT, GREEDY, return_logprob=True, return_text_in_logprobs=True, lora_path=None
    )
    entries = shown["meta_info"]["output_token_logprobs"]
    assert "".join(text for _, _, text in entries).startswith(one["text"])


def test_a_prompt_is_scored_without_output(engine: sglang.Engine) -> None:
    nothing = {"max_new_tokens": 0}
    scored = engine.generate(PROMPT, nothing, return_logprob=True, logprob_start_len=0)
    assert (scored["text"], scored["output_ids"]) == ("", [])
    meta = scored["meta_info"]
    assert len(meta["input_token_logprobs"]) == meta["prompt_tokens"]
    assert (meta["completion_tokens"], meta["output_token_logprobs"]) == (0, [])
    assert meta["finish_reason"] == {"type": "length", "length": 0}
    [streamed] = engine.generate(PROMPT, nothing, stream=True)
    assert streamed["output_ids"] == []


def test_stream_ends_with_the_whole(engine: sglang.Engine) -> None:
    whole = engine.generate(PROMPT, GREEDY)
    answers = list(engine.generate(PROMPT, GREEDY, stream=True))
    assert [len(a["output_ids"]) for a in answers] == sorted(len(a["output_ids"]) for a in answers)
    assert answers[-1]["text"] == whole["text"]


def test_a_pattern_ends_the_output_and_nothing_of_the_match_is_shown(
    engine: sglang.Engine,
) -> None:
    whole = engine.generate(PROMPT, {**GREEDY, "max_new_tokens": 40})["text"]
    pattern = re.escape(whole[6:8]) + "(?:.|\\n){3}"
    expected = whole[: whole.index(whole[6:8])]
    params = {**GREEDY, "max_new_tokens": 40, "stop_regex": pattern}
    for answers in (
        [engine.generate(PROMPT, params)],
        [*engine.generate(PROMPT, params, stream=True)],
    ):
        assert answers[-1]["text"] == expected
        assert answers[-1]["meta_info"]["finish_reason"] == {"type": "stop", "matched": pattern}
        assert all(expected.startswith(answer["text"]) for answer in answers)


def test_a_stream_that_is_left_is_aborted(engine: sglang.Engine) -> None:
    for _ in range(3):
        stream = engine.generate(PROMPT, {"max_new_tokens": 2000, "ignore_eos": True}, stream=True)
        next(stream)
        stream.close()
    assert engine.flush_cache(timeout=60)
    assert engine.get_server_info()["internal_states"][0]["num_running_reqs"] == 0


def test_async_generation_gives_the_same_text(engine: sglang.Engine) -> None:
    async def run() -> tuple[Any, list[Any]]:
        whole = await engine.async_generate(PROMPT, GREEDY)
        stream = await engine.async_generate(PROMPT, GREEDY, stream=True)
        return whole, [answer async for answer in stream]

    whole, answers = asyncio.run(run())
    assert answers[-1]["text"] == whole["text"] == engine.generate(PROMPT, GREEDY)["text"]


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"prompt": "a", "sampling_params": {"top_p": 0}}, "top_p"),
        ({"prompt": "a", "sampling_params": {"topp": 0}}, "topp"),
        ({"prompt": ""}, "text"),
        ({}, "input_ids"),
        ({"prompt": "a", "nonsense": 1}, "nonsense"),
    ],
)
def test_mistakes_are_value_errors(
    engine: sglang.Engine, fields: dict[str, Any], name: str
) -> None:
    with pytest.raises(ValueError, match=name):
        engine.generate(**fields)


def test_unknown_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="model-pth"):
        sglang.Engine(model_pth="x")


def test_nothing_is_generated_after_shutdown(engine: sglang.Engine) -> None:
    """The last of the tests with this engine."""
    assert engine.generate("a", GREEDY)["output_ids"]
    engine.shutdown()
    engine.shutdown()
    with pytest.raises(EngineUnavailable, match="shut down"):
        engine.generate("a", GREEDY)


@pytest.mark.parametrize("way", [nightly("file"), "standard input"])
def test_the_readmes_example_runs(tmp_path: Path, way: str) -> None:
    readme = (Path(__file__).parents[3] / "README.md").read_text(encoding="utf-8")
    [example] = re.findall(r"```python\n(.*?)```", readme, flags=re.DOTALL)
    script = tmp_path / "example.py"
    script.write_text(example, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(script) if way == "file" else "-"],
        input=None if way == "file" else example,
        capture_output=True, text=True, check=False, timeout=120, env=child_environment(),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout == "7391\n"
