"""The findings of the tests' engines about their models: the first one of a run checks a model.

The speeds are made up. Without any, an engine measures them again and again in vain: beside other
tests it believes no time.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import shutil
import tempfile
from functools import cache
from pathlib import Path

SPEEDS = {
    "forwards_s": {"1": 0.003, "2": 0.004, "4": 0.005, "8": 0.006, "16": 0.008},
    "pieces_s": {"16": 0.01, "32": 0.012, "64": 0.016, "128": 0.025, "256": 0.045},
    "context_s": 1e-8,
}
"""Round numbers in place of measured ones, in seconds, as engines keep them."""
shared: list[Path] = []
"""The folder of all processes of this run of tests, where there is one."""


@cache
def known() -> Path:
    """The folder of what is known."""
    if shared:
        return shared[0]
    folder = Path(tempfile.mkdtemp(prefix="kakeya-findings-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def flags() -> tuple[str, str]:
    """The options of an engine that knows its model from an earlier load."""
    return "--findings", str(known())


def tell(folder: Path) -> None:
    """Lay what is known into a folder of a node."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for file in known().glob("*.json"):
        with contextlib.suppress(FileNotFoundError):  # an engine keeps the last 64
            shutil.copy(file, folder)


def learn(folder: Path) -> None:
    """Keep what engines wrote into a folder, with the speeds from above. Blocks."""
    for file in folder.glob("*.json"):
        kept = known() / file.name
        if folder != known() and kept.exists():
            continue
        try:
            found = json.loads(file.read_bytes())
        except FileNotFoundError:
            continue
        if found.get("speeds") != SPEEDS:
            with tempfile.NamedTemporaryFile("w", dir=known(), delete=False) as new:
                json.dump(found | {"speeds": SPEEDS}, new)
            Path(new.name).replace(kept)  # whole: other processes read it
