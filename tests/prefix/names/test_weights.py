"""What names weights: every byte of them, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kakeya.core.errors import Cancelled, InvalidArgument
from kakeya.prefix.names.weights import weights_digest, weights_state


def model(folder: Path, data: bytes = bytes(100_000)) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text("{}")
    (folder / "model-1.safetensors").write_bytes(data)
    (folder / "model-2.safetensors").write_bytes(b"second")
    return folder


def digest(folder: Path) -> str:
    return weights_digest(folder, weights_state(folder))


@given(at=st.integers(0, 99_999), bit=st.integers(0, 7))
def test_any_bit_of_the_weights_makes_another_name(
    tmp_path_factory: pytest.TempPathFactory, at: int, bit: int
) -> None:
    folder = tmp_path_factory.mktemp("m")
    before = digest(model(folder))
    data = bytearray(100_000)
    data[at] ^= 1 << bit
    assert digest(model(folder, bytes(data))) != before


def test_a_copy_has_the_name_of_its_original(tmp_path: Path) -> None:
    one, other = model(tmp_path / "a"), model(tmp_path / "b")
    assert weights_state(one) != weights_state(other)
    assert digest(one) == digest(other)
    (other / "config.json").write_text('{"a": 1}')
    assert digest(one) != digest(other)
    (one / "README.md").write_text("nothing of the model")
    assert digest(one) == weights_digest(one, weights_state(one))


def test_weights_that_were_replaced_since_get_no_name(tmp_path: Path) -> None:
    folder = model(tmp_path / "a")
    state = weights_state(folder)
    (folder / "model-2.safetensors").write_bytes(b"another")
    with pytest.raises(InvalidArgument, match="they were replaced since"):
        weights_digest(folder, state)


def test_a_digest_can_be_given_up(tmp_path: Path) -> None:
    folder = model(tmp_path / "a")
    with pytest.raises(Cancelled):
        weights_digest(folder, weights_state(folder), lambda: True)


def test_a_folder_without_weights_has_no_state(tmp_path: Path) -> None:
    assert weights_state(tmp_path) == ""
    (tmp_path / "config.json").write_text("{}")
    assert weights_state(tmp_path) == ""
