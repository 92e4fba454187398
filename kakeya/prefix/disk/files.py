"""The folder of stored blocks: writes, reads, removes and sets files aside. Everything here blocks.

    ab/abcd...64 hex digits.long.kvb   a block (`kvb`); its retention; mtime = its last use
    ab/.abcd....kvb.tmp                one that is being written, or was cut off
    quarantine/                        damaged files, bounded in bytes, the oldest goes

A file appears under its name by a rename, after an fsync of its own: whatever happens while it is
written, there is the old one, or none, or the whole one. The folder is not synced: after a power
cut a name may be missing, which costs one cold prefill, and the other half of the flushes (2-6 ms
each, in which other files of the node wait as well) is saved. Folders are 0700, files 0600; no
link is followed.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from kakeya.core.files import exclude_from_backup, flush_in_order
from kakeya.generation.retention import Retention
from kakeya.prefix.disk.index import (
    QUARANTINE,
    SUFFIX,
    TEMPORARY,
    BlockFile,
    name_of,
    names_of,
    parse_name,
)
from kakeya.prefix.disk.kvb import (
    DamagedBlock,
    Head,
    Payload,
    StoredBlock,
    read_head,
    read_payload,
    read_sealed,
    write_block,
)
from kakeya.prefix.disk.wipe import Removal, shards_of, wipe_folder
from kakeya.prefix.names.blocks import BlockId
from kakeya.prefix.names.fingerprint import Facts

_BROKEN = frozenset({errno.EIO, errno.ELOOP, errno.EISDIR, errno.ENXIO})
"""Errors of a file that will be the same later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundFile(BlockFile):
    """A whole header in the folder; the payload behind it was not read."""

    used_at: float  # wall seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """A damaged file."""

    name: str
    problem: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """The files of the folder."""

    files: tuple[FoundFile, ...] = ()
    damage: tuple[Damage, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """The result of reading blocks whole."""

    blocks: int = 0
    read_bytes: int = 0
    damage: tuple[Damage, ...] = ()
    unreadable: int = 0  # now, though maybe not later


class BlockFolder:
    """One folder of blocks. Its owner writes from one thread; reads may come from several."""

    def __init__(self, folder: Path, *, quarantine_bytes: int) -> None:
        self.folder = folder
        self._quarantine_bytes = quarantine_bytes

    def free_bytes(self) -> int:
        """Room on the disk. Raises OSError."""
        self._make(self.folder)
        found = os.statvfs(self.folder)
        return found.f_bavail * found.f_frsize

    def scan(
        self,
        *,
        is_owner: bool = True,
        sets_aside: bool = True,
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> Contents:
        """Read every header; damaged files are set aside. Raises OSError for the folder alone.

        The owner also removes the remains of cut-off writes; another process may read beside it.
        """
        if is_owner:
            with contextlib.suppress(OSError):  # one that cannot be changed may still be read
                self._make(self.folder)
                self.folder.chmod(0o700)
                exclude_from_backup(self.folder)
        files: dict[BlockId, FoundFile] = {}
        damage: list[Damage] = []
        facts: dict[bytes, Facts] = {}
        for entry in self._entries(is_owner=is_owner):
            if not is_wanted():
                break
            try:
                found = _look_at(entry, facts)
            except FileNotFoundError:
                continue
            except (DamagedBlock, OSError) as problem:
                if isinstance(problem, OSError) and problem.errno not in _BROKEN:
                    continue
                if sets_aside:
                    self.set_aside(Path(entry.path))
                damage.append(Damage(name=entry.name, problem=str(problem)))
                continue
            other = files.get(found.block.id)
            keep, lose = _better(found, other)
            files[found.block.id] = keep
            if lose is not None and is_owner:
                self.remove_all((lose.name,), keep=keep.name)
        return Contents(files=tuple(files.values()), damage=tuple(damage))

    def write(
        self, block: StoredBlock, payload: Payload, retention: Retention, used_at: float
    ) -> tuple[str, Head]:
        """Write a block under its name, unless it is there; its name, and how it begins.

        Raises InvalidArgument, OSError.
        """
        name = name_of(block.id, retention)
        path = self._path(name)
        self._make(self.folder)
        self._make(path.parent)
        aside = path.with_name(f".{block.id.hex()}{SUFFIX}{TEMPORARY}")
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            with io.FileIO(os.open(aside, flags, 0o600), "w") as file:
                head = write_block(file, block, payload)
                flush_in_order(file.fileno())
                os.utime(file.fileno(), (used_at, used_at))
            aside.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                aside.unlink(missing_ok=True)
            raise
        return name, head

    def read(
        self,
        name: str,
        block_id: BlockId,
        into: Callable[[StoredBlock], memoryview | None],
        is_wanted: Callable[[], bool],
        *,
        known: Head | None = None,
    ) -> StoredBlock | None:
        """Read a block into the view that `into` gives for it; None = it gave none, or is not
        wanted.

        Under another name too, which another thread may have given it since. The proof is SHA-256;
        with `known`, how the file began when it was last looked at, that of its parts. Raises
        DamagedBlock, and then it was set aside; OSError.
        """
        read = partial(self._read, block_id=block_id, into=into, is_wanted=is_wanted, known=known)
        *others, last = names_of(name)
        for other in others:
            with contextlib.suppress(FileNotFoundError):
                return read(self._path(other))
        return read(self._path(last))

    def _read(
        self,
        path: Path,
        *,
        block_id: BlockId,
        into: Callable[[StoredBlock], memoryview | None],
        is_wanted: Callable[[], bool],
        known: Head | None,
    ) -> StoredBlock | None:
        try:
            with _opened(path) as file:
                found = os.fstat(file.fileno())
                if known is not None and stat.S_ISREG(found.st_mode):
                    view = into(known.block)
                    if view is None:
                        return None
                    with contextlib.suppress(DamagedBlock):  # it may begin otherwise now
                        is_read = read_sealed(file, known.seal, view, is_wanted)
                        return known.block if is_read else None
                    file.seek(0)
                head = _head(file, found, block_id)
                view = into(head.block)
                if view is None or not read_payload(file, head, view, is_wanted):
                    return None
                return head.block
        except DamagedBlock:
            self.set_aside(path)
            raise
        except OSError as problem:
            if problem.errno not in _BROKEN:
                raise
            self.set_aside(path)
            raise DamagedBlock(f"it cannot be read: {problem.strerror}") from None

    def tell(self, name: str, block_id: BlockId, retention: Retention, used_at: float) -> str:
        """Let a file show its last use and its retention; its name from then on. Raises OSError."""
        path = self._path(name)
        os.utime(path, (used_at, used_at), follow_symlinks=False)
        wanted = name_of(block_id, retention)
        if wanted != name:
            path.replace(self._path(wanted))
        return wanted

    def remove_all(self, names: Iterable[str], keep: str = "") -> Mapping[str, OSError]:
        """Delete files, or find them gone; the names of those that cannot be, and why.

        Each block is removed under all names that `tell` may have given it meanwhile, but for
        `keep`: a file that the index does not know would stay for ever.
        """
        kept: dict[str, OSError] = {}
        for name in names:
            try:
                for other in names_of(name):
                    if other != keep:
                        self._path(other).unlink(missing_ok=True)
            except OSError as problem:
                kept[name] = problem
        return kept

    def gone(self, names: Iterable[str]) -> frozenset[str]:
        """Find files that another process removed; a file that cannot be read now counts as
        there."""
        missing: set[str] = set()
        for name in names:
            try:
                self._path(name).lstat()
            except (FileNotFoundError, NotADirectoryError):
                missing.add(name)
            except OSError:
                continue
        return frozenset(missing)

    def set_aside(self, path: Path) -> None:
        """Move a damaged file to the quarantine, or remove it; harmless when neither can be."""
        quarantine = self.folder / QUARANTINE
        with contextlib.suppress(OSError):
            self._make(quarantine)
            path.replace(quarantine / path.name)
            self._bound(quarantine)

    def quarantined(self) -> tuple[int, int]:
        """How many files were set aside and are still there, and their bytes."""
        sizes = [found.st_size for _, found in _files_in(self.folder / QUARANTINE)]
        return len(sizes), sum(sizes)

    def verify(
        self, names: Iterable[tuple[str, BlockId]], is_wanted: Callable[[], bool]
    ) -> Verified:
        """Read blocks whole, one by one; damaged ones are set aside, those that went are fine."""
        blocks = read_bytes = unreadable = 0
        damage: list[Damage] = []
        room = bytearray()

        def into(block: StoredBlock) -> memoryview:
            nonlocal room
            if len(room) < block.payload_bytes:
                room = bytearray(block.payload_bytes)
            return memoryview(room)[: block.payload_bytes]

        for name, block_id in names:
            try:
                block = self.read(name, block_id, into, is_wanted)
            except FileNotFoundError:
                continue
            except DamagedBlock as problem:
                damage.append(Damage(name=name, problem=str(problem)))
            except OSError:
                unreadable += 1
            else:
                if block is None:
                    break
                blocks += 1
                read_bytes += block.payload_bytes
        return Verified(
            blocks=blocks, read_bytes=read_bytes, damage=tuple(damage), unreadable=unreadable
        )

    def wipe(self) -> Removal:
        """Remove every block, the remains of cut-off writes, and the quarantine. For the owner."""
        return wipe_folder(self.folder)

    def _path(self, name: str) -> Path:
        return self.folder / name[:2] / name

    def _make(self, folder: Path) -> None:
        if not folder.is_dir():
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if folder == self.folder:
                exclude_from_backup(folder)

    def _entries(self, *, is_owner: bool) -> Iterator[os.DirEntry[str]]:
        for shard in shards_of(self.folder):
            try:
                with os.scandir(shard) as found:
                    inside = list(found)
            except OSError:
                continue
            for entry in inside:
                if entry.name.endswith(SUFFIX):
                    yield entry
                elif is_owner and entry.name.endswith(SUFFIX + TEMPORARY):
                    with contextlib.suppress(OSError):
                        Path(entry.path).unlink(missing_ok=True)

    def _bound(self, quarantine: Path) -> None:
        files = sorted(_files_in(quarantine), key=lambda file: file[1].st_ctime)
        total = sum(found.st_size for _, found in files)
        for path, found in files:
            if total <= self._quarantine_bytes:
                break
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
                total -= found.st_size


def _look_at(entry: os.DirEntry[str], shared: dict[bytes, Facts]) -> FoundFile:
    parsed = parse_name(entry.name)
    if parsed is None:
        raise DamagedBlock("its name is no block's")
    with _opened(entry.path) as file:
        found = os.fstat(file.fileno())
        head = _head(file, found, parsed[0], shared)
    return FoundFile(head=head, name=entry.name, retention=parsed[1], used_at=found.st_mtime)


def _head(
    file: io.FileIO,
    found: os.stat_result,
    block_id: BlockId,
    shared: dict[bytes, Facts] | None = None,
) -> Head:
    if not stat.S_ISREG(found.st_mode):
        raise DamagedBlock("it is no file")
    head = read_head(file, found.st_size, shared)
    if head.block.id != block_id:
        raise DamagedBlock(f"it holds block {head.block.id.hex()}")
    return head


def _opened(path: str | Path) -> io.FileIO:
    # Not blocking: a pipe under a block's name would wait for a writer.
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    return io.FileIO(os.open(path, flags), "r")


def _files_in(folder: Path) -> list[tuple[Path, os.stat_result]]:
    try:
        with os.scandir(folder) as found:
            return [(Path(entry.path), entry.stat(follow_symlinks=False)) for entry in found]
    except OSError:
        return []


def _better(one: FoundFile, other: FoundFile | None) -> tuple[FoundFile, FoundFile | None]:
    """Of two files of one block keep the one that says more; a kill leaves both for a moment."""
    if other is None:
        return one, None
    if (one.block.has_state, one.retention) > (other.block.has_state, other.retention):
        return one, other
    return other, one
