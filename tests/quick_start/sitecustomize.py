"""Python imports this before any program: transformers' names are then read from one file.

Each process of the tests pays for what is imported at the head, so that is next to nothing.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

    Read = Callable[[Any, str | None], Any]

NAMES = f"{sys.prefix}/.transformers-names"
READER = "transformers.utils.import_utils"


class Finder:
    """Finds the one module that reads names, and has its reading kept."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != READER:
            return None
        from importlib.machinery import PathFinder

        found = PathFinder.find_spec(name, path, target)
        if found is not None and found.loader is not None:
            execute = found.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                if hasattr(module, "define_import_structure"):
                    module.define_import_structure = kept(module.define_import_structure, name)

            found.loader.exec_module = exec_module  # type: ignore[method-assign]
        return found


def kept(read: Read, module: str) -> Read:
    """`read`, with what it returned to an earlier process for the same installation."""
    import functools
    from pathlib import Path

    # The time of change tells two installations of one version apart.
    source = Path(str(sys.modules[module].__file__)).resolve()  # one, by whichever link
    installation = f"{source} {source.stat().st_ctime_ns} {sys.version}"

    @functools.cache  # as transformers' own: a caller adds to what it got
    @functools.wraps(read)
    def names(module_path: Any, prefix: str | None = None) -> Any:
        known = load(installation)
        asked = f"{module_path} {prefix}"
        if asked not in known:
            known[asked] = read(module_path, prefix)
            keep(installation, known)
        return known[asked]

    return names


def load(installation: str) -> dict[str, Any]:
    """What was kept for an installation; nothing where the file is another's, or none."""
    import marshal
    from pathlib import Path

    try:
        of, known = marshal.loads(Path(NAMES).read_bytes())
    except (OSError, ValueError, EOFError, TypeError):
        return {}
    return dict(known) if of == installation else {}


def keep(installation: str, known: dict[str, Any]) -> None:
    """Replace the file as a whole, for many processes start at once."""
    import contextlib
    import marshal
    import os
    from pathlib import Path

    made = Path(f"{NAMES}.{os.getpid()}")
    with contextlib.suppress(OSError, ValueError):
        made.write_bytes(marshal.dumps((installation, known)))
        made.replace(NAMES)


sys.meta_path.insert(0, Finder())  # type: ignore[arg-type]
