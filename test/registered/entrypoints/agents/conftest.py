"""A server whose prompts show all that the template is given."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rigs.servers.fake_engine import WHOLE, FrontServer, front_server, write_template


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontServer]:
    template = write_template(tmp_path_factory.mktemp("whole"), WHOLE)
    with front_server(chat_template=template, tool_call_parser="llama3") as running:
        yield running
