"""The parts of a model that a ring group shares out, by the headers of its files."""

from __future__ import annotations

from pathlib import Path

import pytest

from kakeya.core.errors import InvalidArgument
from kakeya.generation.spec import EMBEDDED_FOLDER
from kakeya.memory.estimate.estimate import estimate_model
from kakeya.memory.estimate.layers import read_parts
from tests.mlx.random_models import QWEN3_MOE, write_model


def test_the_parts_make_up_the_model(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "llama", "llama", changes={"tie_word_embeddings": False})
    parts = read_parts(folder, kv_tokens=256, widens=False)
    whole = estimate_model(folder, kv_tokens=256, widens=False)
    assert (parts.kind, parts.layers, parts.heads, parts.kv_heads) == ("llama", 2, 4, 2)
    assert parts.layers * parts.layer_bytes + parts.rest_bytes == whole.weights_bytes
    assert parts.kv_bytes == whole.kv_bytes
    assert parts.head_bytes == 96 * 64 * 4
    assert parts.rest_bytes == 2 * parts.head_bytes + 64 * 4
    assert parts.read_bytes == parts.layers * parts.layer_bytes
    assert parts.products == 2 * (64 * (64 + 32 + 32 + 64) + 3 * 64 * 128)


def test_a_token_reads_the_experts_that_are_selected(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "moe", "qwen3", changes=QWEN3_MOE)
    parts = read_parts(folder, kv_tokens=256, widens=False)
    experts = 4 * 4 * 3 * 64 * 32 * 4
    assert parts.layers * parts.layer_bytes - parts.read_bytes == experts // 2


def test_packed_weights_count_as_weights(tmp_path: Path) -> None:
    plain = write_model(tmp_path / "plain", "llama")
    packed = write_model(tmp_path / "packed", "llama", quantize_bits=4)
    one, other = (read_parts(it, kv_tokens=256, widens=True) for it in (plain, packed))
    assert one.products == other.products
    assert other.read_bytes < one.read_bytes / 4
    assert one.head_bytes == 96 * 64 * 4  # the embedding, which is the output layer too


def test_a_folder_that_does_not_tell_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="num_hidden_layers"):
        read_parts(tmp_path, kv_tokens=1, widens=True)
    assert read_parts(EMBEDDED_FOLDER / "kakeya-tiny", kv_tokens=1, widens=True).layers == 4
