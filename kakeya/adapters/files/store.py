"""Registered adapters on disk: one file each, compressed, with a description in its first line.

    KLORA1 CRC {"name": ..., "base": ..., "owner": ..., "digest": ...}\n
    zlib of the packed adapter

The files are the whole truth: a start reads their first lines, and the bytes behind are checked
when they are read (zlib's own check, and the digest of the packed form). A damaged file is renamed
to *.damaged and named in the log, unless another was written in its place since it was read; the
others are not affected. A disk that fails or is full is StoreFailed. Everything here blocks, and
any thread may call it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import threading
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from kakeya.adapters.files.packed import digest, unpack
from kakeya.core.errors import Conflict, InvalidArgument, LoadFailed, StoreFailed
from kakeya.core.files import sync_folder, write_atomically
from kakeya.core.log import event

_log = logging.getLogger(__name__)
_MAGIC = b"KLORA1"
_SUFFIX, _DAMAGED = ".klora", ".damaged"
_LEVEL = 3
_HEADER_BYTES = 4096
_VERSION_CHARS = 12


class AdapterDamaged(LoadFailed):
    """The file of an adapter is gone or damaged; it must be registered again."""

    code = "adapter_damaged"
    retryable = False


class BaseReplaced(InvalidArgument):
    """An adapter was added for other weights than its base has; it must be added again."""

    code = "base_replaced"


class AdapterReplaced(Conflict):
    """The file of an adapter holds another version; it is found anew by its name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterRecord:
    """The description of a registered adapter, without its values."""

    name: str
    base: str  # the model it is for
    owner: str  # the only client that may use it; "" = all may
    rank: int
    precision: str
    digest: str  # sha256 of the packed form, hex
    packed_bytes: int
    fingerprint: str  # of the base's weights when it was registered
    registered_at: float

    @property
    def model_id(self) -> str:
        """The name for callers: BASE:NAME."""
        return f"{self.base}:{self.name}"

    @property
    def version(self) -> str:
        """The name for engines: another one for other content."""
        return f"{self.model_id}@{self.digest[:_VERSION_CHARS]}"

    def problem_with(self, fingerprint: str) -> str:
        """The reason why it does not fit weights of this fingerprint; "" = it fits."""
        if not fingerprint or not self.fingerprint or fingerprint == self.fingerprint:
            return ""
        return (
            f"adapter {self.model_id} was added for other weights than {self.base} has now; train "
            f"it on these, and add it again: kakeya adapters add {self.name} --base {self.base} "
            "--path DIR --replace"
        )


class AdapterStore:
    """The folder of adapters."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.set_aside: dict[str, str] = {}
        """Damaged files without a readable record, found by `scan`: problems by file name."""
        self._writing = threading.Lock()

    def scan(self) -> Iterator[AdapterRecord]:
        """All adapters; damaged files are set aside on the way. Raises StoreFailed."""
        with self._on_disk("read"):
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with os.scandir(self.folder) as found:
                names = sorted(entry.name for entry in found)
        for name in names:
            path = self.folder / name
            if name.startswith(".") and _SUFFIX in name:
                with contextlib.suppress(OSError):  # it may go at another start
                    path.unlink(missing_ok=True)  # left by a write that was cut off
            elif name.endswith(_SUFFIX):
                try:
                    with path.open("rb") as file:
                        record, _ = _read_record(file.read(_HEADER_BYTES))
                except (InvalidArgument, OSError) as problem:
                    aside = self._set_aside(path, str(problem))
                    self.set_aside[aside.name] = f"damaged: {problem}; add it again"
                    continue
                yield record

    def save(self, record: AdapterRecord, packed: bytes) -> int:
        """Write an adapter, or replace it; returns the bytes of its file. Raises StoreFailed."""
        text = json.dumps(asdict(record)).encode()
        line = b"%s %08x %s\n" % (_MAGIC, zlib.crc32(text), text)
        if len(line) > _HEADER_BYTES:
            raise InvalidArgument(f"the names of adapter {record.model_id[:80]} are too long")
        data = line + zlib.compress(packed, _LEVEL)
        with self._writing, self._on_disk("written"):
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_atomically(self._path(record), data)
        return len(data)

    def load(self, record: AdapterRecord) -> bytes:
        """Read the packed adapter.

        Raises AdapterDamaged, and then the file is set aside; AdapterReplaced, and LoadFailed when
        the disk fails.
        """
        path = self._path(record)
        try:
            data = path.read_bytes()
            packed = _read_packed(data, record)
            unpack(packed)
        except FileNotFoundError:
            raise AdapterDamaged(
                f"adapter {record.model_id} has no file {path.name} any more"
            ) from None
        except OSError as problem:
            raise LoadFailed(
                f"adapter {record.model_id} cannot be read: {problem.strerror or problem}"
            ) from None
        except InvalidArgument as problem:
            aside = self._set_aside_read(record, data, problem.message)
            raise AdapterDamaged(
                f"adapter {record.model_id} is damaged on disk ({problem.message}); it was set "
                f"aside as {aside.name}: register it again"
            ) from None
        return packed

    def remove(self, record: AdapterRecord) -> None:
        """Delete an adapter; harmless when it is not there. Raises StoreFailed."""
        with self._on_disk("written"):
            self._path(record).unlink(missing_ok=True)
            sync_folder(self.folder)

    @contextlib.contextmanager
    def _on_disk(self, done: str) -> Iterator[None]:
        try:
            yield
        except OSError as problem:
            raise StoreFailed(
                f"the adapters in {self.folder} cannot be {done}: {problem.strerror or problem}; "
                "look at its disk, and try again"
            ) from problem

    def _path(self, record: AdapterRecord) -> Path:
        # Names differ in letters that some file systems do not tell apart.
        name = hashlib.sha256(record.model_id.encode()).hexdigest()[:40]
        return self.folder / f"{name}{_SUFFIX}"

    def _set_aside_read(self, record: AdapterRecord, data: bytes, problem: str) -> Path:
        """Set the file aside that was read. Raises AdapterReplaced."""
        path = self._path(record)
        with self._writing:
            with contextlib.suppress(OSError):
                if path.read_bytes() != data:
                    raise _replaced(record)
            return self._set_aside(path, problem)

    def _set_aside(self, path: Path, problem: str) -> Path:
        aside = path.with_name(path.name + _DAMAGED)
        try:
            path.replace(aside)
        except OSError as failure:
            problem = f"{problem}; it cannot be renamed: {failure}"
        event(
            _log,
            "damaged adapter set aside",
            level=logging.ERROR,
            file=str(aside),
            problem=problem,
        )
        return aside


def _read_record(data: bytes) -> tuple[AdapterRecord, int]:
    """Read the first line; returns the record, and where the rest begins."""
    line, newline, _ = data.partition(b"\n")
    parts = line.split(b" ", 2)
    if not newline or len(parts) != 3 or parts[0] != _MAGIC:
        raise InvalidArgument("the file is no adapter of this version")
    if parts[1] != b"%08x" % zlib.crc32(parts[2]):
        raise InvalidArgument("its first line is damaged")
    try:
        tree = json.loads(parts[2])
        record = AdapterRecord(**{field.name: tree[field.name] for field in fields(AdapterRecord)})
    except (ValueError, TypeError, KeyError) as problem:
        raise InvalidArgument(f"its first line lacks something: {problem!r}") from None
    return record, len(line) + 1


def _replaced(record: AdapterRecord) -> AdapterReplaced:
    return AdapterReplaced(f"adapter {record.version} was replaced; ask for it again")


def _read_packed(data: bytes, record: AdapterRecord) -> bytes:
    written, start = _read_record(data[:_HEADER_BYTES])
    if written.model_id == record.model_id and written.digest != record.digest:
        raise _replaced(record)
    try:
        packed = zlib.decompress(data[start:], bufsize=max(1, record.packed_bytes))
    except zlib.error as problem:
        raise InvalidArgument(f"the file cannot be uncompressed: {problem}") from None
    if written.model_id != record.model_id or digest(packed) != record.digest:
        raise InvalidArgument(f"the file does not hold {record.version}")
    return packed
