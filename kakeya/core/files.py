"""Files that are whole or as they were: write aside, fsync, rename."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from pathlib import Path

from kakeya.core import darwin


def write_atomically(path: Path, data: bytes) -> None:
    """Replace a file by one with this content, readable by its owner alone, or leave it as it was.

    Raises OSError.
    """
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            flush(file.fileno())
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make files that were created, renamed or removed in a folder survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        flush(handle)
    finally:
        os.close(handle)


def flush(descriptor: int) -> None:
    """Make the content of a file survive a power cut. Raises OSError."""
    if sys.platform == "darwin":
        darwin.flush(descriptor)
    else:
        os.fsync(descriptor)


def flush_in_order(descriptor: int) -> None:
    """Let a file survive a power cut if a later one does: cheaper than `flush` on macOS, for
    content that can be lost as a whole. Raises OSError."""
    if sys.platform == "darwin":
        darwin.order(descriptor)
    else:
        os.fsync(descriptor)


def exclude_from_backup(folder: Path) -> None:
    """Keep a folder of content that can be made again out of the system's backups, where it makes
    some. A file system that cannot note it is ignored."""
    if sys.platform == "darwin":
        with contextlib.suppress(OSError):
            darwin.exclude_from_backup(folder)
