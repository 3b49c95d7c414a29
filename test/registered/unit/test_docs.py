"""The docs name what exists: every file and class in backticks, and a line for every source file.

In `docs/structures.md` the line of a file starts with its path in backticks, as a list item or a
table row; the path is whole, or relative to the folder in the nearest heading above.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path
from typing import Final

import pytest

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=2, suite="base-a-test-cpu")

REPO: Final = Path(__file__).resolve().parents[3]
STRUCTURES: Final = REPO / "docs" / "structures.md"
BASES: Final = (
    ".",
    "docs",
    "python/sglang/srt",
    "python/sglang",
    "test/registered",
    "test/registered/unit",
)
"""Folders that a path in the docs may be relative to."""

EXTERNAL_CLASSES: Final = frozenset(
    {"LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "ValueError", "RuntimeError"}
)
"""Names in backticks that are classes of the language, of a library or of a checkpoint's config."""

_FENCE: Final = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
_SPAN: Final = re.compile(r"`([^`\n]+)`")
_PATH: Final = re.compile(r"[\w.-]*(/[\w.-]+)*(/|\.(py|md|sh|toml|ya?ml|json|safetensors))")
_CLASS: Final = re.compile(r"([A-Z]\w*[a-z]\w*)(?:\.(\w+))?(?:\(.*\))?")
_LINE: Final = re.compile(r"^\s*(?:[-*]|\|)\s*`([^`]+)`")


def spans(text: str) -> list[str]:
    """What stands in backticks within the prose of `text`."""
    return _SPAN.findall(_FENCE.sub("", text))


def class_members(root: Path) -> dict[str, set[str]]:
    """Class name to the names of its methods and fields, over every Python file under `root`."""
    members: dict[str, set[str]] = {}
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                members.setdefault(node.name, set()).update(_member_names(node))
    return members


def _member_names(node: ast.ClassDef) -> set[str]:
    names = set()
    for child in ast.walk(node):
        match child:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                names.add(name)
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                names.add(name)
    return names


def is_class_name(name: str) -> bool:
    """Two capitals at least: a single one may be any word."""
    return sum(letter.isupper() for letter in name) >= 2


def missing_names(text: str, members: dict[str, set[str]], repo: Path) -> list[str]:
    """Spans of `text` that name a file, a class or a member that does not exist."""
    missing = []
    for span in spans(text):
        if _PATH.fullmatch(span) and not span.startswith(("/", ".")):
            found = any((repo / base / span).exists() for base in BASES)
            if not found and ("/" in span or span.endswith(".py")):
                found = any(repo.glob(f"python/**/{span}")) or any(repo.glob(f"test/**/{span}"))
        elif match := _CLASS.fullmatch(span):
            name, member = match.groups()
            if name in EXTERNAL_CLASSES or not (name in members or is_class_name(name)):
                continue
            found = name in members and (member is None or member in members[name])
        else:
            continue
        if not found:
            missing.append(span)
    return missing


def listed_files(text: str, repo: Path) -> Counter[str]:
    """Repository paths that have a line in `text`, with how many lines each has."""
    folder = ""
    found: Counter[str] = Counter()
    for line in text.splitlines():
        if line.startswith("#"):
            # A heading without a folder ends the one above it.
            folder = next((s for s in _SPAN.findall(line) if (repo / s).is_dir()), "")
        elif match := _LINE.match(line):
            for path in (Path(match[1]), Path(folder) / match[1]):
                if (repo / path).is_file():
                    found[str(path)] += 1
                    break
    return found


def source_files(repo: Path) -> list[str]:
    """Files that need a line: the package's Python files that say anything, and the scripts."""
    files = [p for p in (repo / "python").rglob("*.py") if p.stat().st_size]
    files += [p for p in (repo / "scripts").rglob("*") if p.suffix in (".py", ".sh")]
    files += (repo / "test").glob("*.py")
    return sorted(str(p.relative_to(repo)) for p in files)


@pytest.mark.parametrize(
    "page",
    ["README.md", "SECURITY.md", *(str(p.relative_to(REPO)) for p in REPO.glob("docs/**/*.md"))],
)
def test_what_the_docs_name_exists(page: str) -> None:
    missing = missing_names(
        (REPO / page).read_text(encoding="utf-8"), class_members(REPO / "python"), REPO
    )
    assert not missing, f"{page} names what is not there: {missing}"


def test_every_source_file_has_one_line() -> None:
    listed = listed_files(STRUCTURES.read_text(encoding="utf-8"), REPO)
    wanted = source_files(REPO)
    assert len(wanted) > 100
    problems = [f"{path}: {listed[path]} lines" for path in wanted if listed[path] != 1]
    assert not problems, "docs/structures.md:\n" + "\n".join(problems)


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    package = tmp_path / "python" / "sglang" / "srt" / "mem_cache"
    package.mkdir(parents=True)
    (package / "tree.py").write_text(
        "class RadixTree:\n    size = 1\n    def match(self):\n        self.hits = 2\n"
    )
    (tmp_path / "scripts").mkdir()
    (tmp_path / "test").mkdir()
    (tmp_path / "scripts" / "go.sh").write_text("")
    return tmp_path


@pytest.mark.parametrize(
    ("span", "missing"),
    [
        ("mem_cache/tree.py", False),
        ("tree.py", False),
        ("python/sglang/srt/", False),
        ("mem_cache/bush.py", True),
        ("bush.py", True),
        ("RadixTree", False),
        ("RadixTree.match", False),
        ("RadixTree.match(key)", False),
        ("RadixTree.hits", False),
        ("RadixTree.lookup", True),
        ("RadixBush", True),
        ("ValueError", False),
        ("/generate", False),
        ("--page-size", False),
        ("None", False),
    ],
)
def test_a_name_that_is_not_there_is_found(repo: Path, span: str, missing: bool) -> None:
    members = class_members(repo / "python")
    text = f"See `{span}`.\n```\n`fenced/bush.py`\n```\n"
    assert missing_names(text, members, repo) == ([span] if missing else [])


def test_lines_of_files_are_counted(repo: Path) -> None:
    text = (
        "# Files\n- `scripts/go.sh`: goes\n## `python/sglang/srt/mem_cache`\n"
        "| `tree.py` | the tree |\n- `tree.py`, again\nText about `tree.py`.\n"
        "## Other\n- `tree.py`: no folder here\n"
    )
    assert source_files(repo) == ["python/sglang/srt/mem_cache/tree.py", "scripts/go.sh"]
    assert listed_files(text, repo) == {
        "python/sglang/srt/mem_cache/tree.py": 2,
        "scripts/go.sh": 1,
    }


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
