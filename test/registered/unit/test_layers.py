"""The layers of docs/structures.md: a file imports its own layer or a lower one, in no cycle.

The map below is the whole rule. Every import statement counts, those inside functions too; what
stands under `if TYPE_CHECKING:` counts for circles alone. A file that the map does not place fails:
who adds it decides where it belongs.
"""

from __future__ import annotations

import ast
import graphlib
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final

import pytest

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=7, suite="base-a-test-cpu")

REPO: Final = Path(__file__).resolve().parents[3]
PACKAGE: Final = REPO / "python" / "sglang"
RIGS: Final = REPO / "test" / "rigs"

TREE_FILES: Final = tuple(
    f"mem_cache.{name}"
    for name in ("base_prefix_cache", "cache_init_params", "evict_policy", "radix_cache")
)
"""Files of the prefix tree that stand at SGLang's paths; their folder is `mem_cache.tree`."""

# Modules below `sglang.srt`, lowest layer first. A name places the module and what is in it;
# where several match, the longest decides. Folders of mixed layers are listed file by file.
LAYERS: Final[tuple[tuple[str, ...], ...]] = (
    ("constants", "environ", "utils", "hardware_backend"),
    ("server_args", "arg_groups", "configs", "sampling", "constrained", "function_call", "parser"),
    (
        "distributed",
        "disaggregation.common.bootstrap_*",
        "disaggregation.base",
        "disaggregation.mooncake.utils",
    ),
    ("messages",),
    ("mem_cache.device", "mem_cache.allocator"),
    ("disaggregation.control", "disaggregation.common"),
    ("mem_cache.host",),
    ("mem_cache.storage",),
    ("mem_cache.tree", *TREE_FILES),
    ("mem_cache.hybrid_cache",),
    ("mem_cache.l2",),
    ("mem_cache.l3",),
    # The caches, which join tree and tiers; and faces: names of bodies in the rooms above, under
    # the paths where readers look for them.
    ("mem_cache", "managers.cache_controller"),
    ("model_executor.pool_sizing",),
    ("layers",),
    ("models", "model_loader"),
    (
        "model_executor.model_runner",
        "model_executor.cuda_graph_runner",
        "model_executor.extend_graph_runner",
        "model_executor.graph_capture",
        "model_executor.expert_ranks",
        "model_executor.grouped_runner",
        "model_executor.runner_config",
        "model_executor.warm_up",
    ),
    ("speculative",),
    (
        "managers.scheduler.requests",
        "managers.scheduler.verification",
        "managers.scheduler.batch",
        "managers.scheduler.launched_step",
        "managers.scheduler.policy",
    ),
    (
        "managers.scheduler",
        "managers.tokenizer",
        "managers.detokenizer",
        "observability",
        "disaggregation",
        "disaggregation.common.conn",
        "disaggregation.common.prefill_*",
        "disaggregation.common.shard_read",
    ),
    # Faces.
    ("managers",),
    ("process",),
    ("entrypoints",),
)
OUTSIDE: Final = len(LAYERS)
"""Layer of what the package has outside `sglang.srt`: entry points and benchmarks."""
ABOVE: Final = OUTSIDE + 1
"""Layer of the tests' rigs: nothing that is installed may need them."""


TOP_FOLDERS: Final = (
    *("constants", "environ", "utils", "hardware_backend"),
    *("function_call", "constrained", "parser", "sampling", "arg_groups", "server_args", "configs"),
    *("distributed", "messages", "observability", "mem_cache"),
    *("layers", "models", "model_loader", "model_executor", "speculative"),
    *("managers", "disaggregation", "process", "entrypoints"),
)
"""Modules and folders directly in `sglang.srt`, lowest first. Imports go down, for types too."""

TYPE_CIRCLES: Final[tuple[frozenset[str], ...]] = ()
"""Folders that import each other if imports for types alone count. A circle may leave this list or
lose a folder; none may join it."""

FILE_TYPE_CIRCLES: Final[tuple[frozenset[str], ...]] = ()
"""The same for files."""

MAX_FILES: Final = 20
MAX_LINES: Final = 499


def layer_of(module: str) -> int | None:
    """Layer of a dotted module name, or None if the map does not place the module."""
    if not module.startswith("sglang.srt."):
        return ABOVE if module.startswith("rigs.") else OUTSIDE
    name = module.removeprefix("sglang.srt.")
    places = [
        (len(pattern), layer)
        for layer, patterns in enumerate(LAYERS)
        for pattern in patterns
        if fnmatchcase(name, pattern) or name.startswith(f"{pattern}.")
    ]
    return max(places)[1] if places else None


def read_modules(package: Path) -> dict[str, ast.Module]:
    """Dotted name to syntax tree of every Python file in `package`; a package by its own name."""
    modules = {}
    for path in sorted(package.rglob("*.py")):
        parts = list(path.relative_to(package.parent).with_suffix("").parts)
        if parts[-1] == "__init__":
            parts.pop()
        modules[".".join(parts)] = ast.parse(path.read_text(encoding="utf-8"), str(path))
    return modules


def _is_type_checking(test: ast.expr) -> bool:
    return ast.unparse(test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def _import_nodes(node: ast.AST, *, for_types: bool) -> Iterator[ast.Import | ast.ImportFrom]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child
        elif isinstance(child, ast.If) and _is_type_checking(child.test) and not for_types:
            for other in child.orelse:
                yield from _import_nodes(
                    ast.Module(body=[other], type_ignores=[]), for_types=for_types
                )
        else:
            yield from _import_nodes(child, for_types=for_types)


def imports_of(
    module: str, modules: Mapping[str, ast.Module], *, for_types: bool = False
) -> set[str]:
    """Modules of ours that `module` imports: the file that a name comes from, not its package.

    Args:
        for_types: Count imports for the type checker too.
    """
    found = set()
    for node in _import_nodes(modules[module], for_types=for_types):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name in modules}
            continue
        assert node.level == 0, f"{module}, line {node.lineno}: write the whole module name"
        base = node.module or ""
        for alias in node.names:
            inner = f"{base}.{alias.name}"
            found |= {name for name in (inner if inner in modules else base,) if name in modules}
    return found


def find_violations(modules: Mapping[str, ast.Module]) -> list[str]:
    """One line for each file without a place and each import that goes upwards."""
    lines = []
    for module, tree in modules.items():
        layer = layer_of(module)
        if layer is None:
            if not all(isinstance(node, ast.Expr) for node in tree.body):
                lines.append(f"{module} is in no layer: place it in LAYERS")
            continue
        for target in sorted(imports_of(module, modules)):
            above = layer_of(target)
            if above is not None and above > layer:
                lines.append(f"{module} (layer {layer}) imports {target} (layer {above})")
    return lines


def find_cycle(modules: Mapping[str, ast.Module]) -> list[str]:
    """The modules of one import cycle, in order, or nothing."""
    graph = {module: imports_of(module, modules) for module in modules}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


@pytest.fixture(scope="module")
def modules() -> dict[str, ast.Module]:
    found, rigs = read_modules(PACKAGE), read_modules(RIGS)
    assert len(found) > 100 and len(rigs) > 50
    return found | rigs


def test_every_file_imports_its_layer_or_a_lower_one(modules: dict[str, ast.Module]) -> None:
    violations = find_violations(modules)
    assert not violations, "\n".join(violations)


def test_there_is_no_import_cycle(modules: dict[str, ast.Module]) -> None:
    cycle = find_cycle(modules)
    assert not cycle, " -> ".join(cycle)


def test_files_of_prefill_and_decode_do_not_know_each_other_mutually(
    modules: dict[str, ast.Module],
) -> None:
    """Imports for types count too."""
    files = [name for name in modules if name.startswith("sglang.srt.disaggregation.")]
    assert len(files) > 20
    graph = {name: imports_of(name, modules, for_types=True) & set(files) for name in files}
    graphlib.TopologicalSorter(graph).prepare()


def test_the_controller_knows_no_manager_no_tree_and_no_tier(
    modules: dict[str, ast.Module],
) -> None:
    imported = imports_of("sglang.srt.mem_cache.l2.cache_controller", modules)
    assert not [m for m in imported if m.startswith("sglang.srt.managers.")]
    assert not [m for m in imported if m.endswith(("radix_cache", "prefix_tree"))]
    assert not [m for m in imported if ".mem_cache.l3" in m]


def folder_of(module: str) -> str:
    """The folder of a module of `sglang.srt`; files that lie flat in it count by themselves."""
    name = module.removeprefix("sglang.srt.")
    if name in TREE_FILES:
        return "mem_cache.tree"
    is_package = (PACKAGE.parent / module.replace(".", "/")).is_dir()
    return name if is_package else name.rsplit(".", 1)[0]


def folder_graph(
    modules: Mapping[str, ast.Module], *, for_types: bool = False
) -> dict[str, set[str]]:
    """The folders of `sglang.srt`, each with the other folders that its files import."""
    graph: dict[str, set[str]] = {}
    for module in modules:
        if module.startswith("sglang.srt."):
            targets = {
                folder_of(target)
                for target in imports_of(module, modules, for_types=for_types)
                if target.startswith("sglang.srt.")
            }
            graph.setdefault(folder_of(module), set()).update(targets - {folder_of(module)})
    return graph


def top_folder_of(module: str) -> str:
    """The folder in `sglang.srt` that has the module; a file that lies flat there, by itself."""
    return module.removeprefix("sglang.srt.").split(".")[0]


def find_upward(modules: Mapping[str, ast.Module]) -> list[str]:
    """One line for each import between top folders that goes upwards, for types or not."""
    order = {name: place for place, name in enumerate(TOP_FOLDERS)}
    return [
        f"{module} imports {target}"
        for module in modules
        for target in sorted(imports_of(module, modules, for_types=True))
        if module.startswith("sglang.srt.") and target.startswith("sglang.srt.")
        if order[top_folder_of(target)] > order[top_folder_of(module)]
    ]


def find_folder_cycle(modules: Mapping[str, ast.Module]) -> list[str]:
    """The folders of `sglang.srt` in one cycle of imports, in order, or nothing."""
    try:
        graphlib.TopologicalSorter(folder_graph(modules)).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def find_circles(graph: Mapping[str, set[str]]) -> set[frozenset[str]]:
    """The largest sets of names that all import each other, directly or not."""
    reach: dict[str, set[str]] = {}
    for start in graph:
        found, stack = set[str](), [start]
        while stack:
            new = graph.get(stack.pop(), set()) - found
            found |= new
            stack.extend(new)
        reach[start] = found
    circles = {
        frozenset(other for other in reach[name] if name in reach.get(other, ())) for name in graph
    }
    return circles - {frozenset()}


def find_type_circles(modules: Mapping[str, ast.Module]) -> set[frozenset[str]]:
    """The circles of folders if imports for types count."""
    return find_circles(folder_graph(modules, for_types=True))


def find_file_type_circles(modules: Mapping[str, ast.Module]) -> set[frozenset[str]]:
    """The circles of files if imports for types count."""
    return find_circles(
        {module: imports_of(module, modules, for_types=True) - {module} for module in modules}
    )


def test_there_is_no_cycle_between_folders(modules: dict[str, ast.Module]) -> None:
    cycle = find_folder_cycle(modules)
    assert not cycle, " -> ".join(cycle)


def test_no_top_folder_imports_a_higher_one_not_even_for_types(
    modules: dict[str, ast.Module],
) -> None:
    upward = find_upward(modules)
    assert not upward, "\n".join(upward)


def test_imports_for_types_close_no_other_circle_than_the_known(
    modules: dict[str, ast.Module],
) -> None:
    check_circles(find_type_circles(modules), TYPE_CIRCLES, "TYPE_CIRCLES")


def test_files_import_each_other_for_types_in_no_other_circle_than_the_known(
    modules: dict[str, ast.Module],
) -> None:
    check_circles(find_file_type_circles(modules), FILE_TYPE_CIRCLES, "FILE_TYPE_CIRCLES")


def check_circles(
    circles: set[frozenset[str]], known: tuple[frozenset[str], ...], name: str
) -> None:
    """Assert that `circles` are those `known`, the value of the constant `name`."""
    new = [sorted(one) for one in circles if not any(one <= old for old in known)]
    assert not new, f"these import each other for types: {new}"
    ended = [sorted(old) for old in known if old not in circles]
    assert not ended, f"these circles have ended or shrunk, shorten {name}: {ended}"


def test_a_folder_has_about_twenty_files_at_most() -> None:
    counts = {
        str(folder.relative_to(REPO)): len([f for f in folder.glob("*.py") if f.stem != "__init__"])
        for root in (PACKAGE, REPO / "test")
        for folder in root.rglob("*")
        if folder.is_dir()
    }
    full = {folder: count for folder, count in counts.items() if count > MAX_FILES}
    assert not full, f"more than {MAX_FILES} files: {full}"
    assert len(list((PACKAGE / "srt/mem_cache").glob("*.py"))) <= 20


def test_no_file_is_too_long() -> None:
    folders = [REPO / name for name in ("python", "test", "benchmark", "scripts")]
    paths = [path for folder in folders for path in folder.rglob("*.py")]
    assert len(paths) > 500
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in paths}
    long = {path.name: length for path, length in lengths.items() if length > MAX_LINES}
    assert not long, f"more than {MAX_LINES} lines: {long}"


def test_a_cycle_between_folders_is_found() -> None:
    sources = tree(layers__linear="import sglang.srt.utils.a", utils__a="", utils__b="")
    assert not find_folder_cycle(sources)
    sources |= tree(utils__b="import sglang.srt.layers.norm", layers__norm="")
    assert set(find_folder_cycle(sources)) == {"layers", "utils"}


def test_a_circle_of_types_is_found() -> None:
    typed = "if TYPE_CHECKING:\n    from sglang.srt.layers.norm import Norm"
    sources = tree(utils__a=typed, layers__norm="import sglang.srt.utils.b", utils__b="")
    assert not find_folder_cycle(sources)
    assert find_type_circles(sources) == {frozenset({"layers", "utils"})}


def test_a_circle_of_files_for_types_is_found() -> None:
    typed = "if TYPE_CHECKING:\n    from sglang.srt.utils.b import B"
    sources = tree(
        utils__a=typed, utils__b="def f():\n    import sglang.srt.utils.a", utils__c=typed
    )
    assert not find_cycle(sources)
    assert find_file_type_circles(sources) == {
        frozenset({"sglang.srt.utils.a", "sglang.srt.utils.b"})
    }


@pytest.mark.parametrize("circles", [{frozenset("ab"), frozenset("cd")}, set[frozenset[str]]()])
def test_a_circle_may_neither_join_the_known_nor_stay_there_when_it_has_ended(
    circles: set[frozenset[str]],
) -> None:
    known = (frozenset("ab"),)
    check_circles(set(known), known, "KNOWN")
    with pytest.raises(AssertionError):
        check_circles(circles, known, "KNOWN")


def tree(**sources: str) -> dict[str, ast.Module]:
    """Modules of `sglang.srt`, named with `__` for a dot."""
    return {f"sglang.srt.{k.replace('__', '.')}": ast.parse(v) for k, v in sources.items()}


@pytest.mark.parametrize(
    "source",
    [
        "import sglang.srt.layers.linear",
        "from sglang.srt.layers import linear",
        "from sglang.srt.layers.linear import Linear",
        "def f():\n    if x:\n        from sglang.srt.layers import linear",
        "try:\n    pass\nfinally:\n    import sglang.srt.layers.linear",
        "if TYPE_CHECKING:\n    pass\nelse:\n    import sglang.srt.layers.linear",
    ],
)
def test_an_upward_import_is_found_wherever_it_stands(source: str) -> None:
    (line,) = find_violations(tree(mem_cache__pool=source, layers__linear=""))
    low, high = (layer_of(f"sglang.srt.{name}") for name in ("mem_cache.pool", "layers.linear"))
    assert line == (
        f"sglang.srt.mem_cache.pool (layer {low}) imports sglang.srt.layers.linear (layer {high})"
    )


def test_imports_for_the_type_checker_may_go_upwards() -> None:
    source = "if TYPE_CHECKING:\n    from sglang.srt.layers.linear import Linear"
    assert not find_violations(tree(mem_cache__pool=source, layers__linear=""))


def test_imports_for_types_that_go_upwards_between_top_folders_are_found() -> None:
    typed = "if TYPE_CHECKING:\n    import sglang.srt."
    sources = tree(
        mem_cache__pool=f"{typed}layers.linear",
        layers__linear=f"{typed}mem_cache.tree.nodes",
        mem_cache__tree__nodes=f"{typed}mem_cache.pool",
    )
    assert find_upward(sources) == ["sglang.srt.mem_cache.pool imports sglang.srt.layers.linear"]


def test_a_file_without_a_place_is_found_but_an_empty_package_is_not() -> None:
    assert find_violations(tree(new__thing="x = 1", new="'''New.'''")) == [
        "sglang.srt.new.thing is in no layer: place it in LAYERS"
    ]


def test_the_longest_name_decides() -> None:
    names = (
        "mem_cache.tree.tree_node",
        "managers.cache_controller",
        "managers.scheduler.scheduler",
    )
    layers = [layer_of(f"sglang.srt.{name}") or 0 for name in names]
    assert layers == sorted(set(layers))
    assert layer_of("sglang.srt.mem_cachex") is None
    assert layer_of("sglang.launch_server") == OUTSIDE


def test_the_package_may_not_import_the_rigs() -> None:
    sources = {name: ast.parse("import rigs.a") for name in ("sglang.test.test_utils", "rigs.b")}
    (line,) = find_violations(sources | {"rigs.a": ast.parse("import sglang.test.test_utils")})
    assert line.startswith("sglang.test.test_utils (layer ") and "imports rigs.a" in line


def test_a_cycle_is_found() -> None:
    cycle = find_cycle(
        tree(
            utils__a="from sglang.srt.utils.b import x",
            utils__b="def f():\n    from sglang.srt.utils import a",
        )
    )
    assert set(cycle) == {"sglang.srt.utils.a", "sglang.srt.utils.b"}
