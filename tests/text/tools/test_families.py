"""Every family reads its own syntax, and what is none of it is told from a call."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from kakeya.text.tools.answer import AnswerReader, Said
from kakeya.text.tools.calls import Called, functions_of
from kakeya.text.tools.families import JSON_FAMILY, family_of, tool_families
from kakeya.text.tools.parser_files import TEMPLATE_FAMILIES, TOKEN_FAMILIES, _parser

FAMILIES = {family.name: family for family in tool_families()}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "parameters": {
                "type": "object",
                "properties": {"at": {"type": "string"}, "n": {"type": "integer"}},
            },
        },
    }
]
GLM = "look\n<arg_key>at</arg_key>\n<arg_value>sea</arg_value>\n<arg_key>n</arg_key>\n<arg_value>2"
ARGUMENTS = '{"at": "sea", "n": 2}'
KIMI_K2 = "<|tool_call_begin|>functions.look:0<|tool_call_argument_begin|>"
WRITTEN = {
    "json_tools": f'<tool_call>\n{{"name": "look", "arguments": {ARGUMENTS}}}\n</tool_call>',
    "llama3": f'{{"name": "look", "parameters": {ARGUMENTS}}}',
    "mistral": f"[TOOL_CALLS]look[ARGS]{ARGUMENTS}",
    "mistral_list": f'[TOOL_CALLS] [{{"name": "look", "arguments": {ARGUMENTS}}}]',
    "kimi_k2": f"<|tool_calls_section_begin|>{KIMI_K2}{ARGUMENTS}<|tool_call_end|>"
    "<|tool_calls_section_end|>",
    "kimi_k3": '<|open|>tools<|sep|><|open|>call tool="look" index="1"<|sep|>'
    '<|open|>argument key="at" type="string"<|sep|>sea<|close|>argument<|sep|>'
    '<|open|>argument key="n" type="number"<|sep|>2<|close|>argument<|sep|>'
    "<|close|>call<|sep|><|close|>tools<|sep|>",
    "glm47": f"<tool_call>{GLM}</arg_value>\n</tool_call>",
    "longcat": "<longcat_tool_call>"
    + GLM.replace("arg_", "longcat_arg_")
    + "</longcat_arg_value></longcat_tool_call>",
    "qwen3_coder": "<tool_call>\n<function=look>\n<parameter=at>\nsea\n</parameter>\n"
    "<parameter=n>\n2\n</parameter>\n</function>\n</tool_call>",
    "minimax_m2": '<minimax:tool_call><invoke name="look">\n<parameter name="at">sea</parameter>\n'
    '<parameter name="n">2</parameter>\n</invoke>\n</minimax:tool_call>',
    "minicpm5": '<function name="look"><param name="at">sea</param><param name="n">2</param>'
    "</function>",
    "muse_spark": '<atem:function_calls><atem:invoke name="look"><atem:parameter name="at">sea'
    '</atem:parameter><atem:parameter name="n">2</atem:parameter></atem:invoke>'
    "</atem:function_calls>",
    "gemma4": '<|tool_call>call:look{at:<|"|>sea<|"|>,n:2}<tool_call|>',
    "function_gemma": "<start_function_call>call:look{at:<escape>sea<escape>,n:2}"
    "<end_function_call>",
    "pythonic": '<|tool_call_start|>[look(at="sea", n=2)]<|tool_call_end|>',
    "pythonic_tokens": '<|tool_call_start|>[look(at="sea", n=2)]<|tool_call_end|>',
}
IDS = {"kimi_k2": "functions.look:0"}
SIGNS = {
    "minimax_m2": "<minimax:tool_call>",
    "gemma4": "<|tool_call> <tool_call|>",
    "function_gemma": "<start_function_call>",
    "longcat": "<longcat_tool_call>",
    "glm47": "<tool_call><arg_key>",
    "pythonic": "<|tool_list_start|>",
    "qwen3_coder": "<tool_call>\n<function=",
    "kimi_k2": "<|tool_calls_section_begin|>",
    "minicpm5": '<function name="<param name="',
    "mistral_list": "[TOOL_CALLS]",
    "muse_spark": "<atem:function_calls>",
    "json_tools": "<tool_call>{{ tool_call.name }}",
    "llama3": '{"name": function name, "parameters": dictionary of argument name and its value}',
}


def read(name: str, text: str) -> list[object]:
    reader = AnswerReader(family=FAMILIES[name], tools=TOOLS)
    return [*reader.feed(text), *reader.finish()]


def test_every_family_is_tried():
    assert set(FAMILIES) == set(WRITTEN)


@pytest.mark.parametrize("name", WRITTEN)
def test_a_family_reads_its_calls(name):
    call = Called("look", ARGUMENTS, IDS.get(name, ""))
    said = "" if name == "llama3" else "I look.\n"
    assert read(name, said + WRITTEN[name]) == [*[Said("I look.")] * bool(said), call]


@pytest.mark.parametrize("name", [name for name in WRITTEN if name != "llama3"])
def test_every_family_reads_calls_in_json(name):
    family = FAMILIES[name]
    inner = json.dumps({"name": "look", "arguments": json.loads(ARGUMENTS)})
    assert read(name, f"{family.start}\n{inner}\n{family.end}") == [Called("look", ARGUMENTS)]


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize("inner", ["", "no call", "{", '{"name": 1}', "[]", "[1]", "Hello there x"])
def test_what_is_no_call_stays_text(name, inner):
    family = FAMILIES[name]
    text = f"{family.start}{inner}{family.end}"
    assert "".join(part.text for part in read(name, text)) == text


@pytest.mark.parametrize(
    "said",
    ['{"name": "Ann"}', '{"name": "Ann", "age": 5}', '{"name": "f", "parameters": {}}; 5'],
)
def test_an_answer_in_json_is_no_call_where_no_marks_say_so(said):
    assert "".join(part.text for part in read("llama3", f"Her: {said}")) == f"Her: {said}"


@pytest.mark.parametrize("name", WRITTEN)
def test_a_call_with_its_arguments_under_another_name_loses_none(name):
    family = FAMILIES[name]
    inner = json.dumps({"name": "look", "input": {"at": "sea"}})
    text = f"{family.start if family.end else ''}{inner}{family.end}"
    assert "".join(part.text for part in read(name, text)) == text


def test_the_marks_are_those_of_the_parser_files():
    for family in (*TEMPLATE_FAMILIES, *TOKEN_FAMILIES):
        parser = _parser(family.file or family.name)
        assert (parser.tool_call_start, parser.tool_call_end) == (family.start, family.end)


def test_no_parser_file_is_without_a_family():
    from pathlib import Path

    files = {path.stem for path in Path(_parser("glm47").__file__).parent.glob("*.py")}
    known = {family.file or family.name for family in (*TEMPLATE_FAMILIES, *TOKEN_FAMILIES)}
    assert files - known == {"__init__", "json_tools", "laguna"}  # laguna writes as glm47 does


@pytest.mark.parametrize("name", SIGNS)
def test_a_template_tells_its_family(name):
    assert family_of(SIGNS[name], {}) is FAMILIES[name]


def test_a_vocabulary_tells_a_family_where_the_template_does_not():
    assert family_of("", {"<|tool_call_start|>": 1, "<|tool_call_end|>": 2}).name == (
        "pythonic_tokens"
    )
    xtml = dict.fromkeys(("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"), 1)
    assert family_of("", xtml).name == "kimi_k3"
    assert family_of("[TOOL_CALLS]", {"[ARGS]": 1}).name == "mistral"
    assert family_of("", {}) is JSON_FAMILY


def test_parser_files_are_read_without_mlx():
    script = (
        "import sys; from kakeya.text.tools.parser_files import TEMPLATE_FAMILIES as t\n"
        "for f in t:\n"
        "    try: f.parse('x', [])\n"
        "    except ValueError: pass\n"
        "assert 'kakeya_tool_parsers.glm47' in sys.modules\n"
        "assert not {'mlx', 'mlx_lm', 'transformers', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_functions_are_found_in_both_shapes():
    flat = {"type": "function", "name": "f", "strict": True, "parameters": {"type": "object"}}
    found = functions_of([{"type": "web_search"}, flat, *TOOLS])
    assert [(one.name, one.is_strict, one.at) for one in found] == [
        ("f", True, "tools[1].parameters"),
        ("look", False, "tools[2].function.parameters"),
    ]


def test_arguments_are_text_that_utf8_carries():
    (call,) = JSON_FAMILY.parse('{"name": "f", "arguments": {"a": "\\ud800 é"}}', [])
    assert json.loads(call.arguments.encode()) == {"a": "\ud800 é"}
    (call,) = JSON_FAMILY.parse('{"name": "f", "arguments": "{\\"a\\": 1}"}', [])
    assert call.arguments == '{"a": 1}'


@pytest.mark.parametrize("name", WRITTEN)
def test_a_text_that_is_nested_too_deep_is_no_call(name):
    family = FAMILIES[name]
    for inner in ('{"a":' * 5000, "[" * 100_000, "call:x{" * 5000):
        text = f"{family.start}{inner}{family.end}"
        assert "".join(part.text for part in read(name, text)) == text
