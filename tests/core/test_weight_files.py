"""Which files hold a model's weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kakeya.core.errors import InvalidArgument
from kakeya.core.weight_files import INDEX, missing_weights, weight_files


def names(folder: Path, *present: str) -> list[str]:
    for name in present:
        (folder / name).write_bytes(b"")
    return [path.name for path in weight_files(folder)]


def write_index(folder: Path, *listed: str) -> None:
    arrays = {f"array{number}": name for number, name in enumerate(listed)}
    (folder / INDEX).write_text(json.dumps({"weight_map": arrays}))


def test_files_of_the_usual_name_come_before_any_others(tmp_path: Path) -> None:
    assert names(tmp_path) == []
    assert names(tmp_path, "weights.safetensors") == ["weights.safetensors"]
    two = ["model-2.safetensors", "model.safetensors"]
    assert names(tmp_path, *two) == two


def test_an_index_decides(tmp_path: Path) -> None:
    write_index(tmp_path, "b.safetensors", "a.safetensors", "a.safetensors")
    assert names(tmp_path, "model.safetensors") == ["a.safetensors", "b.safetensors"]


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    assert missing_weights(tmp_path) == "*.safetensors"
    write_index(tmp_path, "model-1.safetensors", "model-2.safetensors")
    names(tmp_path, "model-1.safetensors")
    assert missing_weights(tmp_path).startswith(f"model-2.safetensors, which {INDEX} names")
    names(tmp_path, "model-2.safetensors")
    assert missing_weights(tmp_path) == ""


@pytest.mark.parametrize(
    "index", ["{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": "../b"}}']
)
def test_an_index_that_cannot_be_read_is_told_and_decides_nothing(
    tmp_path: Path, index: str
) -> None:
    (tmp_path / INDEX).write_text(index)
    with pytest.raises(InvalidArgument, match="index"):
        missing_weights(tmp_path)
    assert names(tmp_path, "model.safetensors") == ["model.safetensors"]
