"""Edits of configuration files: what is put in, what stays, and the way back, byte for byte."""

from __future__ import annotations

import json
import tomllib

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from kakeya.cli.connect.clients import CLIENTS, NodeTarget
from kakeya.cli.connect.edit import Edit, JsonEdit, TomlEdit, Uneditable, Values, YamlEdit, merged
from tests.laws import law

TARGET = NodeTarget(url="http://127.0.0.1:8210", model="m", key="none", context_tokens=131_072)
NAMES = st.sampled_from(["model", "env", "provider", "models", "other", "a-b", "x"])
SINGLE = st.integers(-9, 9) | st.text("ab #\"'=:[]{}\\é", max_size=6) | st.booleans()
NESTED = st.recursive(
    SINGLE | st.none() | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=8,
)
ENDS = st.sampled_from(["\n", "\r\n"])
COMMENTS = st.sampled_from(["", "# mine", "  # model = 1", "# models:"])


def edits_of(kind: type[Edit]) -> list[Edit]:
    return [c.edit(TARGET) for c in CLIENTS.values() if c.make_edit is kind]


def is_undone(edit: Edit, text: str) -> str:
    """The edited text, if it can be edited; checks that it leads back."""
    try:
        edited = edit.apply(text)
    except Uneditable:
        return ""
    assert edit.restore(edited, text) == text
    return edited


@given(value=st.dictionaries(NAMES, NESTED, max_size=5), indent=st.sampled_from([None, 2, "\t"]))
@law(600)
def test_json_is_merged_and_given_back(value: dict[str, object], indent: int | str | None) -> None:
    text = json.dumps(value, indent=indent)
    for edit in edits_of(JsonEdit):
        assert isinstance(edit, JsonEdit)
        edited = is_undone(edit, text)
        if any(not isinstance(value.get(key, {}), dict) for key in ("env", "provider")):
            continue
        assert json.loads(edited) == merged({**edit.defaults, **value}, edit.values)


def toml_line(name: str, value: object) -> str:
    return f"{name} = {json.dumps(value)}"


@given(
    head=st.dictionaries(NAMES, SINGLE | st.lists(SINGLE, max_size=2), max_size=4),
    tables=st.dictionaries(
        st.sampled_from(["t", "model_providers.mine", "projects"]),
        st.dictionaries(NAMES, SINGLE, max_size=3),
        max_size=3,
    ),
    comment=COMMENTS,
    end=ENDS,
    is_ended=st.booleans(),
)
@law(600)
def test_toml_keeps_all_lines_and_is_given_back(
    head: dict[str, object],
    tables: dict[str, dict[str, object]],
    comment: str,
    end: str,
    is_ended: bool,
) -> None:
    lines = [comment, *(toml_line(*pair) for pair in head.items())]
    for name, table in tables.items():
        lines += [f"[{name}] {comment}", *(toml_line(*pair) for pair in table.items())]
    text = end.join(lines) + (end if is_ended else "")
    (edit,) = edits_of(TomlEdit)
    edited = is_undone(edit, text)
    said = tomllib.loads(edited)
    assert said["model"] == "m"
    assert said["model_providers"]["kakeya"]["wire_api"] == "responses"
    rest = {k: v for k, v in tomllib.loads(text).items() if k not in ("model", "model_providers")}
    assert rest.items() <= said.items()
    assert all(line in edited for line in lines)


@given(
    value=st.dictionaries(NAMES, NESTED, max_size=5),
    is_flow=st.booleans(),
    comment=COMMENTS,
    is_ended=st.booleans(),
)
@law(600)
def test_yaml_says_more_or_is_refused_and_is_given_back(
    value: dict[str, object], is_flow: bool, comment: str, is_ended: bool
) -> None:
    text = f"{comment}\n" + yaml.safe_dump(value, default_flow_style=is_flow, sort_keys=False)
    text = text if is_ended else text.rstrip("\n")
    for edit in edits_of(YamlEdit):
        edited = is_undone(edit, text)
        if edited:
            assert yaml.safe_load(edited)["model" if "model" in edit.values else "models"]
            assert comment in edited


@pytest.mark.parametrize(
    ("text", "first"),
    [
        ("models:\n  - name: a\n    model: b\n", 0),
        ("models:\n- name: a\n- name: b\nrules: []\n", 0),
        ("models: # mine\n\n  # the first\n    - name: a\n", 0),
        ("models:\nrules: []\n", 0),
        ("models: [] # none\nrules: []\n", 0),
        ("name: x\n", 0),
        ("", 0),
    ],
)
def test_a_model_of_continue_stands_before_the_others(text: str, first: int) -> None:
    edited = is_undone(CLIENTS["continue"].edit(TARGET), text)
    was = yaml.safe_load(text) or {}
    models = yaml.safe_load(edited)["models"]
    assert models[first]["apiBase"] == "http://127.0.0.1:8210/v1"
    assert models[1:] == (was.get("models") or [])


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("claude-code", '{"env": {}, // mine\n}', "it is no JSON"),
        ("claude-code", "[]", "no JSON object"),
        ("claude-code", '{"a": 1, "a": 2}', "stands twice"),
        ("claude-code", '{"env": 1}', "cannot be merged"),
        ("codex", "model = ", "it is no TOML"),
        ("codex", 'model_providers = { mine = { name = "x" } }\n', "cannot be put into it"),
        ("codex", 'model = """\nx"""\n', "cannot be put into it"),
        ("continue", "models: [", "it is no YAML"),
        ("continue", "models: [{name: a}]\n", "cannot be put into it"),
        ("aider", "- a\n", "no YAML mapping"),
    ],
)
def test_what_cannot_be_edited_is_refused(name: str, text: str, says: str) -> None:
    with pytest.raises(Uneditable, match=says):
        CLIENTS[name].edit(TARGET).apply(text)


@pytest.mark.parametrize("name", CLIENTS)
def test_a_snippet_says_the_values(name: str) -> None:
    edit = CLIENTS[name].edit(TARGET)
    readers = {JsonEdit: json.loads, TomlEdit: tomllib.loads, YamlEdit: yaml.safe_load}
    said: Values = readers[type(edit)](edit.snippet())  # type: ignore[index]
    values = CLIENTS[name].values(TARGET)
    assert merged(said, {}) == merged(dict(CLIENTS[name].defaults), values)
