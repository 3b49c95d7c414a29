"""A headless Chromium for tests and pictures, driven by its DevTools protocol over a pipe.

Debian's package `chromium` is enough. `find_chromium` can install it.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from typing import Any, Final, Literal, Self

_NAMES: Final = ("chromium", "chromium-browser", "google-chrome")
_TIMEOUT_S: Final = 60.0
_INSTALL: Final = ("apt-get", "install", "-y", "-q", "--no-install-recommends", "chromium")

Scheme = Literal["light", "dark"]


def find_chromium(*, may_install: bool) -> str | None:
    """Path of the browser; None: there is none, and it cannot be installed here."""
    found = next((path for name in _NAMES if (path := shutil.which(name))), None)
    if found is not None or not may_install or os.getuid() or not shutil.which("apt-get"):
        return found
    for command in (("apt-get", "update", "-q"), _INSTALL):
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=600)
    return shutil.which("chromium")


class Chromium:
    """Context manager: one browser with one page.

    Attributes:
        problems: Errors that the page logged: exceptions, refusals of the content security policy,
            failed requests.
        requested: Addresses that the page asked for.
    """

    def __init__(self, path: str) -> None:
        self.problems: list[str] = []
        self.requested: list[str] = []
        self._stack = contextlib.ExitStack()
        self._last_id = 0
        self._session: str | None = None
        self._rest = b""
        self._path = path

    def __enter__(self) -> Self:
        profile = self._stack.enter_context(
            tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True)
        )
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()

        def use_pipes() -> None:
            # The protocol's descriptors are 3 and 4. Moved up first: either may be one of them.
            ours, theirs = os.dup2(to_browser, 100), os.dup2(from_browser, 101)
            os.dup2(ours, 3)
            os.dup2(theirs, 4)

        self._process = subprocess.Popen(
            [
                self._path, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
                "--disable-dev-shm-usage", "--no-first-run", "--remote-debugging-pipe",
                f"--user-data-dir={profile}", "about:blank",
            ],
            preexec_fn=use_pipes, close_fds=False,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(to_browser)
        os.close(from_browser)
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._read)
        os.close(self._write)
        self._stack.close()

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the DevTools protocol. An error or a late answer is an
        AssertionError."""
        self._last_id += 1
        message: dict[str, Any] = {"id": self._last_id, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        for answer in self._messages(_TIMEOUT_S):
            if answer.get("id") == self._last_id:
                assert "error" not in answer, f"{method}: {answer['error']}"
                result: dict[str, Any] = answer["result"]
                return result
        raise AssertionError(f"{method}: no answer")

    def open(self, url: str, *, width: int = 1280, height: int = 800) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=False,
        )  # fmt: skip
        self.call("Page.navigate", url=url)

    def prefer(self, scheme: Scheme) -> None:
        """Let the page see that the reader prefers light or dark."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=features)

    def evaluate(self, script: str) -> Any:
        """The value of a JavaScript expression in the page."""
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait_for(self, script: str, timeout: float = _TIMEOUT_S) -> None:
        """Wait until a JavaScript expression is true."""
        deadline = time.monotonic() + timeout
        while not self.evaluate(script):
            assert time.monotonic() < deadline, f"never true: {script}; {self.problems}"
            list(self._messages(0.1))

    def screenshot(self) -> bytes:
        """A picture (PNG) of the whole page."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        shot = self.call("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)
        return base64.b64decode(shot["data"])

    def _messages(self, timeout: float) -> Iterator[dict[str, Any]]:
        """Messages of the browser as they come, until none has come for `timeout` seconds."""
        while True:
            while b"\0" in self._rest:
                raw, _, self._rest = self._rest.partition(b"\0")
                message = json.loads(raw)
                self._note(message)
                yield message
            if not select.select([self._read], [], [], timeout)[0]:
                return
            new = os.read(self._read, 1 << 20)
            assert new, "the browser has ended"
            self._rest += new

    def _note(self, message: dict[str, Any]) -> None:
        params = message.get("params", {})
        match message.get("method"):
            case "Runtime.exceptionThrown":
                self.problems.append(str(params["exceptionDetails"]))
            case "Log.entryAdded" if params["entry"]["level"] == "error":
                self.problems.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
            case "Network.requestWillBeSent":
                self.requested.append(params["request"]["url"])
