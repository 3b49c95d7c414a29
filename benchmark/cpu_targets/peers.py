"""The two sides of a comparison: transformers in its process, and clients of our server."""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
import time
import urllib.parse
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from benchmark.posting import post_all
from benchmark.timing import seconds_of
from sglang.srt.constants import BUILTIN_MODEL_DIR
from sglang.srt.environ import child_environment, envs


class TransformersPeer:
    """Context manager around `transformers_worker.py`."""

    def __enter__(self) -> TransformersPeer:
        script = str(Path(__file__).with_name("transformers_worker.py"))
        self._process = subprocess.Popen(
            [sys.executable, script, str(BUILTIN_MODEL_DIR)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            # The engine's setting: OpenMP's default on a busy machine would slow transformers down.
            env=child_environment({envs.GOMP_SPINCOUNT.name: str(envs.GOMP_SPINCOUNT.get())}),
        )
        self.about = self._read()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.kill()
        self._process.wait()

    def ask(self, do: str, prompts: Sequence[Sequence[int]], new: int = 0) -> float:
        """Seconds of one `prefill` or `generate`, as measured by the other process."""
        assert self._process.stdin is not None
        question = {"do": do, "prompts": [list(prompt) for prompt in prompts], "new": new}
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        return float(self._read()["seconds"])

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the transformers process ended: {self._process.wait()}"
        answer: dict[str, Any] = json.loads(line)
        return answer


class StreamClient:
    """Times first tokens, a request at a time, on connections made before the clock starts."""

    def __init__(self, url: str) -> None:
        parts = urllib.parse.urlsplit(url)
        self._connection = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=120)

    def first_token(self, prompt: Sequence[int]) -> tuple[float, dict[str, Any]]:
        """Seconds to the first event of a streamed answer; the cached tokens by tier."""
        params = {"max_new_tokens": 4, "temperature": 0, "ignore_eos": True}
        body = msgspec.json.encode({"input_ids": prompt, "sampling_params": params, "stream": True})
        # The server closes connections that were idle for seconds, as between two rounds.
        self._connection.close()
        self._connection.connect()
        started = time.perf_counter()
        self._connection.request(
            "POST", "/generate", body, headers={"Content-Type": "application/json"}
        )
        response = self._connection.getresponse()
        assert response.status == 200, response.read()[:300]
        line = response.readline()
        seconds = time.perf_counter() - started
        response.read()
        details: dict[str, Any] = msgspec.json.decode(line.removeprefix(b"data: "))["meta_info"]
        cached: dict[str, Any] = details["cached_tokens_details"]
        return seconds, cached


def output_speed(
    url: str, prompts: Sequence[Sequence[int]], new_tokens: int, concurrency: int
) -> float:
    """Output tokens a second of whole answers, `concurrency` requests at a time."""
    params = {"max_new_tokens": new_tokens, "temperature": 0, "ignore_eos": True}
    bodies = [
        msgspec.json.encode({"input_ids": prompt, "sampling_params": params}) for prompt in prompts
    ]

    def check(answer: bytes) -> None:
        body = msgspec.json.decode(answer)
        assert len(body["output_ids"]) == new_tokens, body["meta_info"]

    seconds = seconds_of(lambda: post_all(url, bodies, concurrency, check))
    return len(prompts) * new_tokens / seconds
