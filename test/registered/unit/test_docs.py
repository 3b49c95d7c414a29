"""The docs name what exists, and the sources cite only pages and rows that the docs have.
The index of `benchmark/results` and the folder agree. Hand-written pages have at most 20,000 words.

In `docs/files.md` the line of a file starts with its path in backticks, as a list item or a
table row; the path is whole, or relative to the folder in the nearest heading above.

In `docs/faults.md` a heading `### C8: ...` starts a row, and each list item that starts with a path
in backticks is a test of that row: a test file, or `FILE::FUNCTION`.
"""

from __future__ import annotations

import ast
import re
import runpy
from collections import Counter
from pathlib import Path
from typing import Final

import pytest

from benchmark.command import COMMANDS
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=5, suite="base-a-test-cpu")

REPO: Final = Path(__file__).resolve().parents[3]
FILES: Final = REPO / "docs" / "files.md"
FAULTS: Final = REPO / "docs" / "faults.md"
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
    {
        "GLOG_minloglevel",
        "LlamaForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen3ForCausalLM",
        "RuntimeError",
        "ValueError",
    }
)
"""Names in backticks that are classes of the language, of a library or of a checkpoint's config, or
look like one."""

_FENCE: Final = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
_SPAN: Final = re.compile(r"`([^`\n]+)`")
_PATH: Final = re.compile(r"[\w.-]*(/[\w.-]+)*(/|\.(py|md|sh|toml|ya?ml|json|safetensors))")
_CLASS: Final = re.compile(r"([A-Z]\w*[a-z]\w*)(?:\.(\w+))?(?:\(.*\))?")
_LINE: Final = re.compile(r"^\s*(?:[-*]|\|)\s*`([^`]+)`")
_PAGE: Final = re.compile(r"[\w./-]+\.md\b")
_LINK: Final = re.compile(r"\]\(([^)#\s]+)")
_INDEXED: Final = re.compile(r"^\|([^|]+)", re.MULTILINE)
"""The first cell of each row of a table."""
_RESULT: Final = re.compile(r"[\[`]([\w-]+\.\w+)[\]`]")
_HEADING: Final = re.compile(r"(#+) ")
_WRITTEN_BY_A_SCRIPT: Final = "Written by `scripts/"
_PLACED_ROW: Final = re.compile(r"\|.*`[\w.]+`, `[\w./-]+\.py:\d+`")
"""A row of docs/changes whose places `scripts/update_changes.py` writes."""
_ROW_HEADING: Final = re.compile(r"^### ([CFP]\d+):")
_ROW_CITATION: Final = re.compile(r"\b(?:[Rr]ow|[Ff]ault)s? ([CFP]\d+(?:(?:, | and )[CFP]\d+)*)\b")
_ROW_TEST: Final = re.compile(r"def test_([cfp]\d+)_")


def spans(text: str) -> list[str]:
    """Texts in backticks within the prose of `text`."""
    return _SPAN.findall(_FENCE.sub("", text))


def class_members(repo: Path) -> dict[str, set[str]]:
    """Class name to the names of its methods and fields, over the package and the tests' rigs."""
    members: dict[str, set[str]] = {}
    for path in [*(repo / "python").rglob("*.py"), *(repo / "test" / "rigs").rglob("*.py")]:
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
    files += [*(repo / "test").glob("*.py"), *(repo / "test" / "rigs").rglob("*.py")]
    return sorted(str(p.relative_to(repo)) for p in files)


def fault_rows(text: str) -> dict[str, list[str]]:
    """Row id to the tests that the fault matrix lists for it."""
    rows: dict[str, list[str]] = {}
    row: list[str] = []
    for line in text.splitlines():
        if heading := _ROW_HEADING.match(line):
            row = rows.setdefault(heading[1], [])
        elif (match := _LINE.match(line)) and match[1].startswith("test/"):
            row.append(match[1])
    return rows


def cited_rows(source: str) -> set[str]:
    """Ids of fault rows that a source names, in its texts or in the names of its tests."""
    ids = {row for cited in _ROW_CITATION.findall(source) for row in re.split(r", | and ", cited)}
    return ids | {row.upper() for row in _ROW_TEST.findall(source)}


def is_test(name: str, repo: Path) -> bool:
    """True if `name` is a test file, or `FILE::FUNCTION` with a test function of that file."""
    path, _, function = name.partition("::")
    file = repo / path
    if not file.is_file():
        return False
    return not function or f"def {function}(" in file.read_text(encoding="utf-8")


def sources(repo: Path) -> dict[str, str]:
    """Repository path to text, of every Python file and shell script outside `.venv`."""
    paths = [
        path
        for folder in ("python", "test", "benchmark", "scripts")
        for path in (repo / folder).rglob("*")
        if path.suffix in (".py", ".sh") and path != Path(__file__)
    ]
    return {str(p.relative_to(repo)): p.read_text(encoding="utf-8") for p in sorted(paths)}


def words_by_hand(text: str) -> int:
    """Words of a page that people wrote and readers read.

    A word stands between white space and has a letter or a digit. Code blocks, rows with places of
    `docs/changes` and sections that a script writes do not count. A generated
    section says so in its first line, and ends at the next heading of its level or a higher one.
    """
    count = 0
    section: list[str] = []
    generated = 0  # Level of the heading whose section a script writes; 0: none.
    for line in [*_FENCE.sub("", text).splitlines(), "# "]:
        if match := _HEADING.match(line):
            level = len(match[1])
            is_generated = any(one.startswith(_WRITTEN_BY_A_SCRIPT) for one in section)
            if is_generated and not generated:
                generated = len(section[0].split()[0])
            if not generated:
                count += sum(_words(one) for one in section)
            if generated >= level:
                generated = 0
            section = []
        section.append(line)
    return count


def _words(line: str) -> int:
    return 0 if _PLACED_ROW.match(line) else sum(bool(re.search(r"\w", w)) for w in line.split())


@pytest.fixture(scope="module")
def members() -> dict[str, set[str]]:
    # An alert is a name like a class, without members.
    alerts = (REPO / "docs" / "monitoring" / "alerts.yml").read_text(encoding="utf-8")
    names = re.findall(r"- alert: (\w+)", alerts)
    return {name: set() for name in names} | class_members(REPO)


@pytest.mark.parametrize(
    "page",
    [str(p.relative_to(REPO)) for p in (*REPO.glob("*.md"), *REPO.glob("docs/**/*.md"))],
)
def test_what_the_docs_name_exists(page: str, members: dict[str, set[str]]) -> None:
    missing = missing_names((REPO / page).read_text(encoding="utf-8"), members, REPO)
    assert not missing, f"{page} names what is not there: {missing}"


def test_the_docs_have_at_most_20_000_words() -> None:
    pages = [*REPO.glob("*.md"), *REPO.glob("docs/**/*.md")]
    words = {
        str(page.relative_to(REPO)): words_by_hand(page.read_text(encoding="utf-8"))
        for page in pages
    }
    assert not words["docs/files.md"] and not words["docs/reference.md"]
    assert sum(words.values()) <= 20_000, f"say facts once, and link to them: {words}"


def test_every_source_file_has_one_line() -> None:
    listed = listed_files(FILES.read_text(encoding="utf-8"), REPO)
    wanted = source_files(REPO)
    assert len(wanted) > 100
    problems = [f"{path}: {listed[path]} lines" for path in wanted if listed[path] != 1]
    assert not problems, "run scripts/update_files.py:\n" + "\n".join(problems)


def test_every_fault_row_lists_tests_that_exist() -> None:
    rows = fault_rows(FAULTS.read_text(encoding="utf-8"))
    assert len(rows) > 20
    assert not [row for row, tests in rows.items() if not tests], "rows without a test"
    missing = [name for tests in rows.values() for name in tests if not is_test(name, REPO)]
    assert not missing, f"docs/faults.md names tests that do not exist: {missing}"


def test_every_cited_fault_row_is_on_the_page() -> None:
    rows = fault_rows(FAULTS.read_text(encoding="utf-8"))
    cited = {path: cited_rows(text) for path, text in sources(REPO).items()}
    assert set().union(*cited.values()) > {"C7", "F3"}
    unknown = {path: ids - rows.keys() for path, ids in cited.items() if ids - rows.keys()}
    assert not unknown, f"not in docs/faults.md: {unknown}"


def test_the_page_lists_every_test_that_is_named_after_a_row() -> None:
    rows = fault_rows(FAULTS.read_text(encoding="utf-8"))
    unlisted = []
    for path, text in sources(REPO).items():
        for name in re.findall(r"def (test_[cfp]\d+_\w+)", text):
            row = name.split("_")[1].upper()
            if not {path, f"{path}::{name}"} & set(rows.get(row, [])):
                unlisted.append(f"{row}: {path}::{name}")
    assert not unlisted, "not in docs/faults.md:\n" + "\n".join(unlisted)


def test_sources_cite_only_pages_of_this_repository() -> None:
    missing = {
        path: pages
        for path, text in sources(REPO).items()
        if (pages := [page for page in _PAGE.findall(text) if not _is_page(page)])
    }
    assert not missing, f"cited, but not there: {missing}"


def test_the_changes_name_lines_and_tests_that_exist() -> None:
    updated = runpy.run_path(str(REPO / "scripts" / "update_changes.py"))["updated"]
    for page in REPO.glob("docs/changes/*.md"):
        text = page.read_text(encoding="utf-8")
        assert text == updated(text), "run scripts/update_changes.py"
        named = re.findall(r"`(test_\w+\.py)::(\w+)`", text)
        assert named, page
        for file, name in named:
            found = [path.read_text(encoding="utf-8") for path in REPO.glob(f"test/**/{file}")]
            assert any(f"def {name}(" in one for one in found), f"{page}: {file}::{name}"


def test_the_reference_is_what_the_code_has() -> None:
    script = runpy.run_path(str(REPO / "scripts" / "update_reference.py"))
    text = (REPO / "docs" / "reference.md").read_text(encoding="utf-8")
    assert text == script["page"](), "run scripts/update_reference.py"
    package = [p.read_text(encoding="utf-8") for p in (REPO / "python").rglob("*.py")]
    kinds = {name for one in package for name in re.findall(r"^class (\w+Metrics)\b", one, re.M)}
    kinds.remove("CacheMetrics")  # HiCacheMetrics has them too.
    assert len(kinds) > 3 and kinds <= script.keys(), "metrics that the script does not know"
    made = re.compile(r'\b(?:counter|gauge|histogram)\(\s*"(\w+)"')
    metrics = {f"sglang:{name}" for one in package for name in made.findall(one)}
    assert len(metrics) > 50 and not {one for one in metrics if f"| `{one}" not in text}
    for name in ("--page-size", "MOONCAKE_MASTER", "sglang:hicache_hit_tokens_total"):
        assert f"| `{name}`" in text


def test_links_lead_to_files() -> None:
    pages = [*REPO.glob("*.md"), *REPO.glob("docs/**/*.md")]
    pages += REPO.glob("benchmark/results/*.md")
    broken = [
        f"{page.relative_to(REPO)}: {link}"
        for page in pages
        for link in _LINK.findall(page.read_text(encoding="utf-8"))
        if ":" not in link and not (page.parent / link).exists()
    ]
    assert not broken, "\n".join(broken)


def test_the_index_of_results_lists_each_file_once() -> None:
    results = REPO / "benchmark" / "results"
    cells = _INDEXED.findall((results / "README.md").read_text(encoding="utf-8"))
    listed = Counter(name for cell in cells for name in _RESULT.findall(cell))
    files = Counter(path.name for path in results.iterdir() if path.name != "README.md")
    assert listed == files


def test_each_result_has_a_command_that_measures_it_again() -> None:
    text = (REPO / "benchmark" / "results" / "README.md").read_text(encoding="utf-8")
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    rows = [row for row in rows if _RESULT.search(row[0])]
    assert len(rows) > 40
    for row in rows:
        quoted = [command.split() for command in re.findall("`(.+?)`", row[-1])]
        assert any(
            name in COMMANDS and (not COMMANDS[name] or (parts and parts[0] in COMMANDS[name]))
            for name, *parts in quoted
        ), row


def _is_page(name: str) -> bool:
    return any((REPO / base / name).exists() for base in (".", "docs"))


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
    members = class_members(repo)
    text = f"See `{span}`.\n```\n`fenced/bush.py`\n```\n"
    assert missing_names(text, members, repo) == ([span] if missing else [])


def test_words_by_hand_are_counted() -> None:
    text = (
        "# Two words\n```bash\nls docs\n```\nA list -> of *five* words, `a/b.py`\n| one | - |\n"
        "| report | `Pool`, `mem_cache/pool.py:12`: its pool |\n## Flags\n\n"
        "Written by `scripts/update_flags.py`.\n### Refused\n| many |\n## Three more words\n"
    )
    assert words_by_hand(text) == 2 + 6 + 1 + 3
    assert words_by_hand("# Flags\n\n" + text[text.index("Written") :]) == 0


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


def test_rows_and_their_tests_are_read_from_the_page(repo: Path) -> None:
    (repo / "test" / "test_slow.py").write_text("def test_c7_a():\n    pass\n")
    text = (
        "## Tiers\n### C7: slow\n- Provoke: `sleep`\n- `test/test_slow.py::test_c7_a`, nightly\n"
        "### F1: bodies\n- `test/test_slow.py`\n- `test/test_slow.py::test_c7_b`\n"
    )
    rows = fault_rows(text)
    assert rows == {
        "C7": ["test/test_slow.py::test_c7_a"],
        "F1": ["test/test_slow.py", "test/test_slow.py::test_c7_b"],
    }
    assert [name for tests in rows.values() for name in tests if not is_test(name, repo)] == [
        "test/test_slow.py::test_c7_b"
    ]
    assert not is_test("test/test_gone.py", repo)


@pytest.mark.parametrize(
    ("source", "ids"),
    [
        ('"""Rows C1, C2 and F3: slow."""', {"C1", "C2", "F3"}),
        ("# -- row C10 ---", {"C10"}),
        ("def test_c18_a_full_disk() -> None:", {"C18"}),
        ('label = "P99"; dtype = "F32"', set()),
    ],
)
def test_citations_of_rows_are_found(source: str, ids: set[str]) -> None:
    assert cited_rows(source) == ids
