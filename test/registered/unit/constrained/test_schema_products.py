"""The library's grammars against `jsonschema`, over products of keywords: no answer breaks a schema
that is not refused, and each row of the tables of refusals is needed."""

from __future__ import annotations

import pytest

from rigs.constrained.schema_products import PRODUCTS, derived_rows, outcome
from sglang.srt.constrained.schema_rules import (
    NOT_BESIDE,
    OVERRIDING,
    TYPE_OF,
    UNSUPPORTED,
)
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=9, suite="base-a-test-cpu")

MAX_KEYWORDS = 3
"""The nightly test tries all schemas."""
COMPANIONS = {"then", "else", "minContains", "maxContains", "if"}
"""Keywords that require nothing alone; what they need beside them is refused."""
NOT_ALONE = {"format", "required", "minProperties", "multipleOf"}
"""Keywords that another rule refuses too without a type, or that `jsonschema` does not check."""
OLDER = {"dependencies", "$recursiveRef", "$dynamicRef"}
"""Keywords that draft 2020-12 reads as nothing, or as what these products have not."""


@pytest.mark.parametrize("name", PRODUCTS)
def test_no_answer_breaks_a_schema_that_is_not_refused(name: str) -> None:
    product = PRODUCTS[name]
    num_tried = 0
    for schema in product.schemas():
        if len(schema) > MAX_KEYWORDS:
            continue
        made = outcome(schema, product.texts, checked=True)
        if made is not None:
            num_tried += 1
            assert not made.wrong, (schema, made.wrong[:3])
            assert not made.is_barren, schema
    assert num_tried or name in ("required", "dependentRequired", "dependentSchemas", *UNSUPPORTED)


def test_the_tables_name_what_the_library_does_not_hold_and_nothing_else() -> None:
    """If this fails after an upgrade of the library, it holds more, or names it differently."""
    rows = derived_rows(MAX_KEYWORDS + 1)
    wanted = {*UNSUPPORTED} - COMPANIONS - OLDER
    wanted |= {
        f"{keyword} beside {other}" for keyword in NOT_BESIDE for other in NOT_BESIDE[keyword]
    }
    wanted |= {f"{keyword} needs a type beside" for keyword in TYPE_OF.keys() - NOT_ALONE}
    assert wanted - rows == set()
    for keyword in OVERRIDING:
        assert any(keyword in row.split(" beside ") for row in rows), keyword
