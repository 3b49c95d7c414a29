"""SamplingParams: ranges, normalized form, and encoding for messages."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=1, suite="base-a-test-cpu")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": -0.1}, "temperature=-0.1"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"temperature": float("inf")}, "temperature=inf"),
        ({"temperature": 1e39}, "temperature=1e.39 must be at least 0 and at most 1e.06"),
        ({"top_p": 0.0}, "top_p=0.0 must be above 0"),
        ({"top_p": 1.1}, "top_p=1.1"),
        ({"top_k": 0}, "top_k=0 must be -1"),
        ({"top_k": -2}, "top_k=-2"),
        ({"min_p": 1.5}, "min_p=1.5"),
        ({"frequency_penalty": 2.1}, "frequency_penalty=2.1"),
        ({"presence_penalty": -2.1}, "presence_penalty=-2.1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty=0.0"),
        ({"repetition_penalty": 1e-40}, "repetition_penalty=1e-40 must be at least 0.001"),
        ({"max_new_tokens": -1}, "max_new_tokens=-1"),
        ({"max_new_tokens": 4, "min_new_tokens": 5}, "min_new_tokens=5"),
        ({"min_new_tokens": -1}, "min_new_tokens=-1"),
        ({"n": 129}, "n=129 must be from 1 to 128"),
        ({"n": 0}, "n=0"),
        ({"json_schema": "{}", "regex": "a"}, "json_schema and regex are given together"),
        ({"regex": "a", "ebnf": ""}, "regex and ebnf are given together"),
        ({"stop_token_ids": [100]}, "stop_token_ids has token id 100"),
        ({"stop": ["a"] * 65}, "stop has 65 strings"),
        ({"stop": "a" * 1025}, "1024 characters"),
        ({"stop": ""}, "stop is empty, .* leave it out"),
        ({"stop": ["a", ""]}, r"stop\[1\] is empty"),
        ({"stop_token_ids": [1] * 4097}, "stop_token_ids has 4097 ids, at most 4096"),
        ({"logit_bias": {"x": 1.0}}, "logit_bias key 'x'"),
        ({"logit_bias": {"-1": 1.0}}, "logit_bias key '-1'"),
        ({"logit_bias": {"²": 1.0}}, "logit_bias key"),
        ({"logit_bias": {"03": 1.0}}, "logit_bias key '03'"),
        ({"logit_bias": {"0" * 20 + "999": 1.0}}, "logit_bias key '00000"),
        ({"logit_bias": {"9" * 5000: 1.0}}, "logit_bias has token id"),
        ({"logit_bias": {"100": 1.0}}, "logit_bias has token id 100"),
        ({"logit_bias": {"1": float("nan")}}, r"logit_bias\[1\]=nan"),
        ({"sampling_seed": -1}, "sampling_seed=-1"),
        ({"sampling_seed": 2**63}, "sampling_seed"),
    ],
)
def test_bad_values_are_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams(**fields).verify(100)


def test_defaults_and_edges_are_valid() -> None:
    SamplingParams().verify(1)
    SamplingParams(
        temperature=0.0, top_p=1e-9, top_k=10**9, min_p=1.0, stop_token_ids=[0, 99],
        logit_bias={"99": -100.0}, sampling_seed=2**63 - 1, min_new_tokens=128,
    ).verify(100)  # fmt: skip


def test_unknown_and_mistyped_fields_are_refused_when_decoding() -> None:
    with pytest.raises(msgspec.ValidationError, match="temperatur"):
        msgspec.convert({"temperatur": 1}, SamplingParams)
    with pytest.raises(msgspec.ValidationError, match="top_k"):
        msgspec.convert({"top_k": "many"}, SamplingParams)


def test_parameters_are_brought_into_normal_form() -> None:
    params = SamplingParams(stop="END", stop_token_ids=[3, 1, 3], temperature=0.0)
    params.normalize()
    assert (params.stop, params.stop_token_ids) == (["END"], [1, 3])
    assert (params.temperature, params.top_k, params.is_greedy) == (1.0, 1, True)
    assert SamplingParams(stop_regex="a+").stop_patterns == ["a+"]
    empty = SamplingParams(stop=[], stop_regex=[], stop_token_ids=[])
    empty.verify(1)
    empty.normalize()
    assert (empty.stop, empty.stop_regex, empty.stop_token_ids) == (None, None, None)
    assert not empty.has_text_stops


def test_wire_round_trip_is_small() -> None:
    params = SamplingParams(top_p=0.5, logit_bias={"3": 1.5})
    data = msgspec.msgpack.encode(params)
    assert len(data) < 60
    assert msgspec.msgpack.decode(data, type=SamplingParams) == params
