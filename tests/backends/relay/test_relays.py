"""The backends of a node: found, counted, and last in line after a fault."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field

import pytest

from kakeya.backends.relay.backend import Finished
from kakeya.backends.relay.config import CloudSettings, CommandSettings
from kakeya.backends.relay.faults import UpstreamBusy
from kakeya.backends.relay.relays import FAULT_S, Relays
from kakeya.backends.request import Request
from kakeya.core.errors import (
    DeadlineExceeded,
    InvalidArgument,
    LoadFailed,
    NotFound,
    PeerError,
    PeerProtocol,
)
from kakeya.generation.facts import ModelState
from kakeya.text.tools.answer import Part, Said
from tests.backends.relay.upstream import answered, chat
from tests.fakes import SettableClock


@dataclass(frozen=True)
class OtherSettings:
    """A backend of a package, which fails as a test says."""

    fault: Exception | None = None
    silent_s: float = 0.0
    cannot_start: bool = False
    shared: bool = False
    closed: list[str] = field(default_factory=list)

    def problem(self) -> str:
        return ""

    def model_ids(self, name: str) -> Sequence[str]:
        return (f"other:{name}",)

    def serves(self, name: str, model_id: str) -> bool:
        return model_id.startswith(f"other:{name}")

    def shared_ids(self, name: str) -> Sequence[str]:
        return self.model_ids(name) if self.shared else ()

    def describe(self) -> dict[str, object]:
        return {"place": "there"}

    def open(self, name: str) -> Other:
        return Other(self)


@dataclass
class Other:
    settings: OtherSettings

    async def start(self) -> None:
        if self.settings.cannot_start:
            raise RuntimeError("no licence")

    async def stop(self) -> None:
        self.settings.closed.append("stopped")

    def health(self) -> str:
        return ""

    def check(self, asked: Request) -> Sequence[str]:
        return ()

    async def handle(self, asked: Request) -> AsyncGenerator[Part | Finished, None]:
        try:
            await asyncio.sleep(self.settings.silent_s)
            yield Said("one")
            if self.settings.fault is not None:
                raise self.settings.fault
            yield Finished(reason="stop")
        finally:
            self.settings.closed.append("closed")


def other(clock: SettableClock | None = None, **settings: object) -> Relays:
    tables = {"o": OtherSettings(**settings)}  # type: ignore[arg-type]
    return Relays({"others": tables}, clock or SettableClock())


def test_models_are_found_by_their_names() -> None:
    clouds = {
        "west": CloudSettings(url="http://a/v1"),
        "east": CloudSettings(url="http://b/v1", models=("m", "org/n")),
        "claude": CloudSettings(url="http://c/v1"),
    }
    commands = {"echo": CommandSettings(argv=("cat",))}
    relays = Relays({"clouds": clouds, "commands": commands}, SettableClock())

    def found(model_id: str) -> str:
        model = relays.find(model_id)
        return "" if model is None else model.relay.name

    assert found("cloud:west/a/b:8b") == "west"
    assert [found(f"cloud:east/{name}") for name in ("m", "org/n", "other")] == ["east", "east", ""]
    assert found("claude:sonnet") == found("cloud:claude/sonnet") == "claude"
    assert found("echo") == "echo"
    assert [found(name) for name in ("cloud:west", "cloud:west/", "west/a", "", "echo/a")] == [
        ""
    ] * 5
    listed = relays.models(["cloud:west/a", "cloud:east/x", "small"])
    assert [model.model_id for model in listed] == [
        "cloud:east/m",
        "cloud:east/org/n",
        "echo",
        "cloud:west/a",
    ]


def test_peers_may_ask_for_what_its_owner_shares_and_nothing_else() -> None:
    url = "http://a/v1"
    clouds = {
        "mine": CloudSettings(url=url),
        "few": CloudSettings(url=url, models=("m", "n"), shared=True),
        "many": CloudSettings(url=url, models=tuple("abcdefghi"), shared=True),
        "any": CloudSettings(url=url, shared=True),
    }
    commands = {
        "echo": CommandSettings(argv=("cat",), shared=True),
        "rm": CommandSettings(argv=("rm",)),
    }
    others = {"o": OtherSettings(shared=True), "p": OtherSettings()}
    tables = {"clouds": clouds, "commands": commands, "others": others}
    relays = Relays(tables, SettableClock())
    assert relays.offered() == [
        ("clouds", "cloud:few/m"),
        ("clouds", "cloud:few/n"),
        ("clouds", "cloud:many/*"),
        ("clouds", "cloud:any/*"),
        ("commands", "echo"),
        ("others", "other:o"),
    ]
    for name in ("cloud:few/m", "cloud:many/i", "cloud:any/x", "echo", "other:o"):
        assert relays.shared(name).settings.shared_ids("x")
    for name in ("cloud:mine/m", "cloud:few/o", "cloud:many/z", "rm", "other:p", "none", ""):
        with pytest.raises(NotFound, match="is shared here"):
            relays.shared(name)


async def test_a_fault_counts_against_a_backend_for_a_while() -> None:
    clock = SettableClock()
    async with other(clock, fault=PeerError("it is down")) as relays:
        model = relays.find("other:o")
        assert model is not None
        assert model.state is ModelState.READY
        with pytest.raises(PeerError, match="it is down"):
            await answered(model.relay.answer(chat("other:o")))
        assert model.state is ModelState.FAILED
        assert relays.problems() == ["it is down"]
        clock.advance(FAULT_S + 1)
        assert model.state is ModelState.READY
        (status,) = relays.status()
    assert status["last_error"] == "it is down"
    assert (status["requests"], status["running"], status["place"]) == (1, 0, "there")


@pytest.mark.parametrize(
    ("fault", "counts"), [(InvalidArgument("no"), False), (UpstreamBusy("later"), True)]
)
async def test_a_wrong_request_does_not_count_against_its_backend(fault, counts) -> None:
    async with other(fault=fault) as relays:
        model = relays.find("other:o")
        with pytest.raises(type(fault)):
            await answered(model.relay.answer(chat("other:o")))
        assert (model.state is ModelState.FAILED) is counts


async def test_a_backend_that_breaks_its_contract_is_a_typed_fault() -> None:
    async with other(fault=ValueError("oops")) as relays:
        with pytest.raises(PeerProtocol, match=r"the backend o failed: ValueError\('oops'\)"):
            await answered(relays.find("other:o").relay.answer(chat("other:o")))


async def test_the_time_of_a_request_is_up_before_its_first_part() -> None:
    async with other(silent_s=600.0) as relays:
        model = relays.find("other:o")
        with pytest.raises(DeadlineExceeded, match=r"o gave no text within 0\.05 s"):
            await answered(model.relay.answer(chat("other:o", deadline_s=0.05)))
        assert model.state is ModelState.READY, "a short deadline is no fault of the backend"
        assert model.relay.settings.closed == ["closed"]


async def test_a_backend_that_cannot_be_started_says_why_and_stops_nothing() -> None:
    async with other(cannot_start=True) as relays:
        model = relays.find("other:o")
        assert model.state is ModelState.FAILED
        with pytest.raises(LoadFailed, match="the backend o cannot be started: no licence"):
            await model.relay.check(chat("other:o"))
    assert model.relay.settings.closed == []
