"""The metadata of GGUF files, whole and damaged."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kakeya.core.errors import InvalidArgument
from kakeya.core.gguf import gguf_files, gguf_fingerprint, gguf_shards, read_gguf
from tests.gguf_files import gguf_bytes, tiny_meta, write_gguf

texts = st.text(max_size=20)
whole = st.integers(0, 2**63)
values = st.one_of(
    texts,
    st.booleans(),
    st.integers(-(2**63), 2**63),
    st.floats(allow_nan=False, width=32),
    st.lists(texts, max_size=5),
    st.lists(whole, max_size=5),
)


def test_other_weights_of_the_same_size_have_another_name(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", tiny_meta())
    path.write_bytes(path.read_bytes() + bytes(100_000))
    name = gguf_fingerprint(path)
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(path.read_bytes())
    assert gguf_fingerprint(copy) == name
    tuned = bytearray(path.read_bytes())
    tuned[-50_000:] = b"\1" * 50_000
    copy.write_bytes(tuned)
    assert gguf_fingerprint(copy) != name


@pytest.mark.law
@given(meta=st.dictionaries(texts, values, max_size=6))
def test_what_a_file_says_is_read(
    meta: dict[str, object], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = write_gguf(tmp_path_factory.getbasetemp() / "law.gguf", meta)
    assert read_gguf(path) == meta


@pytest.mark.law
@given(end=st.integers(0, 400), at=st.integers(0, 400), byte=st.integers(0, 255))
def test_a_damaged_file_is_refused_or_read(
    end: int, at: int, byte: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Never another error, and never more memory than the file has bytes."""
    data = bytearray(gguf_bytes({"a": [1, 2], "b": "text", "c": ["x", "y"], "d": 0.5, "e": True}))
    data[at % len(data)] = byte
    path = tmp_path_factory.getbasetemp() / "damaged.gguf"
    path.write_bytes(data[: len(data) - end % len(data)])
    with contextlib.suppress(InvalidArgument):
        read_gguf(path)


def test_a_cut_file_is_refused_by_its_name(tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(gguf_bytes(tiny_meta())[:200])
    with pytest.raises(InvalidArgument, match=r"cut\.gguf is damaged"):
        read_gguf(path)


def test_another_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.gguf"
    path.write_bytes(b"PK\x03\x04" + bytes(40))
    with pytest.raises(InvalidArgument, match="version 2 or 3"):
        read_gguf(path)


def test_the_models_of_a_folder_are_their_first_files(tmp_path: Path) -> None:
    for name in ("a-00001-of-00002.gguf", "a-00002-of-00002.gguf", "b.gguf", "mmproj-b.gguf"):
        (tmp_path / name).touch()
    assert [one.name for one in gguf_files(tmp_path)] == ["a-00001-of-00002.gguf", "b.gguf"]
    shards = gguf_shards(tmp_path / "a-00001-of-00002.gguf")
    assert [one.name for one in shards] == ["a-00001-of-00002.gguf", "a-00002-of-00002.gguf"]
    assert gguf_shards(tmp_path / "b.gguf") == [tmp_path / "b.gguf"]
