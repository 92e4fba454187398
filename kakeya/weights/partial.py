"""A model that is being fetched, on disk: a hidden folder, renamed once it is whole.

    FOLDER/.pulls/DIGEST      its files, with holes where pieces are missing
    FOLDER/NAME               after the rename

What is there is proven by the digests of the manifest whenever a fetch begins, so nothing has to be
noted while it runs, and a kill at any moment costs at most the pieces that were on their way.
Everything here blocks; OSError tells of the disk.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from kakeya.core.errors import Conflict, PeerProtocol, Refused, StoreFailed
from kakeya.core.files import flush, sync_folder
from kakeya.core.units import MIB, format_bytes
from kakeya.weights.found import PullRecord, is_model, write_record
from kakeya.weights.manifest import PieceOfFile, WeightsManifest, spans

PULLS = ".pulls"
_REMOVED = "removed-"
SPARE_BYTES = 256 * MIB
"""Left free on the disk beside a model, for all else that writes there."""
_READ_BYTES = 4 * MIB


class DiskRefused(Refused):
    """No room on the disk for a model, or none that its owner allows."""

    code = "disk_refused"


class PartialModel:
    """The files of one manifest in the making."""

    def __init__(self, models: Path, manifest: WeightsManifest, folder: Path | None = None) -> None:
        """`folder` has the files, None = the one of the digest."""
        self._models = models
        self.manifest = manifest
        self.folder = folder or models / PULLS / manifest.digest

    def open(self, record: PullRecord) -> None:
        """Make the folder, the folders in it, and the files."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_record(self.folder, record)
        for file in self.manifest.files:
            path = self.folder / file.name
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.touch(mode=0o600)

    def check_room(self) -> None:
        """Raise DiskRefused where the disk has no room for what is missing."""
        check_free(self._models, self.folder, self.manifest.bytes)

    def present(self, told: Callable[[int], None], is_given_up: Callable[[], bool]) -> set[int]:
        """The pieces that are there and right; `told` hears of each piece's bytes."""
        found: set[int] = set()
        first = 0
        for file in self.manifest.files:
            with (self.folder / file.name).open("rb", buffering=0) as opened:
                for place, (offset, size) in enumerate(spans(file.size)):
                    if is_given_up():
                        return found
                    if _has_data(opened.fileno(), offset, size):
                        data = _pread(opened.fileno(), size, offset)
                        if hashlib.sha256(data).digest() == file.pieces[place]:
                            found.add(first + place)
                            told(size)
            first += len(file.pieces)
        return found

    def write(self, piece: PieceOfFile, data: bytearray) -> None:
        """Write one piece that was proven. Raises DiskRefused for a full disk, StoreFailed for
        another fault."""
        path = self.folder / self.manifest.files[piece.file].name
        try:
            handle = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                view, at = memoryview(data), piece.offset
                while view:
                    written = os.pwrite(handle, view, at)
                    view, at = view[written:], at + written
            finally:
                os.close(handle)
        except OSError as problem:
            raise disk_error(problem, path) from problem

    def read(self, piece: PieceOfFile) -> bytes:
        """The bytes of a piece that is there. Raises OSError."""
        with (self.folder / self.manifest.files[piece.file].name).open("rb") as opened:
            return os.pread(opened.fileno(), piece.size, piece.offset)

    def unproven(self, is_given_up: Callable[[], bool]) -> set[int]:
        """Prove each file by its digest, once all pieces came; the pieces that are wrong on the
        disk after all, which only a fault of it can bring about. Raises PeerProtocol for a manifest
        that contradicts itself."""
        wrong: set[int] = set()
        first = 0
        for file in self.manifest.files:
            path = self.folder / file.name
            os.truncate(path, file.size)  # a damaged folder may have a longer file
            whole = hashlib.sha256()
            with path.open("rb", buffering=0) as opened:
                while (data := opened.read(_READ_BYTES)) and not is_given_up():
                    whole.update(data)
            if whole.digest() != file.sha256 and not is_given_up():
                found = set()
                with path.open("rb", buffering=0) as opened:
                    for place, (offset, size) in enumerate(spans(file.size)):
                        data = os.pread(opened.fileno(), size, offset)
                        if hashlib.sha256(data).digest() != file.pieces[place]:
                            found.add(first + place)
                if not found:
                    raise PeerProtocol(
                        f"the pieces of {file.name} are those that were told, the file is not: the "
                        f"node that lists it so has wrong digests; remove {self.folder}"
                    )
                wrong |= found
            first += len(file.pieces)
        return wrong

    def finish(self, record: PullRecord) -> Path:
        """Make the model appear under its name, whole; return where it lies. Raises Conflict where
        something has the name."""
        target = self._models / record.name
        keep = {self.folder / file.name for file in self.manifest.files}
        for path in self.folder.rglob("*"):
            if path.is_file() and path not in keep:
                path.unlink()
        for path in self.folder.glob(".*/"):  # notes of a download
            shutil.rmtree(path)
        write_record(self.folder, record)
        for path in keep:
            handle = os.open(path, os.O_RDONLY)
            try:
                flush(handle)
            finally:
                os.close(handle)
        sync_folder(self.folder)
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if os.path.lexists(target):
            raise Conflict(f"{target} is there already; remove it, then pull {record.name} again")
        self.folder.rename(target)
        sync_folder(target.parent)
        with contextlib.suppress(OSError):
            (self._models / PULLS).rmdir()  # others may be in the making
        return target


def check_free(models: Path, folder: Path, size: int) -> None:
    """Raise DiskRefused where the disk has no room for what is missing in a folder of a model of so
    many bytes. Blocks."""
    needed = max(0, size - disk_bytes(folder)) + SPARE_BYTES
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise DiskRefused(
            f"the disk of {models} has {format_bytes(free)} free, and this model needs "
            f"{format_bytes(needed)} more; make room, for example with `kakeya models rm`"
        )


def check_target(models: Path, name: str) -> None:
    """Raise Conflict where a model cannot get this name. Blocks."""
    target = models / name
    if os.path.lexists(target):
        raise Conflict(f"another model lies in {target}; remove it first (kakeya models rm {name})")
    if target.parent != models and is_model(target.parent):
        raise Conflict(f"{target} would lie within another model; move {target.parent} away first")


def disk_bytes(folder: Path) -> int:
    """The room that a folder takes on its disk, without what vanishes meanwhile."""
    found = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                found += (Path(place) / name).lstat().st_blocks * 512
    return found


def sweep(models: Path) -> None:
    """Remove the rest of models, the removal of which did not come to its end."""
    for path in (models / PULLS).glob(f"{_REMOVED}*"):
        shutil.rmtree(path, ignore_errors=True)


def remove_folder(models: Path, path: Path) -> None:
    """Remove a model that a pull brought: at once from its name, then its files. Raises OSError."""
    pulls = models / PULLS
    pulls.mkdir(mode=0o700, exist_ok=True)
    aside = Path(tempfile.mkdtemp(dir=pulls, prefix=_REMOVED))
    path.rename(aside / "model")
    shutil.rmtree(aside)
    for folder in (path.parent, pulls):
        if folder != models:
            with contextlib.suppress(OSError):
                folder.rmdir()  # where nothing else is in it


def disk_error(problem: OSError, path: Path) -> StoreFailed | DiskRefused:
    """What a fault of the disk is for a caller."""
    if problem.errno in (errno.ENOSPC, errno.EDQUOT):
        return DiskRefused(
            f"the disk of {path.parent} is full; make room, then pull again: what came is kept"
        )
    return StoreFailed(f"{path} cannot be written: {problem.strerror or problem}")


def _pread(handle: int, size: int, offset: int) -> bytes:
    """The bytes of a part of a file; none where the disk cannot read it, so that it is written
    anew."""
    try:
        return os.pread(handle, size, offset)
    except OSError:
        return b""


def _has_data(handle: int, offset: int, size: int) -> bool:
    """Whether a part of a file may be other than a hole."""
    try:
        return os.lseek(handle, offset, os.SEEK_DATA) < offset + size
    except OSError:  # behind the last byte, or behind the last data
        return False
