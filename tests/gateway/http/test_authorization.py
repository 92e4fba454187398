"""Which callers need an API key, and what it lets them ask.

The caller of another machine is played by a proxy on this one, which names it.
"""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from kakeya.core.clock import SystemClock
from kakeya.gateway.http.authorization import KeyCheck
from kakeya.gateway.http.keys import KeyRing, KeyRole, add_key
from tests.gateway.toy import ToyModel, make_folder, serving

FAR = {"x-forwarded-for": "192.0.2.7"}
ASK = {"model": "toy", "prompt": "a"}


@pytest.fixture
def folder(tmp_path):
    return make_folder(tmp_path)


@pytest.fixture
def infer(tmp_path):
    return add_key(tmp_path, "laptop", KeyRole.INFER, 0.0)


@pytest.fixture
def admin(tmp_path):
    return add_key(tmp_path, "owner", KeyRole.ADMIN, 0.0)


def check(folder: Path, needed="remote") -> KeyCheck:
    return KeyCheck(ring=KeyRing(folder, SystemClock().mono), needed=needed)


async def test_a_caller_of_another_machine_needs_a_key_in_either_header(folder, tmp_path, infer):
    model = ToyModel(folder)
    async with serving(model, keys=check(tmp_path)) as served:
        for headers, status in (
            ({}, 401),
            ({"authorization": "Bearer none"}, 401),
            ({"authorization": f"Basic {infer}"}, 401),
            ({"authorization": f"Bearer {infer}"}, 200),
            ({"authorization": f"bearer {infer}"}, 200),
            ({"x-api-key": infer}, 200),
            ({"authorization": "Bearer stale", "x-api-key": infer}, 200),
        ):
            reply = await served.http.post("/v1/completions", json=ASK, headers={**FAR, **headers})
            assert reply.status_code == status, headers
        bare = await served.http.post("/v1/completions", json=ASK, headers=FAR)
        near = await served.http.post("/v1/completions", json=ASK)
    assert bare.headers["www-authenticate"] == "Bearer"
    assert bare.json()["error"]["code"] == "invalid_api_key"
    assert "kakeya key add NAME" in bare.json()["error"]["message"]
    assert near.status_code == 200
    assert [request.client for request in model.requests] == [*["laptop"] * 4, "127.0.0.1"]


async def test_a_client_is_known_by_its_key_and_not_by_the_name_that_it_gives(
    folder, tmp_path, infer
):
    model = ToyModel(folder)
    headers = {"x-api-key": infer, "X-Kakeya-Client": "another"}
    async with serving(model, keys=check(tmp_path)) as served:
        await served.http.post("/v1/completions", json=ASK, headers={**FAR, **headers})
        await served.http.post("/v1/completions", json=ASK, headers=headers)
    assert [request.client for request in model.requests] == ["laptop", "laptop"]


async def test_what_tells_of_the_node_needs_the_role_admin(folder, tmp_path, infer, admin):
    async with serving(ToyModel(folder), keys=check(tmp_path)) as served:
        for path, by_none, by_infer in (
            ("/", 200, 200),
            ("/health", 200, 200),
            ("/healthz", 200, 200),
            ("/page/page.js", 200, 200),
            ("/readyz", 401, 200),
            ("/v1/models", 401, 200),
            ("/metrics", 401, 403),
            ("/api/v1/status", 401, 403),
            ("/api/v1/fleet", 401, 403),
        ):
            got = [
                (await served.http.get(path, headers={**FAR, **headers})).status_code
                for headers in ({}, {"x-api-key": infer}, {"x-api-key": admin})
            ]
            assert got == [by_none, by_infer, 200], path


@pytest.mark.parametrize(("needed", "near", "far"), [("always", 401, 401), ("never", 200, 200)])
async def test_an_owner_may_want_a_key_of_all_callers_or_of_none(
    folder, tmp_path, needed, near, far
):
    async with serving(ToyModel(folder), keys=check(tmp_path, needed)) as served:
        assert (await served.http.get("/v1/models")).status_code == near
        assert (await served.http.get("/v1/models", headers=FAR)).status_code == far


@pytest.mark.parametrize(
    "proxied", ["192.0.2.7", "127.0.0.1, 192.0.2.7", "nonsense", "localhost", "10.0.0.1:80"]
)
async def test_a_proxy_on_this_machine_makes_no_caller_local(
    folder, tmp_path, proxied, monkeypatch
):
    monkeypatch.setenv("FORWARDED_ALLOW_IPS", "*")
    async with serving(ToyModel(folder), keys=check(tmp_path)) as served:
        reply = await served.http.get("/v1/models", headers={"x-forwarded-for": proxied})
    assert reply.status_code == 401


async def test_a_preflight_needs_no_key_and_a_refusal_can_be_read_by_its_page(folder, tmp_path):
    page = "app://obsidian.md"
    async with serving(ToyModel(folder), keys=check(tmp_path), origins=frozenset({page})) as served:
        asks = {**FAR, "origin": page, "access-control-request-method": "POST"}
        asked = await served.http.options("/v1/completions", headers=asks)
        refused = await served.http.get("/v1/models", headers={**FAR, "origin": page})
    assert (asked.status_code, refused.status_code) == (204, 401)
    assert refused.headers["access-control-allow-origin"] == page


async def test_no_key_enters_the_log(folder, tmp_path, infer, caplog):
    with caplog.at_level(logging.DEBUG):
        async with serving(ToyModel(folder), keys=check(tmp_path)) as served:
            for shown in (infer, infer[:-1]):
                headers = {**FAR, "authorization": f"Bearer {shown}"}
                await served.http.post("/v1/completions", json=ASK, headers=headers)
    lines = [f"{record.getMessage()} {vars(record)}" for record in caplog.records]
    own = [line for line in lines if "'kakeya." in line]
    assert own
    assert not [line for line in own if infer[10:30] in line]
