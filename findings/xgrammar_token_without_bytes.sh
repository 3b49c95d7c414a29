#!/usr/bin/env bash
# xgrammar 0.2.9: the format "token" of a structural tag never matches an id without bytes.
#
# Expected: {"type": "token", "token": ID} matches the token with that id. The format names the id,
# so that a grammar can hold control tokens, which have no text of their own.
# Seen: if the vocabulary's entry of the id is empty, the tag compiles without an error, but no mask
# allows the token, and accept_token refuses it with a warning about a special token. An engine that
# gives control tokens no bytes, so that no text can spell them, gets a grammar that allows nothing.
# The same tag works once the entry has any byte, also one that no UTF-8 text has.
#
# Exit status 0: as described. 1: this version behaves otherwise now.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check xgrammar==0.2.9
"$folder/venv/bin/python" - <<'PYTHON'
import json
from importlib.metadata import version

import xgrammar

print("xgrammar", version("xgrammar"))
CONTROL, STOP = 1, 2
tag = json.dumps({"type": "structural_tag", "format": {"type": "token", "token": CONTROL}})
seen = {}
for entry in (b"", b"\xff"):
    vocabulary = [b"a", entry, b"</s>"]
    info = xgrammar.TokenizerInfo(
        vocabulary, xgrammar.VocabType.RAW, vocab_size=len(vocabulary), stop_token_ids=[STOP]
    )
    compiled = xgrammar.GrammarCompiler(info).compile_structural_tag(tag)
    matcher = xgrammar.GrammarMatcher(compiled)
    mask = xgrammar.allocate_token_bitmask(1, len(vocabulary))
    matcher.fill_next_token_bitmask(mask)
    allowed = [one for one in range(len(vocabulary)) if int(mask[0, 0]) >> one & 1]
    seen[entry] = (allowed, matcher.accept_token(CONTROL))
    print(f"entry {entry!r}: the mask allows {allowed}, accepted: {seen[entry][1]}")
assert seen == {b"": ([], False), b"\xff": ([CONTROL], True)}, "otherwise now"
PYTHON
