"""API keys of HTTP callers: their file in the data folder, and the ring that a running node reads.

    <data>/http-keys.json   {"keys": [{"name", "role", "sha256", "made_at"}]}

The file is changed by `kakeya key` alone and replaced whole; a node looks for a change, so that a
new key counts at once and a removed one for a second at most.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import hmac
import json
import logging
import os
import re
import secrets
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

from kakeya.core.errors import Conflict, InvalidArgument, NotFound, StoreFailed
from kakeya.core.files import write_atomically
from kakeya.core.log import event

_log = logging.getLogger(__name__)
KEYS_FILE = "http-keys.json"
_PREFIX = "kakeya-"
_KEY_BYTES = 32
_NAME = re.compile(r"[A-Za-z0-9][\w.@-]{0,63}", re.ASCII)
"""A name travels as the client's name, in headers and in metadata of gRPC."""
_LOOK_S = 1.0


class KeyRole(StrEnum):
    """What the holder of a key may do: generate, or also see the node and change it."""

    INFER = "infer"
    ADMIN = "admin"


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """A key as it is stored; the key itself is shown once and kept nowhere."""

    name: str
    role: KeyRole
    sha256: str
    """Hex digits. A fast hash is right here: a key is 256 random bits, so there is no list of
    likely keys to try, which a slow hash makes dear for the words that people choose."""
    made_at: float


def read_keys(folder: Path) -> tuple[ApiKey, ...]:
    """Read the keys of the node in a data folder; () without any. Raises StoreFailed."""
    path = folder / KEYS_FILE
    try:
        return tuple(
            ApiKey(
                name=str(one["name"]),
                role=KeyRole(one["role"]),
                sha256=str(one["sha256"]),
                made_at=float(one["made_at"]),
            )
            for one in json.loads(path.read_text("utf-8"))["keys"]
        )
    except FileNotFoundError:
        return ()
    except (OSError, ValueError, KeyError, TypeError) as fault:
        raise StoreFailed(
            f"{path} holds no API keys that can be read: {fault}; restore it, or remove it and "
            "make new keys with kakeya key add NAME"
        ) from fault


def add_key(folder: Path, name: str, role: KeyRole, now: float) -> str:
    """Draw a key, store its hash under a name, and return it.

    Raises InvalidArgument for a name that cannot travel, Conflict for one that has a key.
    """
    if not _NAME.fullmatch(name):
        raise InvalidArgument(
            f"{name!r} is no name of a key; give up to 64 letters, digits and . _ @ -, the first "
            "one a letter or a digit"
        )
    key = _PREFIX + secrets.token_urlsafe(_KEY_BYTES)
    made = ApiKey(name=name, role=role, sha256=_digest(key), made_at=now)
    with _changing(folder) as keys:
        if any(one.name == name for one in keys):
            raise Conflict(
                f"{name} has a key; remove it first (kakeya key remove {name}), or give another "
                "name"
            )
        keys.append(made)
    return key


def remove_key(folder: Path, name: str) -> None:
    """Take a key away. Raises NotFound with the names that have one."""
    with _changing(folder) as keys:
        kept = [one for one in keys if one.name != name]
        if len(kept) == len(keys):
            names = ", ".join(one.name for one in keys) or "none"
            raise NotFound(f"there is no key of {name!r}; names with a key: {names}")
        keys[:] = kept


@contextlib.contextmanager
def _changing(folder: Path) -> Iterator[list[ApiKey]]:
    """Change the list of keys in the `with`, alone among processes. Raises StoreFailed."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY)
    except OSError as fault:
        raise StoreFailed(f"{folder} cannot be used: {fault.strerror or fault}") from fault
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        keys = list(read_keys(folder))
        yield keys
        text = json.dumps({"keys": [asdict(one) for one in keys]}, indent=1)
        write_atomically(folder / KEYS_FILE, text.encode())
    except OSError as fault:
        raise StoreFailed(
            f"{folder / KEYS_FILE} cannot be written: {fault.strerror or fault}"
        ) from fault
    finally:
        os.close(handle)


class KeyRing:
    """The keys of a running node, read again when their file has changed."""

    def __init__(self, folder: Path, mono: Callable[[], float]) -> None:
        self._folder = folder
        self._mono = mono
        self._read: tuple[tuple[int, ...], tuple[ApiKey, ...]] = ((), ())
        """The stamp of the file and its keys: one value, since threads replace it."""
        self._looked_mono: float | None = None

    async def find(self, key: str) -> ApiKey | None:
        """Find the holder of a key; None = no such key."""
        is_fresh = self._looked_mono is not None and self._mono() - self._looked_mono < _LOOK_S
        if is_fresh and (known := self._match(key)) is not None:
            return known
        await asyncio.to_thread(self._look)
        return self._match(key)

    def _match(self, key: str) -> ApiKey | None:
        """Compare with every key, in a time that tells nothing of how much was right."""
        digest, found = _digest(key), None
        for one in self._read[1]:
            if hmac.compare_digest(digest, one.sha256):
                found = one
        return found

    def _look(self) -> None:
        self._looked_mono = self._mono()
        stamp: tuple[int, ...] = ()
        with contextlib.suppress(OSError):
            status = (self._folder / KEYS_FILE).stat()
            stamp = (status.st_ino, status.st_mtime_ns, status.st_size)
        if stamp == self._read[0]:
            return
        keys: tuple[ApiKey, ...] = ()
        try:
            keys = read_keys(self._folder) if stamp else ()
        except StoreFailed as fault:
            event(_log, "no API key counts", level=logging.ERROR, problem=fault.message)
        self._read = (stamp, keys)


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()
