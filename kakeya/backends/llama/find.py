"""Where llama-server is: a setting, PATH, or the cache that `scripts/llama_server` fills."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from kakeya.core.errors import ConfigError
from kakeya.core.folders import cache_folder

PROGRAM = "llama-server"
VARIABLE = "KAKEYA_MODELS_LLAMA_SERVER"


def built_server(environ: Mapping[str, str], home: Path) -> Path:
    """The place of the program that `scripts/llama_server` builds, whether it is there or not."""
    return cache_folder(environ, home) / PROGRAM / PROGRAM


def find_server(
    named: str = "", *, environ: Mapping[str, str] = os.environ, home: Path | None = None
) -> Path | None:
    """Find the program: `named` by a setting, on PATH, or built before; None = nowhere.

    Raises ConfigError if the named one is no program.
    """
    if named:
        found = shutil.which(Path(named).expanduser(), path=environ.get("PATH"))
        if found is None:
            raise ConfigError(f"{named!r} is no program; give the path of {PROGRAM}, or nothing")
        return Path(found).absolute()
    if on_path := shutil.which(PROGRAM, path=environ.get("PATH")):
        return Path(on_path).absolute()
    built = built_server(environ, home or Path.home())
    return built if os.access(built, os.X_OK) else None


def missing_server(model: str) -> ConfigError:
    """The error for a GGUF model on a machine without the program."""
    return ConfigError(
        f"model {model!r} is a GGUF file, which {PROGRAM} of llama.cpp runs, and there is none on "
        f"PATH: install llama.cpp (macOS: brew install llama.cpp), or run scripts/llama_server, "
        f"which builds it, or name it in {VARIABLE}"
    )
