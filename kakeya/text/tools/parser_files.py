"""The families of mlx-lm's `tool_parsers`, read from their files, without importing mlx.

The usual import of one would run `mlx_lm/__init__` and with it mlx. These files need only json and
regex, so they are loaded under a package name of their own. Which family a template belongs to is
told by what it writes around calls (mlx-lm: tokenizer_utils._infer_tool_parser). Where mlx-lm is
not installed, only calls in JSON are read, others stay text, and the log says so.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import logging
import re
import sys
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

from kakeya.core.log import event
from kakeya.text.chat import Tool
from kakeya.text.tools.calls import (
    INDEX,
    Called,
    CallForm,
    ToolFamily,
    called,
    functions_of,
    json_calls,
)
from kakeya.text.tools.thinking import XTML_TOKENS

_log = logging.getLogger(__name__)
_PACKAGE = "kakeya_tool_parsers"
_FAULTS = (
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
    SyntaxError,
)
"""What parsers raise at a text that is no call."""
_LIST = CallForm(opening="[", closing="]", joint=", ")
_KIMI_K2 = CallForm(
    opening="",
    before="<|tool_call_begin|>functions.",
    between=f":{INDEX}<|tool_call_argument_begin|>",
    after="<|tool_call_end|>",
    closing="",
    joint="",
)
_KIMI_K3 = CallForm(
    opening="",
    before='<|open|>call tool="',
    between=f'" index="{INDEX}"<|sep|><|open|>json type="object"<|sep|>',
    after="<|close|>json<|sep|><|close|>call<|sep|>",
    closing="",
    joint="",
)
_ARGS = CallForm(
    opening="", before="", between="[ARGS]", after="", closing="", joint="[TOOL_CALLS]"
)

Told = Callable[[str, Container[str]], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParserFamily:
    """A family that a parser file reads."""

    name: str
    start: str
    end: str
    told: Told
    """Whether a template and a vocabulary are of this family."""
    inner_marks: Sequence[str] = ()
    form: CallForm = field(default_factory=CallForm)
    may_be: Callable[[str], bool] = bool
    """Whether a text may be a call: keeps from a parser what it takes very long over."""
    file: str = ""
    """The parser file, where its name is not the family's."""

    def writes_for(self, template: str, vocabulary: Container[str]) -> bool:
        """As `ToolFamily`."""
        return self.told(template, vocabulary)

    def parse(self, text: str, tools: Sequence[Tool]) -> list[Called]:
        """As `ToolFamily`."""
        try:
            return json_calls(text)
        except ValueError:
            pass
        if not self.may_be(text):
            raise ValueError(f"no call of {self.name}")
        functions = {one.name: one.parameters for one in functions_of(tools)}
        told = [
            {"type": "function", "function": {"name": name, "parameters": parameters}}
            for name, parameters in functions.items()
        ]
        try:
            parsed = _parser(self.file or self.name).parse_tool_call(text, told)
            calls = [called(one) for one in (parsed if isinstance(parsed, list) else [parsed])]
        except _FAULTS as fault:
            raise ValueError(f"no call of {self.name}: {fault}") from fault
        for call in calls:
            # A parser's guess where it finds nothing that it knows.
            if call.name not in functions and list(json.loads(call.arguments)) == ["raw"]:
                raise ValueError(f"no call of {self.name}")
        if not calls:
            raise ValueError(f"no call of {self.name}")
        return calls


def _says(*texts: str) -> Told:
    return lambda template, _: all(text in template for text in texts)


def _either(*tests: Told) -> Told:
    return lambda template, vocabulary: any(test(template, vocabulary) for test in tests)


def _has(*tokens: str) -> Told:
    return lambda _, vocabulary: all(token in vocabulary for token in tokens)


def _mistral(*, has_args: bool) -> Told:
    return lambda template, vocabulary: (
        "[TOOL_CALLS]" in template and ("[ARGS]" in vocabulary) is has_args
    )


def _is_balanced(text: str) -> bool:
    """Whether each brace has its other half; else gemma4's parser tries all ways to pair them."""
    depth = 0
    for brace in re.findall("[{}]", re.sub(r'<\|"\|>.*?<\|"\|>', "", text, flags=re.DOTALL)):
        depth += 1 if brace == "{" else -1
        if depth < 0:
            return False
    return depth == 0 and text.count('<|"|>') % 2 == 0


_GLM = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
_LONGCAT = tuple(mark.replace("arg_", "longcat_arg_") for mark in _GLM)
TEMPLATE_FAMILIES: tuple[ToolFamily, ...] = (
    ParserFamily(
        name="minimax_m2",
        start="<minimax:tool_call>",
        end="</minimax:tool_call>",
        told=_says("<minimax:tool_call>"),
    ),
    ParserFamily(
        name="gemma4",
        start="<|tool_call>",
        end="<tool_call|>",
        told=_says("<|tool_call>", "<tool_call|>"),
        inner_marks=('<|"|>',),
        may_be=_is_balanced,
    ),
    ParserFamily(
        name="function_gemma",
        start="<start_function_call>",
        end="<end_function_call>",
        told=_says("<start_function_call>"),
        inner_marks=("<escape>",),
        may_be=lambda text: text.rfind("}") > text.rfind("call:"),
    ),
    ParserFamily(
        name="longcat",
        start="<longcat_tool_call>",
        end="</longcat_tool_call>",
        told=_says("<longcat_tool_call>"),
        inner_marks=_LONGCAT,
    ),
    ParserFamily(
        name="glm47",
        start="<tool_call>",
        end="</tool_call>",
        told=_says("<arg_key>"),
        inner_marks=_GLM,
    ),
    ParserFamily(
        name="pythonic",
        start="<|tool_call_start|>",
        end="<|tool_call_end|>",
        told=_either(_says("<|tool_list_start|>"), _says("<|tool_call_start|>")),
    ),
    ParserFamily(
        name="qwen3_coder",
        start="<tool_call>",
        end="</tool_call>",
        told=_either(_says("<tool_call>\\n<function="), _says("<tool_call>\n<function=")),
    ),
    ParserFamily(
        name="kimi_k2",
        start="<|tool_calls_section_begin|>",
        end="<|tool_calls_section_end|>",
        told=_says("<|tool_calls_section_begin|>"),
        inner_marks=(
            "<|tool_call_begin|>",
            "<|tool_call_argument_begin|>",
            "<|tool_call_end|>",
        ),
        form=_KIMI_K2,
    ),
    ParserFamily(
        name="minicpm5",
        start="<function name=",
        end="</function>",
        told=_says('<function name="', '<param name="'),
    ),
    ParserFamily(
        name="mistral",
        start="[TOOL_CALLS]",
        end="",
        told=_mistral(has_args=True),
        inner_marks=("[ARGS]", "[CALL_ID]"),
        form=_ARGS,
    ),
    ParserFamily(
        name="mistral_list",
        file="mistral",
        start="[TOOL_CALLS]",
        end="",
        told=_mistral(has_args=False),
        form=_LIST,
    ),
    ParserFamily(
        name="muse_spark",
        start="<atem:function_calls>",
        end="</atem:function_calls>",
        told=_says("<atem:function_calls>"),
        may_be=lambda text: (
            text.count("<atem:parameter") == text.count("</atem:parameter>")
            and text.count("<atem:invoke") <= 2 * text.count("</atem:invoke>") + 1
        ),
    ),
)
TOKEN_FAMILIES: tuple[ToolFamily, ...] = (
    ParserFamily(
        name="kimi_k3",
        start="<|open|>tools<|sep|>",
        end="<|close|>tools<|sep|>",
        told=_has(*XTML_TOKENS),
        form=_KIMI_K3,
    ),
    ParserFamily(  # LFM2.5: its template does not name the tokens that it has
        name="pythonic_tokens",
        file="pythonic",
        start="<|tool_call_start|>",
        end="<|tool_call_end|>",
        told=_has("<|tool_call_start|>", "<|tool_call_end|>"),
    ),
)


@functools.cache
def _parser(name: str) -> ModuleType:
    if _PACKAGE not in sys.modules:
        package = ModuleType(_PACKAGE)
        package.__path__ = [str(_folder())]
        sys.modules[_PACKAGE] = package
    return importlib.import_module(f"{_PACKAGE}.{name}")


def _folder() -> Path:
    """The folder of the parser files. Finding a package does not run it."""
    found = importlib.util.find_spec("mlx_lm")
    places = found.submodule_search_locations if found is not None else None
    for place in places or ():
        folder = Path(place) / "tool_parsers"
        if folder.is_dir():
            return folder
    event(_log, "mlx-lm is not installed: only calls in JSON are read", level=logging.WARNING)
    raise ValueError("mlx-lm is not installed")
