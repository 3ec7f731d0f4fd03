"""The shape of the code: small files, short functions, nothing suppressed, dependencies that point one way."""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = ("recipes", "models", "data_prep", "train", "eval")
LIBRARY = sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))
# room -> rooms that it must not import
FORBIDDEN = {
    "recipes": {"models", "data_prep", "train", "eval"},
    "models": {"data_prep", "train", "eval"},
    "data_prep": {"train", "eval"},
    "eval": {"train"},
    "train": set[str](),
}
BROUGHT_BY_TORCH = {"triton"}  # where there is a GPU
HEAVY = {"deepspeed", "wandb", "datasets", "matplotlib", "peft"}
SUPPRESSIONS = re.compile(r"#\s*(type:\s*ignore|noqa|pragma:\s*no\s*cover|pylint:|ruff:)")


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def imported(nodes: list[ast.stmt] | Iterator[ast.AST]) -> set[str]:
    """First parts of the absolute imports among the nodes."""
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.add(node.module.split(".")[0])
    return found


@pytest.mark.parametrize("path", LIBRARY, ids=name)
def test_library_file_is_small_and_its_functions_short(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= 400
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            assert lines <= 80, f"{node.name} has {lines} lines"
            arguments = len(node.args.args) + len(node.args.posonlyargs) + len(node.args.kwonlyargs)
            kernel = any("triton" in ast.unparse(d) for d in node.decorator_list)  # takes a pointer a tensor
            assert arguments <= 12 or kernel, f"{node.name} takes {arguments} arguments"


@pytest.mark.parametrize("path", LIBRARY, ids=name)
def test_rooms_know_only_what_they_may(path: Path) -> None:
    room = path.relative_to(ROOT).parts[0]
    tree = ast.parse(path.read_text())
    assert not imported(ast.walk(tree)) & FORBIDDEN[room]
    assert not imported(tree.body) & HEAVY, "heavy packages are imported where they are used"


@pytest.mark.parametrize("path", LIBRARY, ids=name)
def test_no_pickle_is_loaded(path: Path) -> None:
    tree = ast.parse(path.read_text())
    assert not imported(ast.walk(tree)) & {"pickle", "dill", "joblib", "shelve"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
            assert {"weights_only": "True"}.items() <= {k.arg: ast.unparse(k.value) for k in node.keywords}.items()


def test_nothing_is_suppressed_or_skipped() -> None:
    for path in [*LIBRARY, *(ROOT / "tests").rglob("*.py")]:
        text = path.read_text()
        assert not SUPPRESSIONS.search(text), name(path)
        if path != Path(__file__):
            assert not re.search(r"pytest\.(mark\.)?(skip|xfail)", text), name(path)


def test_every_foreign_import_is_a_declared_dependency_that_earns_its_place() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {re.split(r"[<>=\[]", line)[0].replace("-", "_") for line in project["dependencies"]}
    used = set().union(*(imported(ast.walk(ast.parse(path.read_text()))) for path in LIBRARY))
    assert used - set(sys.stdlib_module_names) - set(ROOMS) - BROUGHT_BY_TORCH <= declared
    page = (ROOT / "docs" / "dependencies.md").read_text()
    assert [d for d in sorted(declared) if f"| {d.replace('_', '-')} |" not in page] == []


def test_every_held_version_lies_in_the_declared_range() -> None:
    from packaging.requirements import Requirement

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ranges = {r.name: r.specifier for r in map(Requirement, project["dependencies"])}
    for line in (ROOT / "constraints-cpu.txt").read_text().splitlines():
        if not line.startswith("#"):
            package, version = line.split("==")
            assert ranges[package].contains(version), line
