"""A real model and its tokenizer: transformers' words, and the perplexity of each weight format."""

from __future__ import annotations

import json
import math
import pydoc
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import openai
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, CompressedTensorsConfig

from rigs.models.compressed_checkpoints import save_compressed
from rigs.models.gptq_rounding import Moments, input_moments
from rigs.models.quantized_checkpoints import (
    Format,
    awq,
    fp8_blocks,
    fp8_per_tensor,
    gptq,
    write_quantized,
)
from rigs.servers.engine_server import EngineServer
from rigs.servers.forked_servers import ForkedServer
from sglang.serve_embedded import questions_for
from sglang.smollm2 import installed_smollm2, save_smollm2
from sglang.srt.environ import child_environment
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.network import get_free_port
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=600, suite="nightly-test-cpu", nightly=True)

CONVERSATIONS: Final = (
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "List three prime numbers.",
)
WORDS: Final = 32
CHUNK: Final = 512
"""Tokens of a text whose perplexity is measured, each chunk by itself."""
CALIBRATION: Final = """ast collections csv datetime decimal http.client inspect logging pathlib
    random shutil socket statistics subprocess tarfile threading typing zipfile"""
"""Modules whose documentation calibrates GPTQ."""
FORMATS: Final[dict[str, tuple[Callable[[Moments], Format], float]]] = {
    "fp8-blocks": (lambda moments: fp8_blocks(moments=moments), 1.01),
    "fp8-per-tensor": (lambda moments: fp8_per_tensor(), 1.01),
    "awq": (lambda moments: awq(moments=moments), 1.05),
    "gptq": (lambda moments: gptq(moments=moments), 1.05),
    "gptq-8": (lambda moments: gptq(8, 128), 1.005),
}
"""Writer of a format, and the bound of its perplexity as a ratio to the plain model's. A
writer that is given moments rounds by GPTQ; the others round to the nearest value."""


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_smollm2(tmp_path_factory.mktemp("smollm2"))


def english(smollm2: Path, module: str, chunks: int) -> list[list[int]]:
    """Real text: the documentation of a module of the standard library."""
    tokenizer: Any = AutoTokenizer.from_pretrained(smollm2)
    ids = tokenizer(pydoc.plain(pydoc.render_doc(module)))["input_ids"]
    assert len(ids) >= chunks * CHUNK
    return [ids[begin : begin + CHUNK] for begin in range(0, chunks * CHUNK, CHUNK)]


@pytest.fixture(scope="module")
def text_ids(smollm2: Path) -> list[list[int]]:
    return english(smollm2, "argparse", 4)


@pytest.fixture(scope="module")
def moments(smollm2: Path) -> Moments:
    """The moments on calibration texts, which share nothing with the measured text."""
    chunks = [ids for module in CALIBRATION.split() for ids in english(smollm2, module, 2)]
    texts = torch.tensor(chunks).view(-1, CHUNK // 2)
    return input_moments(smollm2, [texts[begin : begin + 8] for begin in range(0, len(texts), 8)])


def serve(path: Path) -> ForkedServer:
    # In fp32, which a CPU without bf16 computes twenty times as fast.
    words = ("--device", "cpu", "--dtype", "float32", "--max-total-tokens", "4096")
    return ForkedServer(*words, model=str(path))


def perplexity(server: EngineServer, chunks: list[list[int]]) -> float:
    """The perplexity of tokens, each given the tokens before it in its chunk."""
    total = count = 0.0
    for ids in chunks:
        fields: dict[str, Any] = {"return_logprob": True, "logprob_start_len": 0}
        answer = server.generate(ids, max_new_tokens=1, **fields)
        found = [entry[0] for entry in answer.meta_info["input_token_logprobs"]][1:]
        total, count = total + sum(found), count + len(found)
    return math.exp(-total / count)


@pytest.mark.timeout(900)
def test_words_equal_those_of_transformers(smollm2: Path) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    tokenizer: Any = AutoTokenizer.from_pretrained(smollm2)
    with serve(smollm2) as server:
        for question in CONVERSATIONS:
            messages = [{"role": "user", "content": question}]
            ids = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
            )["input_ids"]
            with torch.no_grad():
                want = model.generate(ids, max_new_tokens=WORDS, do_sample=False)
            said = tokenizer.decode(want[0, ids.shape[1] :], skip_special_tokens=True)
            body = {"model": "smollm2", "messages": messages, "max_tokens": WORDS, "temperature": 0}
            reply = server.request("POST", "/v1/chat/completions", body)
            assert reply.body["choices"][0]["message"]["content"] == said


@pytest.fixture(scope="module")
def plain_perplexity(smollm2: Path, text_ids: list[list[int]]) -> float:
    with serve(smollm2) as server:
        return perplexity(server, text_ids)


@pytest.mark.timeout(900)
def test_the_text_is_understood(plain_perplexity: float) -> None:
    assert 5 < plain_perplexity < 15


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", FORMATS)
def test_a_format_costs_what_its_values_cost(
    smollm2: Path,
    text_ids: list[list[int]],
    moments: Moments,
    plain_perplexity: float,
    tmp_path: Path,
    name: str,
) -> None:
    """The perplexity equals that of a plain checkpoint with the dequantized values."""
    make, most = FORMATS[name]
    with serve(write_quantized(smollm2, tmp_path, make(moments))) as server:
        found = perplexity(server, text_ids)
    with serve(tmp_path / "plain") as server:
        # Its values are rounded to bf16.
        assert found == pytest.approx(perplexity(server, text_ids), rel=0.005)
    print(f"{name}: perplexity {plain_perplexity:.3f} x {found / plain_perplexity:.4f}")
    assert found < most * plain_perplexity


COMPRESSED: Final[dict[str, dict[str, Any]]] = {
    "fp8-channels": {"num_bits": 8, "type": "float", "strategy": "channel"},
    "int4-groups": {
        "num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True
    },
}  # fmt: skip
"""Weights that the package compressed-tensors writes. It rounds them to the nearest value, so the
perplexity is 1.03 and 1.36 times the plain model's."""


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", COMPRESSED)
def test_files_of_compressed_tensors_mean_what_transformers_reads(
    smollm2: Path,
    text_ids: list[list[int]],
    plain_perplexity: float,
    tmp_path: Path,
    name: str,
) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    save_compressed(model, tmp_path, **COMPRESSED[name])
    AutoTokenizer.from_pretrained(smollm2).save_pretrained(tmp_path)
    with serve(tmp_path) as server:
        found = perplexity(server, text_ids)
    dequantized = CompressedTensorsConfig(dequantize=True)
    reader: Any = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, quantization_config=dequantized
    )
    chunks = torch.tensor(text_ids)
    with torch.no_grad():
        logprobs = reader(chunks).logits[:, :-1].log_softmax(dim=-1)
    of_tokens = logprobs.gather(-1, chunks[:, 1:, None])
    print(f"{name}: perplexity {plain_perplexity:.3f} x {found / plain_perplexity:.4f}")
    assert found == pytest.approx(math.exp(-of_tokens.mean()), rel=0.002)
    assert found != pytest.approx(plain_perplexity, rel=0.01), "weights are rounded"


TEMPLATE: Final = """\
{% if tools %}<|im_start|>system
Call these: {{ tools | tojson }}<|im_end|>
{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""The model's own template shows it no tools, so the server would refuse them."""


@pytest.fixture(scope="module")
def client(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    template = tmp_path_factory.mktemp("template") / "tools.jinja"
    template.write_text(TEMPLATE, encoding="utf-8")
    words = ("--device", "cpu", "--dtype", "float32", "--max-total-tokens", "4096")
    tools = ("--tool-call-parser", "hermes", "--chat-template", str(template))
    with ForkedServer(*words, *tools, model=str(smollm2)) as server:
        yield openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def chat(client: openai.OpenAI, question: str, **fields: Any) -> Any:
    return client.chat.completions.create(
        model="smollm2",
        messages=[{"role": "user", "content": question}],
        temperature=0,
        max_tokens=64,
        **fields,
    )


def test_a_chat_makes_sense(client: openai.OpenAI) -> None:
    (choice,) = chat(client, "What is the capital of France?").choices
    assert "Paris" in choice.message.content
    assert choice.finish_reason == "stop"


CITIES: Final = ("Paris", "London")
PERSON: Final = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 1, "maximum": 120},
        "city": {"enum": [*CITIES]},
    },
    "required": ["name", "age", "city"],
    "additionalProperties": False,
}


def check_person(text: str) -> None:
    person = json.loads(text)
    assert list(person) == ["name", "age", "city"]
    assert isinstance(person["name"], str)
    assert 1 <= person["age"] <= 120
    assert person["city"] in CITIES


@pytest.mark.parametrize("stream", [False, True])
def test_the_output_fits_a_schema(client: openai.OpenAI, stream: bool) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
    reply = chat(
        client, "Anna is 31 and lives in Paris. As JSON?", response_format=form, stream=stream
    )
    parts = [event.choices[0].delta for event in reply] if stream else [reply.choices[0].message]
    check_person("".join(part.content or "" for part in parts))


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_is_called(client: openai.OpenAI, stream: bool) -> None:
    tool = {"type": "function", "function": {"name": "note", "parameters": PERSON}}
    choice = {"type": "function", "function": {"name": "note"}}
    reply = chat(
        client, "Note: Anna is 31, Paris.", tools=[tool], tool_choice=choice, stream=stream
    )
    parts = [event.choices[0].delta for event in reply] if stream else [reply.choices[0].message]
    calls = [call.function for part in parts for call in part.tool_calls or ()]
    assert "".join(call.name or "" for call in calls) == "note"
    check_person("".join(call.arguments or "" for call in calls))


@pytest.mark.parametrize("regex", ["[😀-😏]{8}", "[一-龥]{12}", "(👩‍🚀 é ﷽ 한){3}"])
def test_characters_of_several_tokens_are_streamed_whole(client: openai.OpenAI, regex: str) -> None:
    """Most of these characters are several tokens each."""
    whole = chat(client, "Say something.", extra_body={"regex": regex})
    said = whole.choices[0].message.content
    assert re.fullmatch(regex, said)
    assert whole.usage.completion_tokens > len(said)
    events = chat(client, "Say something.", extra_body={"regex": regex}, stream=True)
    parts = [event.choices[0].delta.content or "" for event in events]
    assert "".join(parts) == said
    assert len([part for part in parts if part]) > 2


@pytest.mark.timeout(300)
def test_make_serve_gets_and_serves_it() -> None:
    flags = ("--port", str(get_free_port()), "--device", "cpu")
    done = subprocess.run(
        [sys.executable, "-m", "sglang.serve_embedded", *flags],
        env=child_environment({"MODEL": "smollm2", "ONCE": "1"}),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "'The capital of France is Paris.'" in done.stdout
    args = ServerArgs(model_path=str(installed_smollm2())).resolve()
    tokenizer = AutoTokenizer.from_pretrained(args.model_path)
    first, second = (
        tokenizer.apply_chat_template([{"role": "user", "content": question}], return_dict=False)
        for question in questions_for(args)
    )
    assert first[:64] == second[:64], "a page of the next question is cached"
    assert (installed_smollm2() / "config.json").exists()
