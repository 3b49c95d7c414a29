#!/usr/bin/env bash
# auto-round 0.16.1: half of the scales of symmetric 4-bit weights are negative.
#
# Expected: a scale is a positive step between neighbouring values, as GPTQ and AWQ write it, so that
# a reader may take a scale below zero for damage.
# Seen: quant_tensor_sym gives the scale the sign of the group's largest value, so that this value
# takes the one integer (-8) that has no positive twin. About half of the groups get a negative scale,
# and none a scale of zero. A loader that refuses negative scales refuses such checkpoints.
#
# The function is cut out of the wheel: its package imports far more than it needs.
# Exit status 0: as described. 1: this version behaves otherwise now.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
pip=("$folder/venv/bin/pip" --quiet --disable-pip-version-check)
"${pip[@]}" install torch==2.13.0 numpy
"${pip[@]}" install --no-deps --target "$folder/wheel" auto-round==0.16.1
"$folder/venv/bin/python" - "$folder/wheel/auto_round/data_type/int.py" <<'PYTHON'
import copy
import re
import sys

import torch

source = open(sys.argv[1]).read()
start = source.index("def quant_tensor_sym(")
function = source[start : start + re.search(r"\n@|\ndef ", source[start + 1 :]).start() + 1]
names = {
    "torch": torch,
    "deepcopy": copy.deepcopy,
    "round_ste": torch.round,
    "reshape_pad_tensor_by_group_size": lambda t, size: (t.view(-1, size), t.shape, 0),
    "revert_tensor_by_pad": lambda t, orig_shape, pad_len: t.view(orig_shape),
}
exec(function, names)
torch.manual_seed(0)
weight = torch.randn(256, 512)
rounded, scale, _ = names["quant_tensor_sym"](weight, bits=4, group_size=128)
negative, zero = (scale < 0).float().mean().item(), int((scale == 0).sum())
print(f"auto-round 0.16.1: {negative:.1%} of {scale.numel()} scales are negative, {zero} are zero")
print(f"largest error of a weight: {(rounded - weight).abs().max():.3f}")
raise SystemExit(not (0.4 < negative < 0.6 and zero == 0))
PYTHON
