"""The default data directory of a node."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def default_folder(environ: Mapping[str, str], *, platform: str, home: Path) -> Path:
    """Return the data directory of a node without `--data-dir`."""
    if environ.get("KAKEYA_HOME"):
        return Path(environ["KAKEYA_HOME"]).expanduser()
    if platform == "darwin":
        return home / "Library" / "Application Support" / "kakeya"
    return Path(environ.get("XDG_DATA_HOME") or home / ".local" / "share") / "kakeya"
