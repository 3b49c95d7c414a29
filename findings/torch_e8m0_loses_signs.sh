#!/usr/bin/env bash
# torch 2.13.0: a cast to float8_e8m0fnu makes negative numbers positive and zero a number.
#
# Expected: the type of the scales of MXFP4 and MXFP8 holds powers of two alone, and one NaN. A number
# that it cannot hold becomes NaN: ml_dtypes 0.6.0, which numpy and JAX use, does that for zero and
# for all below, and torch for infinity.
# Seen: torch gives 2 for -2 and 2^-127 for 0, without an error; torch.zeros of the type holds no
# zero. Scales with a sign, as some tools write them for 4-bit weights, lose it in this cast, and all
# weights of their groups get the wrong sign. The same array gives NaN by way of numpy.
#
# Exit status 0: as described. 1: these versions behave otherwise now.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
    torch==2.13.0 ml-dtypes==0.6.0 numpy
"$folder/venv/bin/python" - <<'PYTHON'
import ml_dtypes
import numpy
import torch

values = numpy.array([4.0, 3.0, 0.75, float("inf"), 0.0, -2.0], numpy.float32)
by_torch = torch.from_numpy(values).to(torch.float8_e8m0fnu).float().tolist()
by_numpy = values.astype(ml_dtypes.float8_e8m0fnu).astype(numpy.float32).tolist()
for value, one, other in zip(values.tolist(), by_torch, by_numpy):
    print(f"{value}: torch {one}, ml_dtypes {other}")
zeros = torch.zeros(1, dtype=torch.float8_e8m0fnu).float().item()
print("torch.zeros:", zeros)
# NaN does not equal itself.
seen = [str(by_torch), str(by_numpy), zeros]
least = 2.0**-127
assert seen == [
    str([4.0, 4.0, 1.0, float("nan"), least, 2.0]),
    str([4.0, 4.0, 1.0, float("nan"), float("nan"), float("nan")]),
    least,
], "otherwise now"
PYTHON
