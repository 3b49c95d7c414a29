#!/usr/bin/env bash
# xgrammar 0.2.9: a JSON schema of a string with a length admits texts that are no JSON.
#
# Expected: every text that the grammar of a schema accepts can be read as JSON. Without a length it
# is so: a raw tab inside a string is refused.
# Seen: with maxLength the grammar accepts a string with a raw tab, which JSON forbids. A model whose
# output is held by that grammar may therefore end with an answer that no client can parse.
#
# Exit status 0: as described. 1: this version behaves otherwise now.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check xgrammar==0.2.9
"$folder/venv/bin/python" - <<'PYTHON'
import json

import xgrammar
from xgrammar.testing import _is_grammar_accept_string as accepts


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


text = '"a\tb"'
seen = {}
for name, more in (("plain", {}), ("maxLength", {"maxLength": 5})):
    schema = {"type": "string", **more}
    seen[name] = accepts(xgrammar.Grammar.from_json_schema(json.dumps(schema)), text)
    print(f"xgrammar 0.2.9, {name}: accepts {text!r}: {seen[name]}; it is JSON: {is_json(text)}")
raise SystemExit(seen != {"plain": False, "maxLength": True})
PYTHON
