"""Tokenizers from local files."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import transformers

from sglang.srt.constants import BUILTIN_MODEL_DIR
from sglang.srt.managers.detokenizer import detokenizer_manager
from sglang.srt.managers.scheduler.process import build
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.hf_tokenizer import get_tokenizer
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=6, suite="base-a-test-cpu")

SAYS = "an incorrect regex pattern"


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Warnings of the library, which gives one at each load here."""
    load, lines = transformers.AutoTokenizer.from_pretrained, list[str]()
    library = logging.getLogger("transformers")

    def warn_and_load(path: str, **options: Any) -> Any:
        library.getChild("some.module").warning(SAYS)
        return load(path, **options)

    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", warn_and_load)
    monkeypatch.setattr(library, "handlers", [handler])
    return lines


def test_each_process_of_a_server_but_the_first_leaves_warnings_to_it(said: list[str]) -> None:
    args = ServerArgs().resolve()
    build._load_tokenizer(args)
    detokenizer_manager._load(args, None)
    assert said == []
    get_tokenizer(str(BUILTIN_MODEL_DIR))
    assert said == [SAYS], "the server process"


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
