"""The weight format that config.json states is understood or refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from sglang.srt.configs.quantization_config import (
    BYTES,
    FP8,
    INT8,
    WORDS,
    Packing,
    QuantizationConfig,
    ZeroPoints,
    quantization_of,
)
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=2, suite="base-a-test-cpu")

DEEPSEEK = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
GROUP = {
    "input_activations": None,
    "targets": ["Linear"],
    "weights": {
        "group_size": 32,
        "num_bits": 4,
        "strategy": "group",
        "symmetric": True,
        "type": "int",
    },
}
KIMI = {
    "config_groups": {"group_0": GROUP},
    "format": "pack-quantized",
    "ignore": ["lm_head", "re:.*self_attn.*"],
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
}


GPT_OSS = {
    "modules_to_not_convert": [
        "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
    ],
    "quant_method": "mxfp4",
}  # fmt: skip


def weights(**changes: Any) -> dict[str, Any]:
    """A group of compressed-tensors with other weights."""
    return {"group_0": {**GROUP, "weights": {**GROUP["weights"], **changes}}}  # type: ignore[dict-item]


def of(stated: object, asked: str | None = None) -> QuantizationConfig | None:
    return quantization_of({"quantization_config": stated}, asked=asked)


@pytest.mark.parametrize(
    ("stated", "packing", "bits", "block", "zero_offset"),
    [
        (DEEPSEEK, Packing.NONE, 8, (128, 128), 0),
        ({"quant_method": "fp8", "activation_scheme": "static"}, Packing.NONE, 8, None, 0),
        (AWQ, Packing.INTERLEAVED, 4, (1, 128), 0),
        ({**AWQ, "version": "GEMM"}, Packing.INTERLEAVED, 4, (1, 128), 0),
        (GPTQ, Packing.COLUMNS, 4, (1, 128), 1),
        ({**GPTQ, "bits": 8, "group_size": -1}, Packing.COLUMNS, 8, (1, -1), 1),
        ({**GPTQ, "checkpoint_format": "gptq_v2"}, Packing.COLUMNS, 4, (1, 128), 0),
        ({**GPTQ, "dynamic": {r"-:.*attn.*": {}}}, Packing.COLUMNS, 4, (1, 128), 1),
        (KIMI, Packing.ROWS, 4, (1, 32), 0),
        (
            {
                **KIMI,
                "format": "float-quantized",
                "config_groups": weights(num_bits=8, type="float", strategy="channel"),
            },
            Packing.NONE,
            8,
            (1, -1),
            0,
        ),
    ],
)
def test_published_formats_are_read(
    stated: dict[str, Any],
    packing: Packing,
    bits: int,
    block: tuple[int, int] | None,
    zero_offset: int,
) -> None:
    found = of(stated)
    assert found == QuantizationConfig(
        method=stated["quant_method"],
        packing=packing,
        bits=bits,
        elements=FP8 if packing is Packing.NONE else WORDS,
        zero_points=ZeroPoints.STORED if stated.get("zero_point") else ZeroPoints.CENTRE,
        block=block,
        zero_offset=zero_offset,
    )
    assert found == of(stated, stated["quant_method"])
    nested = quantization_of({"text_config": {"quantization_config": stated}})
    assert nested == found


def test_4_bit_floats_are_read() -> None:
    found = of(GPT_OSS)
    assert found == QuantizationConfig(
        method="mxfp4", packing=Packing.BLOCKS, bits=4, elements=BYTES, block=(1, 32)
    )
    assert found == of(GPT_OSS, "mxfp4") and not found.may_have_negative_scales


@pytest.mark.parametrize(
    ("stated", "words"),
    [
        ("fp8", "quantization_config must be an object"),
        ({}, "quant_method='None' is not supported"),
        ({"quant_method": "quark"}, "'quark' is not supported: supported are fp8, compressed-ten"),
        ({**GPT_OSS, "group_size": 16}, "group_size=16 is not supported: 32 is"),
        ({**DEEPSEEK, "fmt": "e5m2"}, "fmt='e5m2' is not supported: 'e4m3' or"),
        ({**DEEPSEEK, "weight_block_size": [128]}, "weight_block_size=.*two integers from 1 to"),
        ({**DEEPSEEK, "weight_block_size": [0, 128]}, "weight_block_size=.*two integers from 1"),
        ({**DEEPSEEK, "weight_block_size": [1 << 31, 1]}, "weight_block_size=.*from 1 to 21474836"),
        ({**AWQ, "version": "gemv"}, "version='gemv' is not supported: 'gemm' is"),
        ({**AWQ, "bits": 8}, "bits=8 is not supported: 4 is"),
        ({**AWQ, "group_size": "all"}, "group_size='all' is not supported"),
        (
            {**AWQ, "group_size": 10**30},
            "group_size=1000.*: an integer from 1 to 2147483647, or -1",
        ),
        ({**AWQ, "zero_point": "yes"}, "zero_point='yes' is not supported: True or False is"),
        ({**GPTQ, "bits": 4.0}, "bits=4.0 is not supported: 4 or 8 is"),
        ({**GPTQ, "sym": 1}, "sym=1 is not supported: True or False is"),
        ({**GPTQ, "desc_act": "false"}, "desc_act='false' is not supported"),
        ({**GPTQ, "dynamic": 7}, "dynamic=7 is not supported: only '-:' rules"),
        ({**GPTQ, "dynamic": ["-:x"]}, "dynamic=.*only '-:' rules"),
        ({**KIMI, "sparsity_config": 7}, "sparsity_config=7 is not supported: an object is"),
        ({**KIMI, "config_groups": weights(symmetric="no")}, "weights.symmetric='no'"),
        ({**GPTQ, "bits": 3}, "bits=3 is not supported: 4 or 8 is"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format='marlin'"),
        ({**GPTQ, "dynamic": {"+:.*": {"bits": 8}}}, "dynamic=.*only '-:' rules"),
        ({**KIMI, "format": "nvfp4-pack-quantized"}, "format='nvfp4-pack-quantized'"),
        ({**KIMI, "config_groups": {}}, "config_groups={} is not supported"),
        ({**KIMI, "config_groups": {"group_0": 1}}, "config_groups.group_0=1"),
        ({**KIMI, "config_groups": weights(num_bits=3)}, "group_0.weights.num_bits=3"),
        ({**KIMI, "config_groups": weights(strategy="token")}, "weights.strategy='token'"),
        ({**KIMI, "config_groups": weights(type="float")}, "weights.type='float'"),
        (
            {**KIMI, "config_groups": {**weights(), "group_1": {**GROUP, "format": "dense"}}},
            "format='dense'",
        ),
        (
            {
                **KIMI,
                "config_groups": {
                    "group_0": GROUP,
                    "group_1": weights(group_size=64)["group_0"],
                },
            },
            "one weight format for all groups",
        ),
        (
            {
                **KIMI,
                "format": "int-quantized",
                "config_groups": weights(num_bits=8, strategy="channel", symmetric=False),
            },
            "weights.symmetric=False",
        ),
        ({**KIMI, "quantization_status": "frozen"}, "quantization_status='frozen'"),
        ({**KIMI, "transform_config": {"config_groups": {}}}, "transform_config="),
        ({**KIMI, "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config.format="),
    ],
)
def test_other_formats_are_refused_by_name(stated: object, words: str) -> None:
    with pytest.raises(ValueError, match=words) as error:
        of(stated)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("stated", "zero_points", "is_negative"),
    [
        (DEEPSEEK, ZeroPoints.CENTRE, False),
        (GPTQ, ZeroPoints.CENTRE, True),
        ({**GPTQ, "sym": False}, ZeroPoints.STORED, False),
        ({**GPTQ, "sym": None}, ZeroPoints.IF_STORED, True),
        (AWQ, ZeroPoints.STORED, False),
        ({**AWQ, "zero_point": None}, ZeroPoints.STORED, False),
        ({**AWQ, "zero_point": False}, ZeroPoints.IF_STORED, True),
        (KIMI, ZeroPoints.CENTRE, True),
        ({**KIMI, "config_groups": weights(symmetric=None)}, ZeroPoints.CENTRE, True),
        ({**KIMI, "config_groups": weights(symmetric=False)}, ZeroPoints.STORED, False),
    ],
)
def test_the_config_says_where_zero_points_are(
    stated: dict[str, Any], zero_points: ZeroPoints, *, is_negative: bool
) -> None:
    found = of(stated)
    assert found is not None and found.zero_points is zero_points
    assert found.may_have_negative_scales is is_negative


@pytest.mark.parametrize(
    ("encoding", "kind", "elements"),
    [
        ("float-quantized", "float", FP8),
        ("int-quantized", "int", INT8),
        ("naive-quantized", "float", FP8),
        ("naive-quantized", "int", INT8),
    ],
)
def test_the_config_says_what_elements_are(encoding: str, kind: str, elements: str) -> None:
    groups = weights(num_bits=8, type=kind, strategy="channel")
    found = of({**KIMI, "format": encoding, "config_groups": groups})
    assert found is not None and found.elements == elements


def test_what_is_asked_for_must_be_there() -> None:
    assert quantization_of({}) is None
    assert of(AWQ, "awq_marlin") == of(AWQ)
    with pytest.raises(ValueError, match=r"--quantization fp8: config.json says .*'awq'"):
        of(AWQ, "fp8")
    with pytest.raises(ValueError, match=r"--quantization awq: the checkpoint's weights are not"):
        quantization_of({}, asked="awq")


def test_plain_weights_can_be_rounded_to_blocks() -> None:
    found = quantization_of({}, asked="fp8")
    assert found is not None and found.is_at_load
    assert str(found) == "fp8, 8 bits, rounded at load, a scale for 128 x 128"
    stated = quantization_of({"quantization_config": DEEPSEEK}, asked="fp8")
    assert stated is not None and not stated.is_at_load


def test_logs_name_the_format() -> None:
    assert str(of(DEEPSEEK)) == "fp8, 8 bits, a scale for 128 x 128"
    assert str(of({**GPTQ, "group_size": -1})) == "gptq, 4 bits, a scale for 1 x all"
