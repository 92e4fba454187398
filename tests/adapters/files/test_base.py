"""The fingerprint of a base: of what its weights are, and not of when they were written."""

import asyncio
import json
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from kakeya.adapters.files.base import base_fingerprint, read_layers
from kakeya.core.errors import InvalidArgument
from kakeya.core.programs import Output
from kakeya.generation.spec import EMBEDDED_FOLDER

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
    assert base_fingerprint(first) == base_fingerprint(second)


@pytest.mark.parametrize("name", NAMES)
def test_other_values_of_any_array_make_another_one(tmp_path: Path, name: str) -> None:
    before = base_fingerprint(write_base(tmp_path))
    size = (tmp_path / "model.safetensors").stat().st_size
    after = base_fingerprint(write_base(tmp_path, changed=name))
    assert (tmp_path / "model.safetensors").stat().st_size == size
    assert after != before


def test_another_config_makes_another_one(tmp_path: Path) -> None:
    before = base_fingerprint(write_base(tmp_path))
    assert base_fingerprint(write_base(tmp_path, config=2)) != before


@pytest.mark.parametrize("cut", [0, 5, 20, 60])
def test_a_file_that_is_cut_off_is_refused(tmp_path: Path, cut: int) -> None:
    file = write_base(tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:cut])
    with pytest.raises(InvalidArgument):
        base_fingerprint(tmp_path)


TINY = EMBEDDED_FOLDER / "kakeya-tiny"


async def test_the_layers_are_those_of_the_network_and_no_others() -> None:
    layers = await read_layers(TINY)
    assert layers["model.layers.3.self_attn.k_proj"] == (256, 128)
    assert layers["model.layers.0.mlp.down_proj"] == (704, 256)
    assert len(layers) == 4 * 7, "an embedding, whose file looks alike, is none"


async def test_a_folder_without_a_network_is_told_with_its_reason(tmp_path: Path) -> None:
    folder = await asyncio.to_thread(write_base, tmp_path)
    with pytest.raises(InvalidArgument, match=r"cannot be told: .*cannot be loaded"):
        await read_layers(folder)


@pytest.mark.parametrize("output", [None, Output(status=None, stdout="", stderr="")])
async def test_a_machine_that_is_too_busy_is_told_of(output: Output | None) -> None:
    async def run(command: Sequence[str], limit_s: float) -> Output | None:
        return output

    with pytest.raises(InvalidArgument, match="less busy"):
        await read_layers(TINY, run)
