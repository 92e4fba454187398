"""The option --data-dir of a command: it finds the local node by the folder of its data."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from kakeya.core.folders import default_folder


def add_data_dir(command: argparse.ArgumentParser) -> None:
    """Add the option."""
    command.add_argument("--data-dir", default="", metavar="DIR", help="of the local node")


def data_dir_of(options: argparse.Namespace) -> Path:
    """The folder that the option names, or that of a node without it."""
    if given := getattr(options, "data_dir", ""):  # not all commands have the option
        return Path(given)
    return default_folder(os.environ, platform=sys.platform, home=Path.home())
