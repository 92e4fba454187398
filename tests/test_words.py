"""Words of the house: a public class has a name of its own, and a sentence has a noun as subject.

A reader cannot tell whether "who" is a request, a client, a process or a model.
"""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
PRONOUN = re.compile(
    r"\b(?:who|whoever|whom|whose|somebody|nobody|anybody|everybody|someone|anyone|everyone)\b",
    re.IGNORECASE,
)
WORD = re.compile(r"[a-z][\w'-]*", re.IGNORECASE)
MOST_PRONOUNS = 0.5
"""Per 1,000 words of docstrings, over the whole package."""


@cache
def trees() -> dict[Path, ast.Module]:
    """Of all sources that a person wrote; parsed here, as all workers read this file."""
    return {
        path.relative_to(ROOT): ast.parse(path.read_text("utf-8"))
        for path in sorted((ROOT / "kakeya").rglob("*.py"))
        if "v1" not in path.parts
    }


def test_a_public_class_has_a_name_of_its_own() -> None:
    files = defaultdict(list)
    for path, tree in trees().items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                files[node.name].append(str(path))
    assert {name: found for name, found in files.items() if len(found) > 1} == {}


def test_sentences_have_nouns_as_subjects() -> None:
    words, pronouns = 0, Counter[str]()
    for path, tree in trees().items():
        for text in docstrings(tree):
            words += len(WORD.findall(text))
            pronouns[str(path)] += len(PRONOUN.findall(text))
    rate = 1000 * pronouns.total() / words
    worst = ", ".join(f"{path} {count}" for path, count in pronouns.most_common(10))
    assert rate <= MOST_PRONOUNS, f"{rate:.1f} pronouns per 1,000 words, most in {worst}"


def docstrings(tree: ast.Module) -> list[str]:
    """Those of modules, classes, functions and of single fields."""
    return [
        line.value.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        for line in node.body
        if isinstance(line, ast.Expr)
        and isinstance(line.value, ast.Constant)
        and isinstance(line.value.value, str)
    ]
