"""Adapters on a disk that is full, broken, or not what it should be; what memory they need."""

import contextlib
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from kakeya.adapters.files import store as adapter_store
from kakeya.adapters.files.packed import digest, pack, unpack
from kakeya.adapters.files.store import AdapterRecord, AdapterReplaced, AdapterStore
from kakeya.core.errors import StoreFailed
from tests.adapters.adapter_folders import tiny_adapter


@pytest.fixture
def packed(tmp_path: Path) -> bytes:
    return pack(tiny_adapter(tmp_path / "given", 1))


@contextlib.contextmanager
def small_files() -> Iterator[None]:
    """No file may become larger than 4 KiB, as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def record(packed: bytes) -> AdapterRecord:
    return AdapterRecord(
        name="poet",
        base="kakeya-tiny",
        owner="",
        rank=8,
        precision=unpack(packed).precision.value,
        digest=digest(packed),
        packed_bytes=len(packed),
        fingerprint="",
        registered_at=1.0,
    )


def test_a_full_disk_refuses_an_adapter_and_keeps_nothing_of_it(
    tmp_path: Path, packed: bytes
) -> None:
    store = AdapterStore(tmp_path / "adapters")
    wanted = r"adapters cannot be written: .*; look at its disk"
    with small_files(), pytest.raises(StoreFailed, match=wanted):
        store.save(record(packed), packed)
    assert list((tmp_path / "adapters").iterdir()) == []
    assert list(store.scan()) == []


@pytest.mark.parametrize("is_same", [True, False])
def test_one_that_is_registered_while_the_damaged_one_is_looked_at_stays(
    tmp_path: Path, packed: bytes, monkeypatch: pytest.MonkeyPatch, is_same: bool
) -> None:
    store, read_packed = AdapterStore(tmp_path / "adapters"), adapter_store._read_packed
    store.save(record(packed), packed)
    (path,) = store.folder.iterdir()
    path.write_bytes(path.read_bytes()[:-9])
    fresh = packed if is_same else pack(tiny_adapter(tmp_path / "fresh", 2))

    def read_slowly(data: bytes, wanted: AdapterRecord) -> bytes:
        store.save(record(fresh), fresh)
        return read_packed(data, wanted)

    with monkeypatch.context() as patch:
        patch.setattr(adapter_store, "_read_packed", read_slowly)
        with pytest.raises(AdapterReplaced, match="was replaced; ask for it again"):
            store.load(record(packed))
    assert list(store.folder.iterdir()) == [path]
    assert store.load(record(fresh)) == fresh


def test_a_folder_that_is_none_is_named(tmp_path: Path, packed: bytes) -> None:
    (tmp_path / "adapters").write_text("a file")
    store = AdapterStore(tmp_path / "adapters")
    with pytest.raises(StoreFailed, match="adapters cannot be read"):
        list(store.scan())
    with pytest.raises(StoreFailed, match="adapters cannot be written"):
        store.save(record(packed), packed)
    with pytest.raises(StoreFailed, match="adapters cannot be written"):
        store.remove(record(packed))


def test_what_is_no_file_among_adapters_does_not_hinder_the_others(
    tmp_path: Path, packed: bytes
) -> None:
    store = AdapterStore(tmp_path / "adapters")
    store.save(record(packed), packed)
    (tmp_path / "adapters" / ".left.klora").mkdir()
    (tmp_path / "adapters" / "0.klora").mkdir()
    assert [one.name for one in store.scan()] == ["poet"]
