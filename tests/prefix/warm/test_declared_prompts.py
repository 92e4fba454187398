"""Prompts that the configuration declares: read, or refused by name."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kakeya.config.config import load
from kakeya.core.errors import ConfigError
from kakeya.core.settings import Illegal
from kakeya.prefix.config import KEEP_ALIVE_LEAST_S, SWEEP_LEAST_S
from kakeya.prefix.warm.declared_prompts import DeclaredPrompt, PromptText, parse_prompts

FILE = """
[precache]
memory_mb = 64
disk_mb = 0
parallel = 4
keep_alive_s = 60

[[precache.prompts]]
system = " You are kind. "

[[precache.prompts]]
model = "kakeya-tiny"
system_file = "{folder}/system.txt"
tools_file = "{folder}/tools.json"
messages = [{{role = "user", content = "hello"}}, {{role = "assistant", content = "hi"}}]
"""


def test_tables_of_the_file_become_prompts(tmp_path: Path) -> None:
    path = tmp_path / "node.toml"
    path.write_text(FILE.format(folder=tmp_path))
    (tmp_path / "system.txt").write_text("Be brief.")
    (tmp_path / "tools.json").write_text('[{"name": "clock"}]')
    precache = load(["--config", str(path)], {}).precache
    assert (precache.memory_bytes, precache.disk_bytes) == (64 << 20, 0)
    assert (precache.parallel, precache.keep_alive_s, precache.sweep_s) == (4, 60, 300)
    kind, brief = precache.prompts
    assert kind == DeclaredPrompt(system=" You are kind. ")
    assert brief.model == "kakeya-tiny"
    assert brief.read() == PromptText(
        messages=(("system", "Be brief."), ("user", "hello"), ("assistant", "hi")),
        tools=({"name": "clock"},),
    )


def test_a_variable_holds_the_same_as_json() -> None:
    environ = {"KAKEYA_PRECACHE_PROMPTS": '[{"system": "x"}]'}
    assert load([], environ).precache.prompts == (DeclaredPrompt(system="x"),)
    with pytest.raises(ConfigError, match="KAKEYA_PRECACHE_PROMPTS: the prompts are not JSON"):
        load([], {"KAKEYA_PRECACHE_PROMPTS": "x"})


def test_periods_below_the_least_are_raised_to_it_and_named() -> None:
    environ = {"KAKEYA_PRECACHE_KEEP_ALIVE_S": "1", "KAKEYA_PRECACHE_SWEEP_S": "2.5"}
    config = load([], environ)
    assert config.precache.keep_alive_s == KEEP_ALIVE_LEAST_S == 30
    assert config.precache.sweep_s == SWEEP_LEAST_S == 60
    assert [w.split()[0] for w in config.warnings] == ["precache.keep_alive_s", "precache.sweep_s"]
    assert load([], {"KAKEYA_PRECACHE_KEEP_ALIVE_S": "31"}).warnings == ()


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ({"sytem": "x"}, "unknown key sytem; did you mean system?"),
        ({}, "says nothing"),
        ({"system": ""}, "not a text"),
        ({"system": "x", "system_file": "y"}, "give one of them"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages of prompt 0"),
        ({"messages": [{"role": "user"}]}, "messages of prompt 0"),
        ({"messages": "hello"}, "no list"),
    ],
)
def test_what_is_no_prompt_is_refused_by_name(entry: object, says: str) -> None:
    with pytest.raises(Illegal, match=says):
        parse_prompts([entry])


@pytest.mark.parametrize("raw", [{}, 3, ["x"]])
def test_prompts_are_tables(raw: object) -> None:
    with pytest.raises(Illegal, match="prompts are tables"):
        parse_prompts(raw)


def test_a_pipe_is_no_file_to_wait_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match=r"pipe: .* give a regular file"):
        DeclaredPrompt(system_file=str(tmp_path / "pipe")).read()


def test_files_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere: the prompt cannot be read"):
        DeclaredPrompt(system_file=str(tmp_path / "nowhere")).read()
    (tmp_path / "latin").write_bytes(b"\xe4")
    with pytest.raises(ConfigError, match="not UTF-8"):
        DeclaredPrompt(system_file=str(tmp_path / "latin")).read()
    (tmp_path / "tools").write_text('{"name": "x"}')
    with pytest.raises(ConfigError, match="JSON list of objects"):
        DeclaredPrompt(system="x", tools_file=str(tmp_path / "tools")).read()
