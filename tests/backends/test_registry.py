"""Kinds of backends, of this package and of others that are installed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from kakeya.backends.registry import LostSettings, backend_kinds, settings_of_kind
from kakeya.backends.relay.config import CloudSettings, CommandSettings
from kakeya.core.errors import LoadFailed
from tests.backends.relay.upstream import answered, chat

GOOD = """
from tests.backends.relay.test_relays import OtherSettings as Settings
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Installs a package with one kind of backends, called `others`."""

    def install(source: str) -> None:
        (tmp_path / "other_backends.py").write_text(source)
        info = tmp_path / "other-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            "Metadata-Version: 2.1\nName: other-backends\nVersion: 1.0\n"
        )
        point = "[kakeya.backends]\nothers = other_backends:Settings\n"
        (info / "entry_points.txt").write_text(point)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "other_backends", raising=False)

    return install


def test_our_kinds_are_always_there() -> None:
    assert backend_kinds()[:2] == ("clouds", "commands")
    assert settings_of_kind("clouds") is CloudSettings
    assert settings_of_kind("commands") is CommandSettings


def test_a_package_brings_a_kind(package) -> None:
    package(GOOD)
    assert backend_kinds() == ("clouds", "commands", "others")
    assert settings_of_kind("others").__name__ == "OtherSettings"


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("1 / 0", "division by zero"),
        ("import no_such_module_here", "no_such_module_here"),
        ("Other = 1", "Settings"),
        (
            "class Settings: ...",
            "a dataclass with problem, model_ids, serves, shared_ids, describe",
        ),
        (GOOD + "Settings = Settings()", "is no settings of a backend"),
    ],
)
def test_a_package_that_cannot_be_loaded_is_told(package, source: str, says: str) -> None:
    package(source)
    assert "others" in backend_kinds()
    with pytest.raises(LoadFailed, match=says):
        settings_of_kind("others")


async def test_the_tables_of_a_lost_package_refuse_requests_with_the_reason() -> None:
    lost = LostSettings("other:Settings cannot be used: it is gone")
    assert [lost.serves("o", name) for name in ("o", "other:o/m", "moon")] == [True, True, False]
    assert lost.shared_ids("o") == ()
    backend = lost.open("o")
    assert backend.health() == lost.reason
    with pytest.raises(LoadFailed, match="it is gone"):
        backend.check(chat("o"))
    with pytest.raises(LoadFailed, match="it is gone"):
        await answered(backend.handle(chat("o")))
