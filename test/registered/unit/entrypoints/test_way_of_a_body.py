"""Number and order of the functions that a body passes from its route to the socket."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any, Final

import pytest

from rigs.servers.fake_engine import FakeEngine, fake_engine
from sglang.srt.entrypoints.http.protocol import BoundedProtocol, ServerState
from sglang.srt.entrypoints.http.request import Request, Response
from sglang.srt.entrypoints.http.server_context import ServerContext
from sglang.srt.entrypoints.native_routes import generate
from sglang.srt.entrypoints.openai.serving_chat import chat_completions
from sglang.srt.entrypoints.openai.serving_completions import completions
from sglang.srt.managers.tokenizer.chat_template import ChatTemplate
from sglang.srt.server_args import ServerArgs
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=4, suite="base-a-test-cpu")

MAX_STOPS: Final = 21
MAX_FUNCTIONS: Final = 61
SRT: Final = "/sglang/srt/"
SUBMIT: Final = "tokenizer_manager:TokenizerManager.submit"
SEND: Final = "tokenizer_manager:TokenizerManager._send"
END: Final = "server_channel:ServerChannel._flush"
STAGES: Final = (
    "body:read_json",
    "request_limits:check_request",
    "prompt_encoder:PromptEncoder.encode_now",
    "request_limits:check_prompt",
    "request_limits:tokenized",
    "server_channel:ServerChannel.send",
    END,
)
TOOL: Final = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
    },
}
TEMPLATE: Final = (
    "{% for m in messages %}{{ m['role'] + ':' + m['content'] + '|' }}{% endfor %}"
    "{% if tools %}{{ tools | length }}{% endif %}"
)

ROOM: Final = {"bootstrap_host": "p", "bootstrap_port": None, "bootstrap_room": 7}

Endpoint = Callable[[Request], Awaitable[Response]]

BODIES: Final[dict[str, tuple[Endpoint, dict[str, Any]]]] = {
    "generate_ids": (generate, {"input_ids": [65, 66], "sampling_params": {"max_new_tokens": 2}}),
    "generate_text": (
        generate,
        {"text": "ab", "sampling_params": {"max_new_tokens": 2, "stop": "x"}, "stream": True},
    ),
    "chat_with_tools": (
        chat_completions,
        {
            "messages": [
                {"role": "system", "content": "look"},
                {"role": "user", "content": [{"type": "text", "text": "where?"}]},
            ],
            "tools": [TOOL],
            "max_tokens": 2,
            "stream": True,
        },
    ),
    "completion_of_two": (completions, {"prompt": "ab", "n": 2, "max_tokens": 2}),
}


@dataclass
class Walk:
    """The functions of `sglang.srt` that a body passes, in the order in which they are entered.

    The walk begins at the endpoint and ends where the socket has the message. `submit` hands the
    message over, and `END` sends it; `meanwhile` lists the functions that run between the two.

    A stop is a function that enters another: a reader has to follow it. A function that enters none
    is a leaf, read where it is called. Each function counts once, however often it runs; a
    comprehension or a lambda belongs to its enclosing function. Library functions do not count, nor
    do initialisers that `dataclass` and msgspec make.
    """

    functions: list[str] = field(default_factory=list)
    meanwhile: set[str] = field(default_factory=set)
    callers: set[str] = field(default_factory=set)
    is_handed_over: bool = False
    has_ended: bool = False

    def note(self, frame: FrameType, event: str, _: object) -> None:
        """`sys.setprofile`'s callback; the walk ends where `END` returns."""
        name = name_of(frame)
        if name == END:
            self.is_handed_over = False
            self.has_ended = event == "return"
        if name is None or self.has_ended:
            return
        if self.is_handed_over:
            if event == "call":
                self.meanwhile.add(name)
            return
        if event == "return":
            self.is_handed_over = name == SUBMIT
        elif event == "call":
            if name not in self.functions:
                self.functions.append(name)
            caller = frame.f_back
            while caller is not None and name_of(caller) is None:
                caller = caller.f_back
            if caller is not None and name_of(caller) != name:
                self.callers.add(str(name_of(caller)))

    @property
    def stops(self) -> list[str]:
        return [one for one in self.functions if one in self.callers]


def name_of(frame: FrameType) -> str | None:
    """`module:function` of a frame of `sglang.srt`, None elsewhere."""
    path = frame.f_code.co_filename
    if SRT not in path:
        return None
    names = frame.f_code.co_qualname.split(".")
    while names[-1].startswith("<"):
        names.pop()
    return f"{Path(path).stem}:{'.'.join(names)}"


async def no_app(_: Request) -> None:
    """Nothing arrives on the connection."""


def request_of(body: dict[str, Any], context: ServerContext) -> Request:
    """A request whose body is here already, and whose client stays."""
    raw = json.dumps(body).encode()
    connection = BoundedProtocol(ServerState(no_app))
    connection.transport = asyncio.Transport()
    headers = {"content-length": str(len(raw))}
    request = Request(connection, "POST", "/", headers, keep_alive=True, more_body=True)
    request.feed(raw, more_body=False)
    request.app = SimpleNamespace(context=context)
    return request


async def run_to_the_socket(
    engine: FakeEngine, endpoint: Endpoint, body: dict[str, Any], template: str
) -> Walk:
    args = ServerArgs(
        model_path="dummy",
        tool_call_parser="qwen25",
        disaggregation_mode="decode" if "bootstrap_room" in body else "null",
    )
    manager = engine.manager(disaggregation_mode=args.disaggregation_mode)
    await manager.start()
    context = ServerContext(
        args=args.resolve(),
        manager=manager,
        chat_template=ChatTemplate(engine.tokenizer, template),
        ready_details={},
    )
    await asyncio.sleep(0)  # The reader of the engine's messages begins.
    try:
        # The second body is counted: the first fills the caches of a process (`marks_of`).
        for walk in (Walk(), Walk()):
            request = request_of(body, context)
            sys.setprofile(walk.note)
            try:
                response = await endpoint(request)
            finally:
                sys.setprofile(None)
            # Its client leaves at once: a stream without a reader is closed.
            request.lose_client()
            await response.send(request)
            await asyncio.sleep(0)
        return walk
    finally:
        await manager.close()


@pytest.mark.parametrize("room", [{}, ROOM], ids=["whole", "half"])
@pytest.mark.parametrize("name", BODIES)
def test_a_body_passes_few_stops(name: str, room: dict[str, Any], tmp_path: Path) -> None:
    endpoint, body = BODIES[name]
    body = {**body, **room}
    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATE)
    with fake_engine() as engine:
        walk = asyncio.run(run_to_the_socket(engine, endpoint, body, str(template)))
    assert walk.has_ended, "the message was sent"
    preparing = [name for name in walk.meanwhile if "Answer" in name]
    assert not preparing, "answers are prepared while the engine works"
    assert len(walk.stops) <= MAX_STOPS, walk.stops
    assert len(walk.functions) <= MAX_FUNCTIONS, walk.functions
    assert [one for one in walk.functions if ":TokenizerManager." in one] == [SUBMIT, SEND]
    order = [walk.functions.index(one) for one in STAGES]
    assert order == sorted(order), walk.functions
