"""Requests that schemathesis makes from `/openapi.json`, and what their answers must be."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import httpx
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.core.result import Ok
from schemathesis.generation import GenerationMode

_TIMEOUT_S: Final = 60.0
_STATUSES: Final = {200, 400, 401, 403, 404, 405, 413}


def judge_api(url: str, key: str, examples: int, *, derandomize: bool) -> dict[str, set[int]]:
    """Send `examples` fitting and as many unfitting requests to each operation of the server at
    `url`. An answer comes in time, is no failure of the server, and an error fits the document.

    Returns:
        The statuses that came, by operation.
    """
    headers = {"Authorization": f"Bearer {key}"}
    reply = httpx.get(f"{url}/openapi.json", headers=headers, timeout=_TIMEOUT_S)
    schema: Any = schemathesis.openapi.from_dict(reply.raise_for_status().json())
    options = settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=derandomize,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    seen: dict[str, set[int]] = {}
    for result in schema.get_all_operations():
        assert isinstance(result, Ok), result.err()
        operation = result.ok()
        modes = [GenerationMode.POSITIVE]
        if operation.body or operation.query or operation.path_parameters:
            modes.append(GenerationMode.NEGATIVE)
        for mode in modes:
            statuses = _ask(operation.as_strategy(mode), options, url, headers)
            seen.setdefault(operation.label, set()).update(statuses)
    return seen


def _ask(cases: Any, options: settings, url: str, headers: Mapping[str, str]) -> set[int]:
    """Send `cases`, a strategy, and judge the answers; return their statuses."""
    statuses: set[int] = set()

    @options
    @given(cases)
    def ask(case: Any) -> None:
        response = case.call(base_url=url, headers=headers, timeout=_TIMEOUT_S)
        status = response.status_code
        statuses.add(status)
        assert status in _STATUSES, (status, case.as_curl_command(), response.text[:300])
        if status != 200:
            case.operation.validate_response(response)

    ask()
    return statuses
