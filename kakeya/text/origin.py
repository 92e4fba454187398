"""Texts that know who wrote each of their characters: a chat template, or a caller.

A special token in a prompt is one only where the template wrote it. So templates run in an
environment in which their own literals are `Traced`, and what is made of these stays so: joined,
cut, trimmed. An operation that is not followed here gives a plain `str`, which counts as a
caller's: it may cost a template one of its marks, and never gives one to a caller.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Self, SupportsIndex

import jinja2
import jinja2.ext
import jinja2.sandbox
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.filters import do_join
from jinja2.nodes import EvalContext
from jinja2.parser import Parser
from jinja2.runtime import Context

OWN, SAID = "o", "s"
"""Of a character in `Traced.origin`: the template's own, or said by a caller."""


class Traced(str):
    """A text with the origin of each character; all a caller's where nothing else is told."""

    __slots__ = ("origin",)
    origin: str

    def __new__(cls, text: object = "", origin: str | None = None) -> Self:
        """Make a text; without an origin it is a caller's."""
        made = super().__new__(cls, text)
        made.origin = SAID * len(made) if origin is None else origin
        return made

    @classmethod
    def own(cls, text: str) -> Self:
        """A text of the template's."""
        return cls(text, OWN * len(text))

    @classmethod
    def given(cls, text: object) -> Traced:
        """A text as it is, or a caller's."""
        return text if isinstance(text, Traced) else cls(text)

    def __str__(self) -> str:
        return self

    def __add__(self, other: str) -> Traced:
        return joined((self, other)) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: str) -> Traced:
        return joined((other, self)) if isinstance(other, str) else NotImplemented

    def __mul__(self, times: SupportsIndex) -> Traced:
        return Traced(super().__mul__(times), self.origin * times)

    __rmul__ = __mul__

    def __getitem__(self, key: SupportsIndex | slice) -> Traced:
        return Traced(super().__getitem__(key), self.origin[key])

    def join(self, parts: Iterable[str]) -> Traced:
        """Join texts with this one between them."""
        between: list[str] = []
        for part in parts:
            between += (self, part)
        return joined(between[1:])

    def lstrip(self, chars: str | None = None, /) -> Traced:
        """Trim at the beginning."""
        return self[len(self) - len(super().lstrip(chars)) :]

    def rstrip(self, chars: str | None = None, /) -> Traced:
        """Trim at the end."""
        return self[: len(super().rstrip(chars))]

    def strip(self, chars: str | None = None, /) -> Traced:
        """Trim at both ends."""
        return self.lstrip(chars).rstrip(chars)


def joined(parts: Iterable[object]) -> Traced:
    """Join texts; an exact `str` is a caller's."""
    traced = [Traced.given(part) for part in parts]
    return Traced("".join(traced), "".join(part.origin for part in traced))


class _Generator(CodeGenerator):
    """Writes the literals of a template, and its `~`, so that origins are kept."""

    def _output_const_repr(self, group: Iterable[object]) -> str:
        return f"environment.own({''.join(map(str, group))!r})"

    def visit_Const(self, node: nodes.Const, frame: Frame) -> None:
        if not isinstance(node.value, str):
            super().visit_Const(node, frame)
            return
        self.write(f"environment.own({node.value!r})")

    def visit_TemplateData(self, node: nodes.TemplateData, frame: Frame) -> None:
        self.write(f"environment.own({node.data!r})")

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.concat((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks assistant text for training; here it only shows its content."""

    tags = {"generation"}  # noqa: RUF012 - the name and shape that jinja2 asks for

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class TracingEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """A sandbox whose templates render to `Traced`."""

    code_generator_class = _Generator
    concat = staticmethod(joined)
    own: Callable[[str], Traced] = staticmethod(Traced.own)

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            # Folding constants would make plain texts of literals.
            optimized=False,
            finalize=_finalize,
            extensions=["jinja2.ext.loopcontrols", _GenerationTag],
        )
        self.filters["join"] = _join


@jinja2.pass_context
def _finalize(context: Context, value: object) -> Traced:
    """Give a value that is written its origin. The context keeps jinja2 from doing it early."""
    return Traced.given(value)


@jinja2.pass_eval_context
def _join(
    context: EvalContext, value: Iterable[object], d: str = "", attribute: str | int | None = None
) -> str:
    if attribute is not None:
        return str(do_join(context, value, d, attribute))
    return joined((d,)).join(str(part) for part in value)
