"""The default data directory of a node, and the folder of what can be made again."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def default_folder(environ: Mapping[str, str], *, platform: str, home: Path) -> Path:
    """Return the data directory of a node without `--data-dir`."""
    if named := environ.get("KAKEYA_DATA_DIR") or environ.get("KAKEYA_HOME"):
        return Path(named).expanduser()
    if platform == "darwin":
        return home / "Library" / "Application Support" / "kakeya"
    return Path(environ.get("XDG_DATA_HOME") or home / ".local" / "share") / "kakeya"


def cache_folder(environ: Mapping[str, str], home: Path) -> Path:
    """Return the folder of files that can be made again, shared by the nodes of a user."""
    return Path(environ.get("XDG_CACHE_HOME") or home / ".cache").expanduser() / "kakeya"
