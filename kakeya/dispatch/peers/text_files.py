"""The files of a model from which its text is made: sent to peers, and kept of peers' models.

A node that has only the tokenizer and the templates of a model reads and writes its text, while
another node computes the tokens. Folders of peers' models are named by a digest of their files, so
one serves for all nodes that have the same.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import tempfile
from collections.abc import AsyncIterator
from hashlib import sha256
from pathlib import Path

from kakeya.core.errors import PeerProtocol
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
        """The digest of a model folder's files; "" = it has none."""
        return await asyncio.to_thread(self._digest, Path(model_path))

    async def parts(self, model_path: str) -> AsyncIterator[tuple[str, bytes]]:
        """(name, data) of each part of each file, in order."""
        folder = Path(model_path)
        for path in await asyncio.to_thread(_present, folder):
            name = path.relative_to(folder).as_posix()
            data = await asyncio.to_thread(path.read_bytes)
            for start in range(0, max(1, len(data)), PART_BYTES):
                yield name, data[start : start + PART_BYTES]

    def find(self, digest: str) -> Path | None:
        """The folder of a peer's model with these files; None = they are not here. Raises
        PeerProtocol for what is no digest."""
        if not _DIGEST.fullmatch(digest):
            raise PeerProtocol(f"{digest[:80]!r} is no digest of text files")
        path = self._folder / digest
        if not path.is_dir():
            return None
        os.utime(path)
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
            if not target.is_dir():  # another request may have brought it
                made.rename(target)
            return target
        finally:
            shutil.rmtree(made, ignore_errors=True)

    def _make_room(self) -> None:
        kept = [path for path in self._folder.iterdir() if path.is_dir()]
        kept.sort(key=lambda path: path.stat().st_mtime)
        for path in kept[: max(0, len(kept) - _MOST_FOLDERS)]:
            shutil.rmtree(path, ignore_errors=True)

    def _digest(self, folder: Path) -> str:
        seen = stamps(folder)
        known = self._digests.get(str(folder))
        if known is not None and known[0] == seen:
            return known[1]
        found = _present(folder)
        digest = ""
        if found:
            digest = _digest_of(
                {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}
            )
        self._digests[str(folder)] = (seen, digest)
        return digest


def _present(folder: Path) -> list[Path]:
    return [path for path in text_files(folder) if path.is_file()]


def _digest_of(files: dict[str, bytes] | dict[str, bytearray]) -> str:
    digest = sha256()
    for name in sorted(files):
        digest.update(sha256(name.encode()).digest() + sha256(files[name]).digest())
    return digest.hexdigest()[:32]
