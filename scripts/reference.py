"""A hook of mkdocs: makes the reference from the code, and names files outside docs/ as such.

    cli.md       all commands and flags, by their parsers
    settings.md  all settings, by the classes that read them
    http.md      the OpenAPI document of a node that is started for it
    protos.md    the files of proto/
    metrics.md   all figures, by the lines that make them
    errors.md    the tree of errors, with the statuses of HTTP and gRPC

None of these files lies in docs/: each build makes them anew.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import io
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from pathlib import Path
from textwrap import dedent
from typing import Any
from urllib.request import urlopen

from kakeya.backends.registry import backend_kinds, settings_of_kind
from kakeya.cli.main import parser
from kakeya.config.config import SETTINGS
from kakeya.config.reader import parse_flags, settings_of
from kakeya.core import errors
from kakeya.core.settings import Setting
from kakeya.core.units import MIB
from kakeya.dispatch.profiles import ProfileSpec
from kakeya.dispatch.tasks import TaskSpec
from kakeya.gateway import app as gateway
from kakeya.gateway.http.edge import STATUS_BY_ERROR as HTTP_STATUSES
from kakeya.generation.config import ModelTable
from kakeya.wire.status import STATUS_BY_ERROR as GRPC_STATUSES

ROOT = Path(__file__).parents[1]
COMMAND = [sys.executable, "-m", "kakeya.node.daemon", "--proposer", "ngram", "--no-mdns"]
MADE = "Made from the code when this site was built."
FIGURES = {"gauge", "counter", "histogram"}


def on_files(files: Any, config: Any) -> Any:  # noqa: ANN401 - types of mkdocs
    """Add the pages of the reference to those of docs/."""
    from mkdocs.structure.files import File

    os.environ |= {"COLUMNS": "100", "NO_COLOR": "1"}
    for name, (title, lines) in PAGES.items():
        text = f"# {title}\n\n{MADE}\n\n" + "\n".join(lines()) + "\n"
        files.append(File.generated(config, f"reference/{name}.md", content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: object) -> str:  # noqa: ANN401
    """Write a link to a file outside docs/ as its text and the name of the file."""
    up = "../" * (page.file.src_uri.count("/") + 1)
    pattern = rf"\[([^]]+)\]\({re.escape(up)}(?!\.\./)([^)]+)\)"
    return re.sub(
        pattern,
        lambda found: f"`{found[2]}`" if found[2] in found[1] else f"{found[1]} (`{found[2]}`)",
        markdown,
    )


def commands() -> Iterator[str]:
    yield "## kakeya-node\n"
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
        parse_flags(SETTINGS.values(), ["--help"])
    yield _code(said.getvalue())
    for one in _commands(parser()):
        yield f"## {one.prog}\n\n{_code(one.format_help())}"


def _commands(one: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield one
    for action in one._actions:  # noqa: SLF001 - argparse has no public way
        if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001
            for inner in dict.fromkeys(action.choices.values()):
                yield from _commands(inner)


def settings() -> Iterator[str]:
    yield "What they mean together: [settings](../settings.md). Sizes are in MB.\n"
    tables: dict[str, Iterable[Setting[Any]]] = {
        section: list(found)
        for section, found in groupby(
            sorted(SETTINGS.values(), key=lambda one: one.key), lambda one: one.key.split(".")[0]
        )
    }
    named: dict[str, type[Any]] = {"models": ModelTable, "tasks": TaskSpec, "profiles": ProfileSpec}
    named |= {kind: settings_of_kind(kind) for kind in backend_kinds()}
    tables |= {
        f"{kind}.NAME": list(settings_of(part, f"{kind}.NAME")) for kind, part in named.items()
    }
    for section, found in tables.items():
        yield f"## [{section}]\n"
        names = ("key",) if section.endswith(".NAME") else ("key", "flag", "variable")
        yield from _table(
            (", ".join(names), "default", "meaning"),
            ((_names(one, names), _default(one), one.meaning) for one in found),
        )


def _names(one: Setting[Any], names: tuple[str, ...]) -> str:
    said = [getattr(one, name).removeprefix(one.key.rpartition(".")[0] + ".") for name in names]
    return "<br>".join(f"`{name}`" for name in said if name)


def _default(one: Setting[Any]) -> str:
    match one.default:
        case None | "" | () | Path(parts=()):
            return ""
        case bool() as value:
            return f"`{str(value).lower()}`"
        case int() as value if one.key.endswith("_mb"):
            return f"`{value // MIB}`"
        case float() as value:
            return f"`{value:g}`"
        case tuple() as values:
            return f"`{', '.join(map(str, values))}`"
        case value:
            return f"`{value}`"


def paths() -> Iterator[str]:
    yield "Rules for all of them: [HTTP](../http.md). A node tells this itself: `/openapi.json`.\n"
    yield _code(dedent((gateway.__doc__ or "").partition("\n\n")[2].rpartition("\n\n")[0]))
    for path, methods in _openapi()["paths"].items():
        yield f"## {path}\n"
        for method, operation in methods.items():
            content = operation.get("requestBody", {}).get("content", {})
            schema = content.get("application/json", {}).get("schema", {})
            needed = schema.get("required", ())
            fields = [
                f"**`{name}`**" if name in needed else f"`{name}`"
                for name in schema.get("properties", {})
            ]
            answers = operation["responses"]["200"]["content"]
            yield f"`{method.upper()}`, answered as {', '.join(answers)}\n"
            if fields:
                yield f"Fields of its body: {', '.join(fields)}\n"


def _openapi() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--data-dir", folder, "--bind", "127.0.0.1:0", "--http", "127.0.0.1:0"]
        with subprocess.Popen(
            [*COMMAND, *flags], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as node:
            try:
                assert node.stdout is not None
                address = re.search(r"http=(\S+)", node.stdout.readline())
                assert address is not None, "the node did not start: " + node.communicate()[1]
                with urlopen(f"http://{address[1]}/openapi.json") as answer:
                    found: dict[str, Any] = json.load(answer)
                    return found
            finally:
                node.terminate()
                node.communicate()


def protos() -> Iterator[str]:
    for file in sorted((ROOT / "proto/kakeya/v1").glob("*.proto")):
        yield f"## {file.name}\n\n{_code(file.read_text(), 'proto')}"


def metrics() -> Iterator[str]:
    yield "`GET /metrics` gives them in Prometheus' format, which adds `_total` to counters.\n"
    yield from _table(("name", "kind", "labels", "meaning"), sorted(set(_figures())))


def _figures() -> Iterator[tuple[str, str, str, str]]:
    for file in (ROOT / "kakeya").rglob("*.py"):
        nodes = list(ast.walk(ast.parse(file.read_text())))
        said = [(one.lineno, one) for one in nodes if isinstance(one, ast.Assign)]
        for node in nodes:
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
                continue
            kind = node.func.id.lower()
            if kind not in FIGURES or len(node.args) < 2:
                continue
            spelled, meaning = (_text(one, said) for one in node.args[:2])
            name, *labels = re.findall(r"\w+", spelled)
            assert name.startswith("kakeya_"), f"{file}: {name}"
            if node.func.id[0].isupper() and len(node.args) > 2:  # prometheus_client's own
                labels = re.findall(r"\w+", ast.unparse(node.args[2]))
            yield f"`{name}`", kind, ", ".join(labels), meaning


def _text(node: ast.expr, said: list[tuple[int, ast.Assign]]) -> str:
    """A text, or the one that its name was given last before it."""
    if isinstance(node, ast.Name):
        *_, node = (
            one.value
            for line, one in sorted(said, key=lambda pair: pair[0])
            if line < node.lineno and ast.unparse(one.targets[0]) == node.id
        )
    return str(ast.literal_eval(node))


def error_tree() -> Iterator[str]:
    yield "A message says what was wrong, with which value, and what would be right.\n"
    kinds = [
        one
        for one in vars(errors).values()
        if isinstance(one, type) and issubclass(one, errors.KakeyaError)
    ]
    yield from _table(
        ("error", "code", "HTTP", "gRPC", "again later", "meaning"),
        (
            (
                f"`{kind.__name__}`",
                f"`{kind.code}`",
                str(_nearest(kind, HTTP_STATUSES, 500)),
                getattr(_nearest(kind, GRPC_STATUSES, None), "name", "INTERNAL"),
                "yes" if kind.retryable else "",
                " ".join((kind.__doc__ or "").partition("\n\n")[0].split()),
            )
            for kind in kinds
        ),
    )


def _nearest(kind: type[Any], statuses: dict[type[Any], Any], else_: object) -> object:
    return next((statuses[one] for one in kind.__mro__ if one in statuses), else_)


def _code(text: str, language: str = "text") -> str:
    return f"```{language}\n{text.rstrip()}\n```\n"


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |\n|{'---|' * len(head)}"
    for row in rows:
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |"
    yield ""


PAGES: dict[str, tuple[str, Callable[[], Iterator[str]]]] = {
    "cli": ("Commands", commands),
    "settings": ("All settings", settings),
    "http": ("HTTP paths", paths),
    "protos": ("gRPC services", protos),
    "metrics": ("Metrics", metrics),
    "errors": ("Errors", error_tree),
}
