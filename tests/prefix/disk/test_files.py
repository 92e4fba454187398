"""The folder of blocks: what is written, what a stranger put there, and what a kill leaves."""

from __future__ import annotations

import functools
import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from kakeya.generation.retention import Retention
from kakeya.prefix.disk.files import QUARANTINE, BlockFolder
from kakeya.prefix.disk.index import name_of
from kakeya.prefix.disk.kvb import DamagedBlock, StoredBlock, file_bytes
from kakeya.prefix.disk.wipe import Removal
from tests.prefix.disk.world import Made, block_of

AT = 1_700_000_000.0
CHILD = Path(__file__).with_name("child.py")


@pytest.fixture
def folder(tmp_path: Path) -> BlockFolder:
    return BlockFolder(tmp_path / "kv", quarantine_bytes=10_000)


def write(folder: BlockFolder, made: Made, retention: Retention = Retention.LONG) -> Path:
    name, head = folder.write(*made, retention, AT)
    path = folder.folder / name[:2] / name
    assert path.stat().st_size == file_bytes(head)
    return path


def read(folder: BlockFolder, path: Path, block_id: bytes) -> bytes | None:
    room = bytearray()

    def into(block: StoredBlock) -> memoryview:
        room.extend(bytes(block.payload_bytes))
        return memoryview(room)

    found = folder.read(path.name, block_id, into, lambda: True)
    return None if found is None else bytes(room)


def aside(folder: BlockFolder) -> list[str]:
    return sorted(path.name for path in (folder.folder / QUARANTINE).glob("*"))


def test_only_the_owner_may_look_at_blocks(folder: BlockFolder) -> None:
    path = write(folder, block_of())
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    for each in (path.parent, folder.folder):
        assert stat.S_IMODE(each.stat().st_mode) == 0o700
    folder.folder.chmod(0o755)
    folder.scan()
    assert stat.S_IMODE(folder.folder.stat().st_mode) == 0o700


def test_a_file_says_its_last_use_and_its_retention(folder: BlockFolder) -> None:
    block, payload = block_of()
    path = write(folder, (block, payload), Retention.SHORT)
    (found,) = folder.scan().files
    assert (found.block, found.retention, found.used_at) == (block, Retention.SHORT, AT)
    name = folder.tell(path.name, block.id, Retention.EXTENDED, AT + 99)
    (found,) = folder.scan().files
    assert found.name == name == name_of(block.id, Retention.EXTENDED)
    assert (found.retention, found.used_at) == (Retention.EXTENDED, AT + 99)


def test_a_name_without_a_retention_counts_as_long_and_is_read(folder: BlockFolder) -> None:
    block, payload = block_of()
    path = write(folder, (block, payload))
    plain = path.rename(path.with_name(f"{block.id.hex()}.kvb"))
    (found,) = folder.scan().files
    assert found.retention is Retention.LONG
    assert read(folder, plain, block.id) == payload


def test_what_a_cut_off_write_left_goes_when_the_owner_starts(folder: BlockFolder) -> None:
    path = write(folder, block_of())
    left = path.with_name(f".{path.stem}.kvb.tmp")
    left.write_bytes(b"half")
    folder.scan(is_owner=False)
    assert left.exists()
    assert len(folder.scan().files) == 1
    assert not left.exists()


def test_a_damaged_file_is_set_aside_and_the_others_stay(folder: BlockFolder) -> None:
    good, cut, flipped, moved = (write(folder, block_of(seed)) for seed in range(4))
    cut.write_bytes(cut.read_bytes()[:-1])
    data = bytearray(flipped.read_bytes())
    data[20] ^= 1
    flipped.write_bytes(data)
    stranger = moved.with_name("cd" * 32 + ".long.kvb")
    moved.rename(stranger)
    contents = folder.scan()
    assert [found.name for found in contents.files] == [good.name]
    assert {damage.name for damage in contents.damage} == {cut.name, flipped.name, stranger.name}
    assert aside(folder) == sorted([cut.name, flipped.name, stranger.name])
    assert folder.scan().damage == ()


def test_looking_without_setting_aside_leaves_everything_as_it_is(folder: BlockFolder) -> None:
    path = write(folder, block_of())
    path.write_bytes(b"foreign")
    contents = folder.scan(is_owner=False, sets_aside=False)
    assert [damage.name for damage in contents.damage] == [path.name]
    assert path.read_bytes() == b"foreign"


def test_strange_things_under_a_blocks_name_are_set_aside(folder: BlockFolder) -> None:
    shard = write(folder, block_of()).parent
    secret = folder.folder.parent / "secret"
    secret.write_text("not ours")
    names = [f"{shard.name}{digit * 62}.long.kvb" for digit in "abcd"]
    os.mkfifo(shard / names[0])
    (shard / names[1]).symlink_to(secret)
    (shard / names[2]).mkdir()
    (shard / names[3]).write_bytes(b"")
    (shard / "notes.txt").write_text("left alone")
    assert len(folder.scan().files) == 1
    assert aside(folder) == names
    assert secret.read_text() == "not ours"
    assert (shard / "notes.txt").exists()


def test_a_folder_that_is_a_link_is_not_followed(folder: BlockFolder, tmp_path: Path) -> None:
    path = write(folder, block_of())
    path.parent.rename(tmp_path / "elsewhere")
    path.parent.symlink_to(tmp_path / "elsewhere")
    assert folder.scan().files == ()


def test_a_damaged_payload_is_set_aside_when_it_is_read(folder: BlockFolder) -> None:
    block, payload = block_of()
    path = write(folder, (block, payload))
    data = bytearray(path.read_bytes())
    data[-40] ^= 1
    path.write_bytes(data)
    assert len(folder.scan().files) == 1, "headers alone do not show it"
    with pytest.raises(DamagedBlock):
        read(folder, path, block.id)
    assert aside(folder) == [path.name]
    with pytest.raises(FileNotFoundError):
        read(folder, path, block.id)


def test_the_quarantine_is_bounded_and_the_oldest_goes(folder: BlockFolder) -> None:
    for seed in range(6):
        path = write(folder, block_of(seed, size=3000))
        path.write_bytes(b"\0" * 3000)
        folder.scan()
    assert folder.quarantined() == (3, 9000)
    huge = write(folder, block_of(9, size=20_000))
    huge.write_bytes(b"\0" * 20_000)
    folder.scan()
    assert folder.quarantined() == (0, 0)
    assert not huge.exists()


def test_of_two_files_of_one_block_the_better_stays(folder: BlockFolder) -> None:
    block, payload = block_of()
    short = write(folder, (block, payload), Retention.SHORT)
    long = write(folder, (block, payload), Retention.LONG)
    (found,) = folder.scan().files
    assert found.name == long.name
    assert not short.exists()


def test_verifying_reads_everything_and_names_what_is_damaged(folder: BlockFolder) -> None:
    made = [block_of(seed) for seed in range(3)]
    paths = [write(folder, one) for one in made]
    data = bytearray(paths[1].read_bytes())
    data[-1] ^= 1
    paths[1].write_bytes(data)
    paths[2].unlink()
    names = [(path.name, block.id) for path, (block, _) in zip(paths, made, strict=True)]
    found = folder.verify(names, lambda: True)
    assert (found.blocks, found.read_bytes, found.unreadable) == (1, 1000, 0)
    assert [damage.name for damage in found.damage] == [paths[1].name]
    assert folder.verify(names, lambda: False).blocks == 0


def test_wiping_leaves_only_what_is_not_ours(folder: BlockFolder) -> None:
    paths = [write(folder, block_of(seed)) for seed in range(3)]
    paths[0].write_bytes(b"")
    folder.scan()
    (paths[1].parent / "notes.txt").write_text("left alone")
    assert folder.wipe() == Removal(files=3)
    assert folder.wipe() == Removal()
    left = [path.name for path in folder.folder.rglob("*") if path.is_file()]
    assert left == ["notes.txt"]


def test_a_folder_that_is_not_there_is_empty_for_who_only_looks(folder: BlockFolder) -> None:
    assert folder.scan(is_owner=False).files == ()
    assert folder.gone(["x"]) == {"x"}
    assert folder.wipe() == Removal()
    assert not folder.folder.exists()


def test_what_cannot_be_removed_or_looked_into_is_named(folder: BlockFolder) -> None:
    """A folder in the place of a file, and a file in that of a folder, as also root meets them."""
    path = write(folder, block_of())
    blocks = path.with_name("x.kvb"), path.with_name(".x.kvb.tmp")
    for block in blocks:
        block.mkdir()
    (folder.folder / QUARANTINE).write_text("in the way")
    done = folder.wipe()
    assert done.files == 1
    assert {kept.partition(": ")[0] for kept in done.kept} == {
        *map(str, blocks),
        str(folder.folder / QUARANTINE),
    }
    assert f"{folder.folder / QUARANTINE}: Not a directory" in done.kept


def run_child(*arguments: str, before: tuple[str, ...] = ()) -> dict[str, object]:
    done = subprocess.run(
        [*before, sys.executable, str(CHILD), *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=Path(__file__).parents[3],
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert isinstance(found, dict)
    return found


def test_a_kill_at_any_line_of_a_write_leaves_the_old_block_or_the_new_one(
    tmp_path: Path,
) -> None:
    found = run_child("lines", str(tmp_path / "kv"))
    assert found["wrong"] == []
    assert found["old"] > 20, "kills that came before the rename"  # type: ignore[operator]
    assert found["new"] > 0, "kills that came after it"  # type: ignore[operator]
    assert found["cut_off"] > 5, "kills that left half a file aside"  # type: ignore[operator]


def test_a_kill_at_any_moment_leaves_only_whole_blocks(tmp_path: Path) -> None:
    found = run_child("moments", str(tmp_path / "kv"))
    assert found["damaged"] == 0
    assert found["whole"] > 0  # type: ignore[operator]


@functools.cache
def may_mount() -> bool:
    """Whether this is a machine on which a test may have a file system of its own."""
    if sys.platform != "linux" or shutil.which("unshare") is None:
        return False
    tried = subprocess.run(
        ["unshare", "-m", "mount", "-t", "tmpfs", "tmpfs", "/mnt"],
        capture_output=True,
        timeout=10,
        check=False,
    )
    return tried.returncode == 0


@pytest.mark.skipif(not may_mount(), reason="needs root on Linux: mounts a disk for itself")
def test_a_disk_that_is_full_or_read_only_costs_no_more_than_misses(tmp_path: Path) -> None:
    found = run_child("disks", str(tmp_path / "disk"), before=("unshare", "-m"))
    assert found == {
        "kept": 3,
        "failures": 1,
        "trouble": found["trouble"],
        "readable": [True] * 3,
        "again": True,
        "restarted": True,
    }
    assert "Read-only file system" in str(found["trouble"])
