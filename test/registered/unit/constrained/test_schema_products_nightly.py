"""All products of keywords: no answer breaks a schema that is not refused."""

from __future__ import annotations

import pytest

from rigs.constrained.schema_products import PRODUCTS, outcome
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=100, suite="nightly-test-cpu", nightly=True)


@pytest.mark.parametrize("name", PRODUCTS)
def test_no_answer_breaks_a_schema_that_is_not_refused(name: str) -> None:
    product = PRODUCTS[name]
    for schema in product.schemas():
        made = outcome(schema, product.texts, checked=True)
        if made is not None:
            assert not made.wrong, (schema, made.wrong[:3])
            assert not made.is_barren, schema
