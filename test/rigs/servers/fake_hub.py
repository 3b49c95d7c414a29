"""A Hugging Face hub on loopback with one repository, as its client library sees it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

SHA = "0123456789abcdef0123456789abcdef01234567"
REVISIONS = ("main", "v1.0", SHA)


class FakeHub(BaseHTTPRequestHandler):
    """Answers for the repository `name`, whose files are in `directory`.

    Attributes:
        fetched: Names of the files whose bytes were sent.
    """

    name: str
    directory: Path
    fetched: list[str]

    def do_GET(self) -> None:
        path = self.path.partition("?")[0].removeprefix("/")
        for revision in REVISIONS:
            if path == f"api/models/{self.name}/revision/{revision}":
                self._answer(json.dumps({"id": self.name, "sha": SHA, "siblings": []}).encode())
                return
        if path == f"api/models/{self.name}/tree/{SHA}":
            files = [
                {
                    "type": "file",
                    "path": file.name,
                    "size": file.stat().st_size,
                    "oid": hashlib.sha1(file.read_bytes()).hexdigest(),
                }
                for file in sorted(self.directory.iterdir())
            ]
            self._answer(json.dumps(files).encode())
            return
        file = self.directory / path.removeprefix(f"{self.name}/resolve/{SHA}/")
        if path.startswith(f"{self.name}/resolve/{SHA}/") and file.is_file():
            self._answer(file.read_bytes(), file)
            return
        known = self.name in path
        self.send_response(404)
        self.send_header("X-Error-Code", "RevisionNotFound" if known else "RepoNotFound")
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""

    def _answer(self, body: bytes, file: Path | None = None) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Type", "application/json")
        if file is not None:
            self.send_header("ETag", f'"{hashlib.sha1(body).hexdigest()}"')
            self.send_header("X-Repo-Commit", SHA)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)
            if file is not None:
                self.fetched.append(file.name)


@contextmanager
def fake_hub(name: str, directory: Path) -> Iterator[tuple[str, list[str]]]:
    """Run the hub; yield its URL, and the names of the files that it sends.

    Args:
        name: `OWNER/NAME` of the repository.
        directory: Its files.
    """
    fetched: list[str] = []
    handler = type("_Hub", (FakeHub,), {"name": name, "directory": directory, "fetched": fetched})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}", fetched
        finally:
            server.shutdown()
            thread.join()
