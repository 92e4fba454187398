"""The fingerprint of a base: of what its weights are, and not of when they were written."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from kakeya.adapters.files.base import read_base
from kakeya.core.errors import InvalidArgument

NAMES = ("model.embed.weight", "model.layers.0.up.weight", "model.layers.1.up.weight", "z.weight")


def write_base(folder: Path, changed: str = "", config: int = 1) -> Path:
    """Four arrays, of which one may have other values."""
    folder.mkdir(parents=True, exist_ok=True)
    arrays = {
        name: np.full((40, 60), at + (100 if name == changed else 0), np.float32)
        for at, name in enumerate(NAMES)
    }
    save_file(arrays, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"layers": config}))
    return folder


def test_it_is_the_same_for_the_same_weights_wherever_and_whenever_they_were_written(
    tmp_path: Path,
) -> None:
    first = write_base(tmp_path / "a")
    second = write_base(tmp_path / "b")
    os.utime(second / "model.safetensors", (1, 1))
    assert read_base(first).fingerprint == read_base(second).fingerprint


@pytest.mark.parametrize("name", NAMES)
def test_other_values_of_any_array_make_another_one(tmp_path: Path, name: str) -> None:
    before = read_base(write_base(tmp_path)).fingerprint
    size = (tmp_path / "model.safetensors").stat().st_size
    after = read_base(write_base(tmp_path, changed=name)).fingerprint
    assert (tmp_path / "model.safetensors").stat().st_size == size
    assert after != before


def test_another_config_makes_another_one(tmp_path: Path) -> None:
    before = read_base(write_base(tmp_path)).fingerprint
    assert read_base(write_base(tmp_path, config=2)).fingerprint != before


@pytest.mark.parametrize("cut", [0, 5, 20, 60])
def test_a_file_that_is_cut_off_is_refused(tmp_path: Path, cut: int) -> None:
    file = write_base(tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:cut])
    with pytest.raises(InvalidArgument):
        read_base(tmp_path)
