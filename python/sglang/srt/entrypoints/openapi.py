"""`GET /openapi.json`: every endpoint in OpenAPI form, from the routes and the types of bodies."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, get_args

import msgspec

from sglang.srt.constants import VERSION
from sglang.srt.entrypoints import control_routes, native_routes, server_routes
from sglang.srt.entrypoints.anthropic import serving_messages
from sglang.srt.entrypoints.anthropic.protocol import CountTokensBody, MessagesBody
from sglang.srt.entrypoints.http.application import Route
from sglang.srt.entrypoints.http.body import Refused, marks_of
from sglang.srt.entrypoints.http.request import Request, Response
from sglang.srt.entrypoints.http.sse import json_response
from sglang.srt.entrypoints.native_protocol import GenerateBody
from sglang.srt.entrypoints.openai import routes, serving_chat, serving_completions
from sglang.srt.entrypoints.openai.protocol import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
)
from sglang.srt.entrypoints.openai.responses_protocol import ResponsesBody
from sglang.srt.entrypoints.openai.serving_responses import responses
from sglang.srt.utils.auth import is_open
from sglang.srt.utils.error_answers import is_anthropic

BODIES: Final[Mapping[Callable[..., Any], type[msgspec.Struct]]] = {
    native_routes.generate: GenerateBody,
    native_routes.abort_request: native_routes.AbortBody,
    server_routes.attach_backend: server_routes.AttachBody,
    control_routes.open_session: control_routes.OpenSessionBody,
    control_routes.close_session: control_routes.SessionBody,
    control_routes.pause_generation: control_routes.PauseBody,
    control_routes.continue_generation: control_routes.ContinueBody,
    control_routes.start_profile: control_routes.ProfileBody,
    control_routes.stop_profile: control_routes.ContinueBody,
    control_routes.switch_role: control_routes.RoleBody,
    serving_chat.chat_completions: ChatBody,
    serving_completions.completions: CompletionBody,
    responses: ResponsesBody,
    serving_messages.messages: MessagesBody,
    serving_messages.count_tokens: CountTokensBody,
    routes.tokenize: TokenizeBody,
    routes.detokenize: DetokenizeBody,
}
"""Endpoint to the type of its body. Others take none."""
QUERIES: Final[Mapping[Callable[..., Any], dict[str, Any]]] = {
    native_routes.flush_cache: {
        "timeout": {"type": "number", "minimum": 0, "maximum": native_routes.MAX_FLUSH_TIMEOUT}
    },
    server_routes.transfer_engine_info: {"rank": {"type": "integer", "minimum": 0}},
}
"""Endpoint to the schemas of its query parameters."""
_TEMPLATE: Final = "#/components/schemas/{name}"
_TEXT: Final = {"type": "string"}
_ERROR: Final[dict[str, Any]] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": _TEXT,
                "type": _TEXT,
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "integer"]},
            },
        }
    },
}
_ANTHROPIC_ERROR: Final[dict[str, Any]] = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": _TEXT, "message": _TEXT},
        },
    },
}


async def openapi(request: Request) -> Response:
    """This document."""
    app = request.app
    app.openapi = app.openapi or document(app.routes)
    return json_response(app.openapi)


def document(served: Iterable[Route]) -> dict[str, Any]:
    """The OpenAPI 3.1 document of the routes `served`."""
    paths: dict[str, dict[str, Any]] = {}
    for route in served:
        for method in sorted(route.methods - {"HEAD"}):
            paths.setdefault(route.path, {})[method.lower()] = _operation(route, method)
    return {
        "openapi": "3.1.0",
        "info": {"title": "sglang", "version": VERSION},
        "paths": paths,
        "components": {
            "schemas": {**_schemas(), "Error": _ERROR, "AnthropicError": _ANTHROPIC_ERROR},
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "apiKey": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
            },
        },
    }


def _operation(route: Route, method: str) -> dict[str, Any]:
    endpoint = route.endpoint
    name = "AnthropicError" if is_anthropic(route.path) else "Error"
    error = {"schema": {"$ref": _TEMPLATE.format(name=name)}}
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": _TEXT}
        for name in filter(None, [route.parameter])
    ]
    parameters += [
        {"name": name, "in": "query", "required": False, "schema": schema}
        for name, schema in QUERIES.get(endpoint, {}).items()
    ]
    operation: dict[str, Any] = {
        "operationId": f"{method.lower()} {route.path}",
        "summary": " ".join((endpoint.__doc__ or "").split("\n\n")[0].split()),
        "parameters": parameters,
        "responses": {
            "200": {"description": "The answer."},
            "default": {
                "description": "An error, with its reason.",
                "content": {"application/json": error},
            },
        },
    }
    if endpoint in BODIES:
        schema = {"$ref": _TEMPLATE.format(name=BODIES[endpoint].__name__)}
        operation["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": schema}},
        }
    if not is_open(route.path):
        operation["security"] = [{"bearer": []}, {"apiKey": []}]
    return operation


def _schemas() -> dict[str, Any]:
    """Schemas of all types in bodies, by name, without refused fields."""
    _, schemas = msgspec.json.schema_components(BODIES.values(), ref_template=_TEMPLATE)
    kinds = {kind.__name__: kind for body in BODIES.values() for kind in _structs_in(body)}
    for name, schema in schemas.items():
        for field, mark in marks_of(kinds[name]).items():
            if isinstance(mark, Refused):
                del schema["properties"][field]
            else:
                schema["properties"][field]["description"] = f"No effect: {mark.why}."
    return schemas


def _structs_in(kind: object) -> Iterable[type[msgspec.Struct]]:
    """The structs that `kind`, a type, has as itself, its parts or its fields."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        yield kind
        parts: Iterable[object] = [field.type for field in msgspec.structs.fields(kind)]
    else:
        parts = get_args(kind)
    for part in parts:
        yield from _structs_in(part)


ROUTES: Final = (Route("/openapi.json", openapi, methods=["GET"]),)
