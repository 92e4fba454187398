"""The files of a model from which its text is made: sent to peers, and kept of peers' models.

A node that has only the tokenizer and the templates of a model reads and writes its text, while
another node computes the tokens. Folders of peers' models are named by a digest of their files, so
one serves for all nodes that have the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

from kakeya.core.errors import PeerProtocol, Refused
from kakeya.core.units import MIB
from kakeya.text.folder import Stamps, stamps, text_files

PART_BYTES = MIB
MOST_BYTES = 128 * MIB
"""Of all files together; the largest tokenizers have 35 MB."""
_MOST_FILES = 64
_MOST_FOLDERS = 32
_NAME = re.compile(r"(additional_chat_templates/)?[A-Za-z0-9][A-Za-z0-9._-]{0,100}")
_DIGEST = re.compile(r"[0-9a-f]{32}")


class TextFiles:
    """The text of this node's models for peers, and `folder`, where that of peers' models lies."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._digests: dict[str, tuple[Stamps, str]] = {}

    async def digest(self, model_path: str) -> str:
        """The digest of a model folder's files; "" = it has none. Raises Refused for files that
        cannot be read."""
        with _refusing(model_path):
            return await asyncio.to_thread(self._digest, model_path)

    async def parts(self, model_path: str) -> AsyncIterator[tuple[str, bytes]]:
        """(name, data) of each part of each file, in order. Raises as `digest`."""
        for name, path in (await asyncio.to_thread(_present, model_path)).items():
            with _refusing(model_path):
                data = await asyncio.to_thread(path.read_bytes)
            for start in range(0, max(1, len(data)), PART_BYTES):
                yield name, data[start : start + PART_BYTES]

    async def find(self, digest: str) -> Path | None:
        """The folder of a peer's model with these files; None = they are not here. Raises
        PeerProtocol for what is no digest."""
        if not _DIGEST.fullmatch(digest):
            raise PeerProtocol(f"{digest[:80]!r} is no digest of text files")
        path = self._folder / digest
        try:
            await asyncio.to_thread(os.utime, path)  # it is in use
        except (FileNotFoundError, NotADirectoryError):
            return None
        return path

    async def keep(self, digest: str, parts: AsyncIterator[tuple[str, bytes]]) -> Path:
        """Keep the files of a peer's model. Raises PeerProtocol for files that are not those of
        the digest, and OSError."""
        files: dict[str, bytearray] = {}
        total = 0
        async for name, data in parts:
            total += len(data)
            files.setdefault(name, bytearray()).extend(data)
            if not _NAME.fullmatch(name) or total > MOST_BYTES or len(files) > _MOST_FILES:
                raise PeerProtocol(
                    f"the text of a model has {len(files)} files of {total} bytes, the last one "
                    f"called {name[:80]!r}; at most {_MOST_FILES} of {MOST_BYTES} bytes are taken"
                )
        if _digest_of(files) != digest:
            raise PeerProtocol(f"the text of a model is not that of the digest {digest}")
        return await asyncio.to_thread(self._write, digest, files)

    def _write(self, digest: str, files: dict[str, bytearray]) -> Path:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._make_room()
        made = Path(tempfile.mkdtemp(dir=self._folder, prefix=".new-"))
        try:
            for name, data in files.items():
                path = made / name
                path.parent.mkdir(exist_ok=True)
                path.write_bytes(data)
            target = self._folder / digest
            try:
                made.rename(target)
            except OSError:
                if not target.is_dir():  # else another request has brought it
                    raise
            return target
        finally:
            shutil.rmtree(made, ignore_errors=True)

    def _make_room(self) -> None:
        kept = []
        for path in self._folder.iterdir():
            with contextlib.suppress(OSError):  # another request may rename or remove it
                kept.append((path.stat().st_mtime, path))
        for _, path in sorted(kept)[: max(0, len(kept) - _MOST_FOLDERS)]:
            shutil.rmtree(path, ignore_errors=True)

    def _digest(self, model_path: str) -> str:
        seen = stamps(Path(model_path))
        known = self._digests.get(model_path)
        if known is not None and known[0] == seen:
            return known[1]
        found = _present(model_path)
        files = {name: path.read_bytes() for name, path in found.items()}
        digest = _digest_of(files) if files else ""
        self._digests[model_path] = (seen, digest)
        return digest


def _present(model_path: str) -> dict[str, Path]:
    """The files by name; of a model without a path none."""
    folder = Path(model_path)
    found = text_files(folder) if model_path else []
    return {path.relative_to(folder).as_posix(): path for path in found if path.is_file()}


@contextmanager
def _refusing(model_path: str) -> Iterator[None]:
    try:
        yield
    except OSError as problem:
        raise Refused(f"the text of {model_path} cannot be read: {problem}") from problem


def _digest_of(files: dict[str, bytes] | dict[str, bytearray]) -> str:
    digest = sha256()
    for name in sorted(files):
        digest.update(sha256(name.encode()).digest() + sha256(files[name]).digest())
    return digest.hexdigest()[:32]
