from __future__ import annotations

import json
import re
from importlib.resources import files

import pytest

from kakeya.dispatch.watch.facts import OwnSections
from kakeya.dispatch.watch.fleet import FleetWatch
from kakeya.gateway.dashboard import events
from tests.fakes import FakeClock
from tests.gateway.toy import ToyModel, make_folder, serving

STATIC = {
    one.name: one.read_text("utf-8")
    for one in files("kakeya.gateway.dashboard").joinpath("static").iterdir()
}
MOST_REQUESTS = 10


@pytest.fixture
def folder(tmp_path):
    return make_folder(tmp_path / "toy")


async def test_a_browser_gets_the_page_and_its_files(folder) -> None:
    async with serving(ToyModel(folder)) as served:
        page = await served.http.get("/", headers={"accept": "text/html,*/*"})
        assert page.headers["content-type"].startswith("text/html")
        policy = page.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        named = re.findall(r'(?:href|src)="(/page/[^"]+)"', page.text)
        assert {name.removeprefix("/page/") for name in named} == STATIC.keys() - {"index.html"}
        for name in named:
            got = await served.http.get(name)
            assert got.status_code == 200
            again = await served.http.get(name, headers={"if-none-match": got.headers["etag"]})
            assert (again.status_code, again.content) == (304, b"")
        assert (await served.http.get("/page/other.js")).status_code == 404
    # The page, its files, the stream of facts and the list of models.
    assert 1 + len(named) + 2 <= MOST_REQUESTS


@pytest.mark.parametrize("name", sorted(STATIC))
def test_a_file_needs_no_other_host_and_no_build(name: str) -> None:
    text = STATIC[name].replace("http://www.w3.org/2000/svg", "")
    assert not re.findall(r"(?:https?:)?//[\w-]+\.[\w.-]+", text)
    assert "<script>" not in text
    assert " style=" not in text


class Request:
    """What the route reads of a request: nothing."""


async def test_the_stream_tells_changes_and_lives_between_them(folder, monkeypatch) -> None:
    monkeypatch.setattr(events, "QUIET_S", 0.01)
    clock = FakeClock()
    facts = OwnSections(clock)
    told = {"node": {"label": "a"}}
    facts.status = lambda: {**told, "fleet": {"nodes": [{"node_id": "own"}]}}

    async def watch(peer):
        raise AssertionError(peer)
        yield

    route = events.events_route(FleetWatch(facts, clock, own_id="own", live=list, watch=watch))
    stream = (await route.endpoint(Request())).body_iterator
    first = b""
    while not first.startswith(b"data: "):
        first = await anext(stream)
    nodes = json.loads(first.removeprefix(b"data: "))["nodes"]
    assert nodes == {"own": {"card": {"node_id": "own"}, "node": {"label": "a"}, "fleet": {}}}
    facts.drain()
    rest = [one async for one in stream]
    assert set(rest) <= {b": nothing new\n\n"}
