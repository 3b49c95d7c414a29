#!/usr/bin/env bash
# xgrammar 0.2.9: a name in "required" that "properties" lacks is not required.
#
# Expected: the grammar of a JSON schema accepts no text that the schema refuses, or the schema is
# refused, or a warning names the part that is not enforced, as for a pattern beside a length. JSON
# Schema asks for each name of "required", with any value if no other keyword describes it; schemas
# whose properties come from elsewhere are written so.
# Seen, without an error or a warning and also with strict_mode=False: the name is dropped. If all
# names are such, {} is accepted. If there is a type for further properties, the other way round: {}
# is refused, an object with another name alone is accepted, and the one that has just the required
# name is refused.
#
# Exit status 0: as described. 1: these versions behave otherwise now.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
    xgrammar==0.2.9 jsonschema==4.26.0
cat > "$folder/schemas.py" <<'PYTHON'
import json

import jsonschema
import xgrammar
from xgrammar.testing import _is_grammar_accept_string as accepts

integer = {"type": "integer"}
more = {"properties": {"a": integer}, "required": ["c"], "additionalProperties": integer}
# A schema, a text, and whether the grammar accepts it.
CASES = [
    ({"properties": {"a": integer}, "required": ["a"]}, "{}", False),
    ({"properties": {"a": integer}, "required": ["a", "c"]}, '{"a": 1}', True),
    ({"required": ["c"]}, "{}", True),
    (more, "{}", False),
    (more, '{"a": 1}', True),
    (more, '{"c": 2}', False),
]
print("xgrammar 0.2.9, strict_mode=False")
for keywords, text, expected in CASES:
    schema = {"type": "object", **keywords}
    grammar = xgrammar.Grammar.from_json_schema(json.dumps(schema), strict_mode=False)
    valid = jsonschema.Draft202012Validator(schema).is_valid(json.loads(text))
    seen = accepts(grammar, text)
    print(f"{text}: valid: {valid}, accepted: {seen}, by {json.dumps(keywords)}")
    assert seen == expected, "otherwise now"
PYTHON
"$folder/venv/bin/python" "$folder/schemas.py" 2>"$folder/warnings" && [ ! -s "$folder/warnings" ] || {
    cat "$folder/warnings"
    exit 1
}
