"""A real server for tests: start, requests, flush, end."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import signal
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

from sglang.srt.utils.network import get_free_port, wait_until
from sglang.test.test_utils import (
    DEFAULT_TIMEOUT_FOR_SERVER_LAUNCH,
    RunningServer,
    kill_process_tree,
    popen_launch_server,
)

ADMIN_KEY: Final = "test-admin-key"
DEFAULT_TOTAL_TOKENS: Final = 32768
EXACT: Final = ("--dtype", "float32")
"""Flags of a server whose words or log probabilities are compared with others'. In bf16 the same
token gets other numbers from another kind of CPU, in a batch of another size, in a decode step or
a prefill: by 0.03 in log probabilities, which is more than likely words are apart."""
_TIMEOUT_S: Final = 120.0
_MODEL_LABEL: Final = re.compile(r'(?<=[{,])model_name="[^"]*",?|,model_name="[^"]*"')


@dataclass(frozen=True)
class Answer:
    """An answer of `/generate`."""

    text: str
    output_ids: list[int]
    meta_info: dict[str, Any]

    @property
    def cached(self) -> dict[str, Any]:
        """Cached tokens by tier."""
        details: dict[str, Any] = self.meta_info["cached_tokens_details"]
        return details


@dataclass(frozen=True)
class HttpReply:
    """Status and JSON body (or text) of any endpoint."""

    status: int
    body: Any


class EngineServer:
    """Context manager around `python -m sglang.launch_server` on a free port.

    Args:
        args: Flags.
        env: Added to this process's environment.
        model: None means the built-in model.
        host: Address to listen on.
    """

    def __init__(
        self,
        *args: str,
        env: Mapping[str, str] | None = None,
        model: str | None = None,
        host: str = "127.0.0.1",
    ) -> None:
        self._args = ["--admin-api-key", ADMIN_KEY, *args]
        if "--max-total-tokens" not in args:
            # Little memory, because every start touches all of it.
            self._args += ["--max-total-tokens", str(DEFAULT_TOTAL_TOKENS)]
        self._env = env
        self._model = model
        # On another host than this machine any port is free.
        self.url = f"http://{host}:{get_free_port()}"
        self._process: RunningServer | None = None

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as failed:
            failed.callback(self.kill)
            self.start()
            failed.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()

    @property
    def process(self) -> RunningServer:
        assert self._process is not None, "the server was not started"
        return self._process

    def start(self, timeout: float = DEFAULT_TIMEOUT_FOR_SERVER_LAUNCH) -> None:
        """Start the server and wait until it is healthy, `timeout` seconds at most."""
        self._process = popen_launch_server(
            self._model,
            self.url,
            timeout,
            other_args=self._args,
            env=self._env,
        )

    def stop(self, sig: signal.Signals = signal.SIGINT, timeout: float = 60.0) -> int:
        """Send a signal, wait for the end, and return the exit status. After SIGTERM a server that
        has just been used goes on listening for a while."""
        self.process.send_signal(sig)
        return self.process.wait(timeout)

    def kill(self) -> None:
        """End the whole process tree. Idempotent."""
        if self._process is not None and self._process.poll() is None:
            kill_process_tree(self._process.pid)
            self._process.wait()

    def generate(
        self,
        prompt: str | Sequence[int],
        max_new_tokens: int = 16,
        sampling: Mapping[str, Any] | None = None,
        **fields: Any,
    ) -> Answer:
        """Call `/generate`, greedily unless `sampling` differs. An error is an AssertionError."""
        params = {"temperature": 0, "max_new_tokens": max_new_tokens, **(sampling or {})}
        key = "text" if isinstance(prompt, str) else "input_ids"
        value = prompt if isinstance(prompt, str) else list(prompt)
        reply = self.request("POST", "/generate", {key: value, "sampling_params": params, **fields})
        assert reply.status == 200, reply
        body = reply.body
        return Answer(body["text"], body["output_ids"], body["meta_info"])

    def flush(self, timeout: float = 60.0) -> None:
        """Wait until the server is idle, including backups, and empty L1 and L2."""
        reply = self.request("POST", f"/flush_cache?timeout={timeout}", admin=True)
        assert reply.status == 200, reply

    def metrics(self) -> dict[str, float]:
        """Name with labels to value, for all samples of `/metrics`. The label of the model, which
        all samples have, is left out."""
        text = str(self.request("GET", "/metrics").body)
        samples = {}
        for line in text.splitlines():
            if line and not line.startswith("#"):
                name, value = line.rsplit(" ", 1)
                name, num_labels = _MODEL_LABEL.subn("", name)
                assert num_labels == 1, f"{name} does not name the model"
                samples[name.replace("{}", "")] = float(value)
        return samples

    def request(
        self, method: str, path: str, body: object = None, *, admin: bool = False
    ) -> HttpReply:
        """Send any request. Errors of the server are replies."""
        headers = {"Content-Type": "application/json"}
        if admin:
            headers["Authorization"] = f"Bearer {ADMIN_KEY}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data=data, headers=headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:
                return HttpReply(response.status, _decoded(response.read()))
        except urllib.error.HTTPError as error:
            return HttpReply(error.code, _decoded(error.read()))


def post_and_leave(url: str, path: str, body: object, when: Callable[[], bool]) -> None:
    """Post a request, and close the connection once `when` holds, before the answer."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=_TIMEOUT_S)
    with contextlib.closing(connection):
        headers = {"Content-Type": "application/json"}
        connection.request("POST", path, json.dumps(body).encode(), headers)
        assert wait_until(when, 60), "the request does not get so far"


def _decoded(raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except ValueError:
        return raw.decode(errors="replace")
