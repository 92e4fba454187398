"""The text files of a model folder are found where transformers finds them."""

from __future__ import annotations

import json

import pytest

from kakeya.generation.request import Sampling
from kakeya.text.folder import (
    sampling_defaults,
    special_tokens,
    stamps,
    stop_ids,
    templates,
)


def write(folder, **files):
    for name, content in files.items():
        path = (
            folder
            / {
                "config": "tokenizer_config.json",
                "older": "special_tokens_map.json",
                "processor": "chat_template.json",
                "generation": "generation_config.json",
                "jinja": "chat_template.jinja",
                "tools": "additional_chat_templates/tool_use.jinja",
            }[name]
        )
        path.parent.mkdir(exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


def test_a_template_is_a_file_or_stands_in_a_configuration(tmp_path):
    assert templates(tmp_path) == {}
    write(tmp_path, processor={"chat_template": "processor"})
    assert templates(tmp_path) == {"default": "processor"}
    write(tmp_path, config={"chat_template": "config"})
    assert templates(tmp_path) == {"default": "config"}
    write(tmp_path, jinja="file")
    assert templates(tmp_path) == {"default": "file"}


def test_templates_may_have_names(tmp_path):
    named = [{"name": "default", "template": "one"}, {"name": "tool_use", "template": "two"}]
    write(tmp_path, config={"chat_template": named})
    assert templates(tmp_path) == {"default": "one", "tool_use": "two"}
    write(tmp_path, tools="file")
    assert templates(tmp_path) == {"default": "one", "tool_use": "file"}
    write(tmp_path, jinja="main")
    assert templates(tmp_path) == {"default": "main", "tool_use": "file"}


def test_special_tokens_are_read_in_both_forms(tmp_path):
    write(
        tmp_path,
        config={
            "bos_token": "<s>",
            "eos_token": {"content": "</s>"},
            "pad_token": None,
            "x": "y",
            "add_bos_token": True,
            "extra_special_tokens": {"image_token": "<image>"},
        },
    )
    found = {"bos_token": "<s>", "eos_token": "</s>", "image_token": "<image>"}
    assert special_tokens(tmp_path) == found


def test_an_older_folder_has_special_tokens_in_a_file_of_their_own(tmp_path):
    write(tmp_path, config={"eos_token": "a"}, older={"eos_token": {"content": "b"}})
    assert special_tokens(tmp_path) == {"eos_token": "b"}
    write(tmp_path, config={"eos_token": "a", "added_tokens_decoder": {}})
    assert special_tokens(tmp_path) == {"eos_token": "a"}


def test_end_tokens_are_numbers(tmp_path):
    assert stop_ids(tmp_path) == frozenset()
    write(tmp_path, generation={"eos_token_id": [1, 2, True, "3"]})
    assert stop_ids(tmp_path) == {1, 2}


@pytest.mark.parametrize(
    ("config", "sampling"),
    [
        ({}, Sampling(temperature=1.0)),
        (
            {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.1},
            Sampling(temperature=0.6, top_p=0.95, top_k=20, min_p=0.1),
        ),
        ({"do_sample": False, "top_p": 0.9}, Sampling(temperature=0.0, top_p=0.9)),
        ({"temperature": 0}, Sampling(temperature=0.0)),
        ({"top_k": -1, "top_p": None}, Sampling(temperature=1.0)),
    ],
)
def test_sampling_has_the_defaults_of_the_model(tmp_path, config, sampling):
    write(tmp_path, generation=config)
    assert sampling_defaults(tmp_path) == sampling


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"top_p": 0}, "top_p is 0"),
        ({"temperature": "hot"}, "temperature is 'hot'"),
        ({"top_k": 2.5}, "top_k is 2.5"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0"),
    ],
)
def test_sampling_that_cannot_be_had_is_told_and_left_out(tmp_path, caplog, config, told):
    write(tmp_path, generation={**config, "min_p": 0.1})
    assert sampling_defaults(tmp_path) == Sampling(temperature=1.0, min_p=0.1)
    assert told in str(vars(caplog.records[0]))


def test_a_change_of_any_text_file_is_seen(tmp_path):
    write(tmp_path, tools="file", older={})
    before = stamps(tmp_path)
    write(tmp_path, tools="longer file")
    assert stamps(tmp_path) != before
