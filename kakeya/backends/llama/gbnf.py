"""The grammars of `kakeya.text.grammar` in GBNF, as llama.cpp reads grammars. Pure.

Only what `answer_grammar` writes is read: rules of literals, ids of tokens, JSON of a schema, and
text without a mark. Law: what the result accepts, the grammar accepts.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator

from kakeya.backends.llama.json_gbnf import SchemaRules, quoted
from kakeya.core.errors import Unsupported

_HEADER = "%llguidance {}"
_FREE = re.compile(r"/\(\?s:\.\*\)/ & ~/\(\?s:\.\*\)(.*)\(\?s:\.\*\)/", re.DOTALL)
_PIECE = re.compile(
    r"\s*(?:(<\[\d+\]>)|(/(?:[^/\\]|\\.)*/)|([A-Za-z_][\w]*)|([|()*?])|(%json )|(\"))"
)
_PATTERNS = {"/[0-9]{1,3}/": "[0-9]{1,3}", r"/\n{0,2}/": r'"\n"{0,2}'}
_DECODER = json.JSONDecoder()


@functools.lru_cache(maxsize=64)
def gbnf(grammar: str) -> str:
    """Write a grammar in GBNF. Raises Unsupported for what has no words there, or not here."""
    header, *lines = grammar.split("\n")
    rules = [line.partition(": ") for line in lines]
    if header != _HEADER or not all(between for _, between, _ in rules):
        raise _cannot(grammar)
    schemas = SchemaRules()
    written: list[str] = []
    for name, _, body in rules:
        free = _FREE.fullmatch(body)
        if free is not None:
            written += _without(_rule_name(name), re.sub(r"\\(.)", r"\1", free[1], flags=re.DOTALL))
        else:
            written.append(f"{_rule_name(name)} ::= {' '.join(_pieces(body, schemas))}")
    written += [f"{name} ::= {body}" for name, body in schemas.rules.items()]
    return "\n".join(written)


def _pieces(body: str, schemas: SchemaRules) -> Iterator[str]:
    at, body = 0, body.rstrip()
    while at < len(body):
        found = _PIECE.match(body, at)
        if found is None:
            raise _cannot(body[at:])
        token, pattern, name, sign, schema, quote = found.groups()
        at = found.end()
        if schema or quote:
            value, at = _DECODER.raw_decode(body, at - bool(quote))
            yield schemas.add(value) if schema else quoted(value)
        elif pattern:
            if pattern not in _PATTERNS:
                raise _cannot(pattern)
            yield _PATTERNS[pattern]
        else:
            yield token or sign or _rule_name(name)


def _rule_name(name: str) -> str:
    if name.isupper():
        return f"text-{name.lower()}"
    return "root" if name == "start" else name.replace("_", "-")


def _without(name: str, mark: str) -> Iterator[str]:
    """The rules of any text that does not hold a mark: one for each beginning of it that the text
    may end with."""
    letters = sorted(set(mark))
    for held in range(len(mark)):
        ways = [
            f"{quoted(letter)} {_state(name, follows)}"
            for letter in letters
            if (follows := _held(mark, mark[:held] + letter)) < len(mark)
        ]
        others = "".join(f"\\x{ord(one):02x}" if ord(one) < 256 else one for one in letters)
        ways.insert(0, f"[^{others}] {name}")
        yield f"{_state(name, held)} ::= ({' | '.join(ways)})?"


def _state(name: str, held: int) -> str:
    return f"{name}-{held}" if held else name


def _held(mark: str, text: str) -> int:
    """The length of the longest beginning of a mark that a text ends with."""
    return next(
        size for size in range(min(len(mark), len(text)), -1, -1) if text.endswith(mark[:size])
    )


def _cannot(what: str) -> Unsupported:
    return Unsupported(
        f"an answer of a GGUF model cannot be forced into this form: {what[:80]!r}; leave out "
        "tool_choice, strict or the schema"
    )
