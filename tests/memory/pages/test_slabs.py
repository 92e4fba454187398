"""Shared memory that is made, mapped by name, aligned, and gone when its owner is."""

from __future__ import annotations

import ctypes
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from kakeya.core.errors import Conflict, InvalidArgument, OutOfPages, PageFreed
from kakeya.core.units import KIB
from kakeya.memory.pages.slabs import MappedSlab, SlabStore, header_bytes, map_slab

PAGE = 512 * KIB


def store(folder: Path, token: str, pages: int = 2) -> SlabStore:
    return SlabStore(folder, token, pages=pages, page_bytes=PAGE)


def is_there(name: str) -> bool:
    try:
        map_slab(name, pages=2, page_bytes=PAGE).close()
    except PageFreed:
        return False
    return True


def address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def test_what_one_mapping_writes_another_reads(tmp_path: Path) -> None:
    with store(tmp_path, "t1") as owner:
        made = owner.make()
        made.bytes_of(1, 4)[:] = b"kept"
        made.publish(1, 7)
        seen = map_slab(made.name, pages=2, page_bytes=PAGE)
        assert bytes(seen.bytes_of(1, 4)) == b"kept"
        assert (seen.stamp(0), seen.stamp(1)) == (0, 7)
        made.retract(1)
        assert seen.stamp(1) == 0
        seen.close()


def test_a_reader_cannot_write(tmp_path: Path) -> None:
    with store(tmp_path, "t2") as owner:
        seen = map_slab(owner.make().name, pages=2, page_bytes=PAGE)
        with pytest.raises(TypeError):
            seen.bytes_of(0, 4)[:] = b"evil"
        with pytest.raises(TypeError):
            seen.publish(0, 1)
        seen.close()


@pytest.mark.parametrize("pages", [1, 128, 4096])
def test_every_page_is_aligned_to_256_bytes(tmp_path: Path, pages: int) -> None:
    """S2.5."""
    assert header_bytes(pages) % (16 * KIB) == 0
    assert header_bytes(pages) >= 8 * pages
    if pages == 1:
        with store(tmp_path, "t3") as owner:
            view = owner.make().bytes_of(0, PAGE)
            assert address(view) % 256 == 0
            view.release()


def test_a_slab_that_was_taken_away_cannot_be_mapped(tmp_path: Path) -> None:
    with store(tmp_path, "t4") as owner:
        one, other = owner.make(), owner.make()
        owner.remove(one)
        assert not is_there(one.name)
        assert is_there(other.name)
        with pytest.raises(InvalidArgument, match="bytes, and"):
            map_slab(other.name, pages=2000, page_bytes=PAGE)
    assert not is_there(other.name)
    owner.close()
    assert list(tmp_path.glob("*.arena")) == []


def test_a_closed_store_makes_nothing_also_when_it_closes_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = store(tmp_path, "t7")
    truncate = os.ftruncate

    def closed_meanwhile(handle: int, size: int) -> None:
        truncate(handle, size)
        owner.close()

    monkeypatch.setattr(os, "ftruncate", closed_meanwhile)
    with pytest.raises(Conflict, match="closed while"):
        owner.make()
    assert not is_there("/kk-t7-0")
    with pytest.raises(Conflict, match="is closed"):
        owner.make()


def test_a_view_outlives_its_slab(tmp_path: Path) -> None:
    with store(tmp_path, "t5") as owner:
        slab: MappedSlab = owner.make()
        view = slab.bytes_of(0, 4)
        view[:] = b"last"
        owner.remove(slab)
        assert bytes(view) == b"last"


def test_a_name_fits_into_what_macos_allows(tmp_path: Path) -> None:
    with store(tmp_path, "a" * 20, pages=1) as owner:
        assert len(owner.make().name) <= 31
    for token in ("", "a" * 21, "a/b", "ä"):
        with pytest.raises(InvalidArgument, match=r"1\.\.20 letters or digits"):
            store(tmp_path, token)


@pytest.mark.skipif(sys.platform != "linux", reason="macOS grants memory only when it is touched")
def test_memory_that_the_machine_lacks_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    with SlabStore(tmp_path, "t6", pages=1 << 25, page_bytes=4096 * KIB) as owner:
        with pytest.raises(OutOfPages, match=r"no .* bytes of shared memory"):
            owner.make()
        assert not is_there("/kk-t6-0")


@pytest.mark.parametrize("most_bytes", [0, 64 * KIB])
def test_whatever_is_full_or_limited_there_are_no_pages_and_no_other_error(
    tmp_path: Path, most_bytes: int
) -> None:
    """Of files: first the list of names cannot be written, then the slab is too large."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with SlabStore(tmp_path, "t8", pages=16, page_bytes=16 * KIB) as owner:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, hard))
        try:
            with pytest.raises(OutOfPages, match="File too large"):
                owner.make()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert not is_there("/kk-t8-0")
        assert owner.make().name == "/kk-t8-1"


@pytest.mark.skipif(sys.platform != "linux", reason="/dev/shm")
def test_the_memory_of_a_slab_is_there_before_it_is_touched(tmp_path: Path) -> None:
    """Else a full tmpfs ends the process at the first touch."""
    with store(tmp_path, "t8") as owner:
        found = Path("/dev/shm", owner.make().name[1:]).stat()
        assert found.st_blocks * 512 >= found.st_size == header_bytes(2) + 2 * PAGE
        assert found.st_mode & 0o777 == 0o600


KILLED = """
import os, signal, sys
from pathlib import Path
from kakeya.memory.pages.slabs import SlabStore
owner = SlabStore(Path(sys.argv[1]), sys.argv[2], pages=2, page_bytes=512 * 1024)
print(owner.make().name, owner.make().name, flush=True)
sys.stdin.read()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_owner_left_goes_at_the_next_start_and_what_lives_stays(
    tmp_path: Path,
) -> None:
    command = [sys.executable, "-c", KILLED, str(tmp_path), "victim"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stdin is not None
        names = child.stdout.readline().split()
        with store(tmp_path, "early") as early:
            assert early.leftovers == ()
            kept = early.make()
            assert all(map(is_there, names))
            child.stdin.close()
            assert child.wait(10) == -9
            assert all(map(is_there, names)), "nothing of the child's own could remove them"
            with store(tmp_path, "later") as later:
                assert later.leftovers == tuple(names)
            assert not any(map(is_there, names))
            assert is_there(kept.name)


def test_a_list_that_names_what_is_not_its_own_removes_nothing_else(tmp_path: Path) -> None:
    with store(tmp_path, "owner") as owner:
        kept = owner.make()
        (tmp_path / "forged.arena").write_text(f"{kept.name}\n/kk-forged-0\nnoise\n")
        with store(tmp_path, "later") as later:
            assert later.leftovers == ()
        assert is_there(kept.name)
        assert not (tmp_path / "forged.arena").exists()
