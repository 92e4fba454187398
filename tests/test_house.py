"""The house: no circle of files, folders that can be read at once, composition that stays small.

Floors are import-linter's (`scripts/test`); here is what it does not count.
"""

from __future__ import annotations

import ast
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "kakeya"
MOST_FILES, MOST_NODE_FILES = 20, 24
MANY_FILES = 14
"""Above it a folder says why it is one idea."""
MOST_NODE_LINES = 4_000
READING_LIST_LINES = 2_000
FOLDERS = sorted(
    face.parent
    for face in PACKAGE.rglob("__init__.py")
    if face.parent not in (PACKAGE, PACKAGE / "v1")
)


def test_no_file_imports_itself_through_others() -> None:
    graph = grimp.build_graph("kakeya")
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    circles = [circle for circle in _components(imports) if len(circle) > 1]
    assert circles == []


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_folder_has_few_files_and_a_promise(folder: Path) -> None:
    files = [path for path in folder.glob("*.py") if path.name != "__init__.py"]
    assert len(files) <= (MOST_NODE_FILES if folder.name == "node" else MOST_FILES)
    promise = ast.parse((folder / "__init__.py").read_text())
    assert [type(line) for line in promise.body] == [ast.Expr], "a paragraph, and nothing to import"
    paragraph = (ast.get_docstring(promise) or "").replace("\n", " ")
    assert paragraph
    assert len(files) <= MANY_FILES or "one idea" in paragraph


def test_composition_stays_small() -> None:
    lines = sum(len(path.read_text().splitlines()) for path in (PACKAGE / "node").rglob("*.py"))
    assert lines < MOST_NODE_LINES


def test_channels_are_made_in_one_place() -> None:
    """There they are kept from proxies (`wire/channels.py`)."""
    makers = {"insecure_channel", "secure_channel"}
    made_in = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if any(maker in (text := path.read_text()) for maker in makers)
        and makers & {getattr(node, "attr", "") for node in ast.walk(ast.parse(text))}
    }
    assert made_in == {"wire/channels.py"}


def test_tests_mirror_the_tree() -> None:
    strays = [
        folder
        for folder in {path.parent for path in (ROOT / "tests").rglob("test_*.py")}
        if not (PACKAGE / folder.relative_to(ROOT / "tests")).is_dir()
    ]
    assert strays == []


def test_the_reading_list_is_short() -> None:
    text = (ROOT / "README.md").read_text()
    paragraph = text[text.index("hold the idea:") : text.index("The wire is in")]
    named = [PACKAGE / name for name in paragraph.split("`")[1::2] if name.endswith(".py")]
    assert len(named) >= 7
    assert sum(len(path.read_text().splitlines()) for path in named) <= READING_LIST_LINES


def _components(edges: dict[str, set[str]]) -> list[set[str]]:
    """Strongly connected components: the sets of nodes that reach each other (Tarjan)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[set[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in edges[node]:
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            circle = set()
            while not circle or node not in circle:
                circle.add(stack.pop())
            found.append(circle)

    for node in edges:
        if node not in index:
            visit(node)
    return found
