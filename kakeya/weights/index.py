"""The index of the models on this disk: what there is, and the digests of what there is.

    look      finds models by the names of files; cheap, and done when the index is asked for
    digests   are computed once for each state of a file, kept in `weights.json`, in the background
              a quarter of the time, and at once for a caller that waits

A file that changed since it was found is not served: its size, time and inode are compared when it
is opened.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from kakeya.core.clock import Clock
from kakeya.core.errors import Cancelled, NotFound, StoreFailed
from kakeya.core.files import write_atomically
from kakeya.core.log import event
from kakeya.weights.found import FoundModel, ModelFile, find_models
from kakeya.weights.manifest import PIECE_BYTES, PieceOfFile, WeightsFile, WeightsManifest

_log = logging.getLogger(__name__)
CACHE = "weights.json"
_MOST_CACHE_BYTES = 256 << 20
LOOK_S = 2.0
"""For so long the last look is good enough."""
_RESTS = 3.0
"""Background work rests so many times as long as it works."""


@dataclass(frozen=True, slots=True)
class FileDigests:
    """The digests of one state of a file."""

    size: int
    mtime_ns: int
    inode: int
    sha256: bytes
    pieces: bytes

    def is_of(self, file: ModelFile) -> bool:
        """Whether the file is as it was."""
        seen = (file.size, file.mtime_ns, file.inode)
        return (self.size, self.mtime_ns, self.inode) == seen


class WeightIndex:
    """See the module; lives on the event loop."""

    def __init__(
        self,
        folder: Path,
        *,
        data_dir: Path,
        hub: Path | None,
        configured: Callable[[], Mapping[str, str]],
        on_change: Callable[[], None],
        clock: Clock,
    ) -> None:
        """`folder` has the models that were pulled; `configured` tells the paths of this node's
        models by name; `on_change` hears of each look that found other models."""
        self.folder = folder
        self._cache_file = data_dir / CACHE
        self._hub = hub
        self._configured = configured
        self._on_change = on_change
        self._clock = clock
        self._digests: dict[str, FileDigests] = {}
        self._is_loaded = False
        self._models: tuple[FoundModel, ...] = ()
        self._manifests: dict[Path, tuple[tuple[ModelFile, ...], WeightsManifest]] = {}
        self._looked_mono = -LOOK_S
        self._looking = asyncio.Lock()
        self._hashing = asyncio.Lock()
        self._saving = asyncio.Lock()
        self._hurry = threading.Event()
        self._waiting = 0
        self._found = asyncio.Event()
        self.hashed_bytes = 0
        """Read to compute digests, since the start."""

    async def run(self) -> None:
        """Compute the digests that are missing, after each look that found new files."""
        await self.models()
        while True:
            self._found.clear()
            for model in self._models:
                try:
                    await self._manifest(model)
                except (NotFound, StoreFailed) as problem:
                    event(_log, "no digest of a model", model=model.name, why=problem.message)
            await self._found.wait()

    async def models(self, *, anew: bool = False) -> tuple[FoundModel, ...]:
        """The models on this disk; `anew` = even if the last look was a moment ago."""
        async with self._looking:
            if not self._is_loaded:  # before anything is told, or kept in place of it
                self._digests = await asyncio.to_thread(_load, self._cache_file)
                self._is_loaded = True
            if not anew and self._clock.mono() - self._looked_mono < LOOK_S:
                return self._models
            found = await asyncio.to_thread(
                find_models, self.folder, self._hub, dict(self._configured())
            )
            self._looked_mono = self._clock.mono()
            if found != self._models:
                self._models = found
                self._found.set()
                self._on_change()
        return self._models

    @property
    def last_found(self) -> tuple[FoundModel, ...]:
        """The models that the last look found."""
        return self._models

    def known(self, model: FoundModel) -> WeightsManifest | None:
        """The manifest of a model, if all its digests are known."""
        held = self._manifests.get(model.path)
        if held is not None and held[0] == model.files:
            return held[1]
        files = []
        for file in model.files:
            digests = self._digests.get(file.path)
            if digests is None or not digests.is_of(file):
                return None
            step = range(0, len(digests.pieces), 32)
            pieces = tuple(digests.pieces[at : at + 32] for at in step)
            files.append(WeightsFile(file.name, file.size, digests.sha256, pieces))
        made = WeightsManifest(tuple(sorted(files, key=lambda file: file.name)))
        self._manifests[model.path] = (model.files, made)
        return made

    async def manifest(self, model: FoundModel) -> WeightsManifest:
        """The manifest of a model, computed at once where it is not known. Raises NotFound for
        files that are gone or change, StoreFailed for those that cannot be read."""
        self._waiting += 1
        self._hurry.set()
        try:
            return await self._manifest(model)
        finally:
            self._waiting -= 1
            if not self._waiting:
                self._hurry.clear()

    async def with_digest(self, digest: str) -> tuple[FoundModel, WeightsManifest] | None:
        """The model with a digest, of those that have theirs; None = there is none."""
        for model in await self.models():
            made = self.known(model)
            if made is not None and made.digest == digest:
                return model, made
        return None

    async def learn(self, path: Path, manifest: WeightsManifest) -> None:
        """Take the digests of a model that was just brought and proven, without reading it."""
        for model in await self.models(anew=True):
            if model.path == path and len(model.files) == len(manifest.files):
                for found, file in zip(model.files, manifest.files, strict=True):
                    self._digests[found.path] = FileDigests(
                        *found[2:], file.sha256, b"".join(file.pieces)
                    )
        await self._save()

    async def _manifest(self, model: FoundModel) -> WeightsManifest:
        made = self.known(model)
        if made is not None:
            return made
        is_new = False
        for file in model.files:
            async with self._hashing:  # given in turn: a small model waits for no whole large one
                known = self._digests.get(file.path)
                if known is None or not known.is_of(file):
                    self._digests[file.path] = await self._hash(file)
                    is_new = True
        made = self.known(model)
        if is_new:
            await self._save()
        if made is None:
            raise NotFound(f"the files of {model.name} change; ask again once they are whole")
        return made

    async def _hash(self, file: ModelFile) -> FileDigests:
        given_up = threading.Event()
        try:
            made = await asyncio.to_thread(_hash, file, self._hurry, given_up)
        except FileNotFoundError:
            raise NotFound(f"{file.path} is gone") from None
        except OSError as problem:
            raise StoreFailed(f"{file.path} cannot be read: {problem}") from problem
        finally:
            given_up.set()
        self.hashed_bytes += file.size
        return made

    async def _save(self) -> None:
        try:
            async with self._saving:
                listed = {file.path for model in self._models for file in model.files}
                self._digests = {path: one for path, one in self._digests.items() if path in listed}
                await asyncio.to_thread(_store, self._cache_file, dict(self._digests))
        except OSError as problem:
            event(
                _log,
                "digests of models cannot be kept, and are computed anew after a start",
                level=logging.WARNING,
                problem=str(problem),
            )


def read_piece(file: ModelFile, piece: PieceOfFile) -> bytes:
    """The bytes of one piece. Blocks. Raises NotFound for a file that is not as it was found."""
    try:
        handle = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as problem:
        raise NotFound(f"{file.name} cannot be read any more: {problem.strerror}") from problem
    try:
        seen = os.fstat(handle)
        if (seen.st_size, seen.st_mtime_ns, seen.st_ino) != file[2:]:
            raise NotFound(f"{file.name} was changed since its digest was computed")
        data = os.pread(handle, piece.size, piece.offset)
    except OSError as problem:
        raise NotFound(f"{file.name} cannot be read: {problem.strerror}") from problem
    finally:
        os.close(handle)
    if len(data) != piece.size:
        raise NotFound(f"{file.name} is shorter than it was")
    return data


def _hash(file: ModelFile, hurry: threading.Event, given_up: threading.Event) -> FileDigests:
    """Digest a file, resting unless a caller waits. Blocks for long. Raises OSError, NotFound."""
    whole, pieces = hashlib.sha256(), bytearray()
    with Path(file.path).open("rb", buffering=0) as opened:
        while data := opened.read(PIECE_BYTES):
            began = time.monotonic()
            whole.update(data)
            pieces += hashlib.sha256(data).digest()
            if given_up.is_set():
                raise Cancelled(f"the digest of {file.path} is not needed any more")
            hurry.wait(_RESTS * (time.monotonic() - began))
        seen = os.fstat(opened.fileno())
    if (seen.st_size, seen.st_mtime_ns, seen.st_ino) != file[2:]:
        raise NotFound(f"{file.path} changes; ask again once it is whole")
    return FileDigests(*file[2:], whole.digest(), bytes(pieces))


def _load(path: Path) -> dict[str, FileDigests]:
    """What `_store` wrote; {} where it cannot be read: digests can be computed again."""
    try:
        if path.stat().st_size > _MOST_CACHE_BYTES:
            return {}
        told = json.loads(path.read_bytes())
        return {
            name: FileDigests(size, mtime, inode, bytes.fromhex(whole), bytes.fromhex(pieces))
            for name, (size, mtime, inode, whole, pieces) in told.items()
            if len(whole) == 64 and len(pieces) == 64 * -(-size // PIECE_BYTES)
        }
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return {}


def _store(path: Path, digests: Mapping[str, FileDigests]) -> None:
    told = {
        name: (one.size, one.mtime_ns, one.inode, one.sha256.hex(), one.pieces.hex())
        for name, one in digests.items()
    }
    write_atomically(path, json.dumps(told).encode())
