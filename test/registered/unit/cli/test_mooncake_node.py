"""The command line of a store node, whose settings come from the environment."""

from __future__ import annotations

import pytest

from sglang import mooncake_node
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=1, suite="base-a-test-cpu")


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["--help"], 0, "MOONCAKE_GLOBAL_SEGMENT_SIZE=64gb"),
        (["--port", "12345"], 2, "unrecognized arguments: --port 12345"),
    ],
)
def test_words_are_answered_before_a_store_is_looked_for(
    words: list[str],
    status: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("MOONCAKE_MASTER", raising=False)
    with pytest.raises(SystemExit) as ended:
        mooncake_node.main(words)
    assert ended.value.code == status
    printed = capsys.readouterr()
    assert said in (printed.err if status else printed.out)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
