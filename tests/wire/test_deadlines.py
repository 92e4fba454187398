"""Every call that leaves this package has a deadline: read off its source."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import kakeya
from tests.wire.servers import methods

PACKAGE = Path(kakeya.__file__).parent
METHODS = {method.name for method in methods()}
MULTICALLABLES = {"unary_unary", "unary_stream", "stream_unary", "stream_stream"}
ENDLESS: frozenset[str] = frozenset(
    {"backends/engine/adapter_stream.py:LoadAdapters", "fleet/gossip/watching.py:Watch"}
)
"""`file:method` of streams that rightly have no deadline: each load has its own, and the first
answer to a watch."""


def outgoing(source: str) -> list[tuple[int, str, bool]]:
    """Line, method and whether a deadline is given, of each call over a channel.

    Such a call is `stub.Method(...)`, `stub.Method.future(...)`, or a call of what
    `channel.unary_unary(...)` and its kin returned, named or not.
    """
    tree = ast.parse(source)
    made = {
        target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign | ast.AnnAssign) and _makes_multicallable(node.value)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name)
    }
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = _called_method(node.func, made)
        if name:
            has_deadline = any(keyword.arg == "timeout" for keyword in node.keywords)
            found.append((node.lineno, name, has_deadline))
    return found


def _makes_multicallable(node: ast.expr | None) -> bool:
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in MULTICALLABLES
    )


def _called_method(called: ast.expr, made: set[str]) -> str:
    if isinstance(called, ast.Attribute) and called.attr in ("future", "with_call"):
        called = called.value
    if isinstance(called, ast.Attribute) and called.attr in METHODS and _is_stub(called.value):
        return called.attr
    if isinstance(called, ast.Name) and called.id in made:
        return called.id
    return "a method" if _makes_multicallable(called) else ""


def _is_stub(owner: ast.expr) -> bool:
    """A stub by its name, or made on the spot: `FooServiceStub(channel).Method(...)`."""
    if isinstance(owner, ast.Call):
        owner = owner.func
    name = owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", "")
    return "stub" in name.lower()


def test_no_call_of_this_package_waits_for_ever() -> None:
    calls = []
    for path in sorted(PACKAGE.rglob("*.py")):
        source = path.read_text()
        # Without one of these words no call is `outgoing`, and parsing takes most of the time.
        if "v1" in path.parts or not re.search(r"stub|(unary|stream)_(unary|stream)", source, re.I):
            continue
        file = str(path.relative_to(PACKAGE))
        calls += [(file, line, name, bound) for line, name, bound in outgoing(source)]
    assert len(calls) >= 10, "the calls that are known to exist are seen"
    unbounded = [
        f"{file}:{line} {name}"
        for file, line, name, bound in calls
        if not bound and f"{file}:{name}" not in ENDLESS
    ]
    assert unbounded == []


@pytest.mark.parametrize(
    "source",
    [
        "await stub.Generate(request)",
        "self._stub.ProposeBlock.future(request)",
        "await RuntimeServiceStub(channel).CreateSession(request)",
        "call = channel.unary_unary(path)\nawait call(request)",
        "call: Call = channel.unary_unary(path)\nawait call(request)",
        "await channel.unary_stream(path)(request)",
    ],
)
def test_a_call_without_a_deadline_would_be_found(source: str) -> None:
    """The control: each form of a call is seen, and seen to be bounded once it is."""
    assert [bound for _, _, bound in outgoing(source)] == [False]
    bounded = source.replace("(request)", "(request, timeout=1)")
    assert [bound for _, _, bound in outgoing(bounded)] == [True]
