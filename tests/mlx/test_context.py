"""The positions of a model, by the files of its folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kakeya.mlx.context import context_tokens

YARN = {"rope_type": "yarn", "factor": 4.0}


@pytest.mark.parametrize(
    ("config", "tokens"),
    [
        ({"max_position_embeddings": 4096, "model_max_length": 9}, 4096),
        ({"model_max_length": 65536}, 65536),
        ({"max_seq_len": 65536}, 65536),
        ({"max_position_embeddings": None, "n_positions": 1024}, 1024),
        ({"max_position_embeddings": 32768, "rope_scaling": YARN}, 131072),
        (
            {
                "max_position_embeddings": 131072,
                "rope_scaling": {**YARN, "original_max_position_embeddings": 32768},
            },
            131072,
        ),
        ({"max_position_embeddings": 4096, "rope_scaling": {"type": "linear", "factor": 2}}, 8192),
        (
            {
                "max_position_embeddings": 131072,
                "rope_parameters": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "original_max_position_embeddings": 8192,
                },
            },
            131072,
        ),
        (
            {
                "model_type": "gemma3_text",
                "max_position_embeddings": 131072,
                "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            },
            131072,
        ),
        (
            {"max_position_embeddings": 4096, "rope_scaling": {"type": "linear", "factor": "2"}},
            4096,
        ),
        ({"model_type": "gemma3_text"}, 131072),
        ({"model_type": "no such architecture"}, 8192),
        ({}, 8192),
    ],
)
def test_the_context_is_that_of_the_configuration(
    tmp_path: Path, config: dict[str, Any], tokens: int
) -> None:
    assert context_tokens(tmp_path, (config,)) == tokens


def test_the_part_about_text_comes_first(tmp_path: Path) -> None:
    parts = ({"max_position_embeddings": 2048}, {"max_position_embeddings": 512})
    assert context_tokens(tmp_path, parts) == 2048


def test_a_tokenizer_may_tell_where_the_architecture_does_not(tmp_path: Path) -> None:
    for said, tokens in ((2048, 2048), (10**30, 8192)):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"model_max_length": said}))
        assert context_tokens(tmp_path, ({"model_type": "mamba"},)) == tokens
