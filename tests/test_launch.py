"""The files for launchd: what can be checked of them without a Mac."""

from __future__ import annotations

import plistlib
import re
from pathlib import Path

import pytest

from kakeya.config.config import load

LAUNCH = Path(__file__).parents[1] / "launch"


def filled(name: str) -> dict[str, object]:
    """The file as the commands of the README fill it in."""
    text = (LAUNCH / name).read_text()
    for word in ("KAKEYA_CHECKOUT", "KAKEYA_USER", "KAKEYA_HOME"):
        text = text.replace(word, f"/Users/alice/{word.lower()}")
    assert not re.search(r"KAKEYA_[A-Z]", text)
    return plistlib.loads(text.encode())


@pytest.mark.parametrize("kind", ["daemon", "agent"])
def test_launchd_starts_the_node_again_with_paths_of_its_user(kind: str) -> None:
    found = filled(f"dev.kakeya.node.{kind}.plist")
    assert found["KeepAlive"] is True
    assert found["RunAtLoad"] is True
    assert "/opt/homebrew/bin" in found["EnvironmentVariables"]["PATH"]  # type: ignore[index]
    assert "/Library/Logs/kakeya/" in str(found["StandardErrorPath"])
    assert ("UserName" in found) is (kind == "daemon")


@pytest.mark.parametrize("kind", ["daemon", "agent"])
def test_the_node_understands_its_arguments(kind: str) -> None:
    program, *arguments = filled(f"dev.kakeya.node.{kind}.plist")["ProgramArguments"]  # type: ignore[misc,attr-defined]
    assert program.endswith("/scripts/kakeya-node")
    config = load(arguments, {})
    assert config.log_file == Path("/Users/alice/kakeya_home/Library/Logs/kakeya/node.log")
