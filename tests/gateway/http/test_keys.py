"""API keys: their file, and the ring that sees it change."""

from __future__ import annotations

import re
from asyncio import to_thread
from pathlib import Path

import pytest

from kakeya.core.errors import Conflict, InvalidArgument, NotFound, StoreFailed
from kakeya.gateway.http.keys import KEYS_FILE, KeyRing, KeyRole, add_key, read_keys, remove_key
from tests.fakes import FakeClock


def test_a_key_is_stored_as_a_hash_that_only_its_owner_can_read(tmp_path: Path) -> None:
    folder = tmp_path / "new"
    key = add_key(folder, "laptop", KeyRole.INFER, 7.0)
    path = folder / KEYS_FILE
    assert re.fullmatch(r"kakeya-[\w-]{43}", key)
    assert key.removeprefix("kakeya-") not in path.read_text()
    assert path.stat().st_mode & 0o077 == 0
    (stored,) = read_keys(folder)
    assert (stored.name, stored.role, stored.made_at) == ("laptop", KeyRole.INFER, 7.0)


def test_a_name_has_one_key_and_keys_differ(tmp_path: Path) -> None:
    first = add_key(tmp_path, "a", KeyRole.INFER, 0.0)
    with pytest.raises(Conflict, match="kakeya key remove a"):
        add_key(tmp_path, "a", KeyRole.ADMIN, 0.0)
    assert add_key(tmp_path, "b", KeyRole.ADMIN, 0.0) != first
    with pytest.raises(NotFound, match="names with a key: a, b"):
        remove_key(tmp_path, "c")
    remove_key(tmp_path, "a")
    assert [one.name for one in read_keys(tmp_path)] == ["b"]


@pytest.mark.parametrize("name", ["", "-a", "a b", "ä", "a\n", "x" * 65])
def test_a_name_must_travel_in_a_header(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidArgument, match="name of a key"):
        add_key(tmp_path, name, KeyRole.INFER, 0.0)


@pytest.mark.parametrize("text", ["{", "[]", '{"keys": [{"name": "a"}]}', '{"keys": [1]}'])
def test_a_damaged_file_is_named_and_lets_no_key_in(tmp_path: Path, text: str) -> None:
    (tmp_path / KEYS_FILE).write_text(text)
    with pytest.raises(StoreFailed, match=KEYS_FILE):
        read_keys(tmp_path)
    with pytest.raises(StoreFailed, match=KEYS_FILE):
        add_key(tmp_path, "a", KeyRole.INFER, 0.0)
    assert (tmp_path / KEYS_FILE).read_text() == text


async def test_a_ring_sees_new_keys_at_once_and_removed_ones_within_a_second(
    tmp_path: Path,
) -> None:
    clock = FakeClock()
    ring = KeyRing(tmp_path, clock.mono)
    assert await ring.find("kakeya-guess") is None
    first = await to_thread(add_key, tmp_path, "a", KeyRole.INFER, 0.0)
    second = await to_thread(add_key, tmp_path, "b", KeyRole.ADMIN, 0.0)
    for key, name in ((first, "a"), (second, "b")):
        found = await ring.find(key)
        assert found is not None
        assert found.name == name
    await to_thread(remove_key, tmp_path, "a")
    clock.advance(1.0)
    assert await ring.find(first) is None
    assert await ring.find(second) is not None
    await to_thread((tmp_path / KEYS_FILE).write_text, "damaged")
    clock.advance(1.0)
    assert await ring.find(second) is None
