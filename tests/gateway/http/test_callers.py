"""Which hosts and origins enter, and what a refusal says."""

from __future__ import annotations

import pytest
from starlette.datastructures import Headers

from kakeya.gateway.http.callers import CallerCheck, Forbidden

OPEN = CallerCheck(
    hosts=frozenset({"host.docker.internal"}),
    origins=frozenset({"app://obsidian.md", "tauri://*", "null"}),
)


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "host.docker.internal:8210"},
        {"host": "kakeya.localhost"},
        {"host": "127.0.0.1:8210", "origin": "http://localhost:8210"},
        {"host": "localhost:8210", "origin": "http://[::1]:8210"},
        {"host": "localhost", "origin": "http://127.0.0.1"},
        {"host": "localhost:443", "origin": "https://localhost"},
        {"host": "localhost:8210", "origin": "http://host.docker.internal:8210"},
        {"host": "localhost:8210", "origin": "App://Obsidian.md"},
        {"host": "localhost:8210", "origin": "tauri://localhost"},
        {"host": "localhost:8210", "origin": "null"},
    ],
    ids=str,
)
def test_names_and_origins_that_the_owner_set_enter(headers: dict[str, str]) -> None:
    OPEN.check(Headers(headers))


@pytest.mark.parametrize(
    ("headers", "setting"),
    [
        ({"host": "llm.example.lan:8210"}, "--http-host llm.example.lan"),
        ({"host": "localhost.evil.example"}, "--http-host"),
        ({"host": "evillocalhost"}, "--http-host"),
        ({"host": "localhost:1", "origin": "http://localhost:2"}, "--http-origin"),
        ({"host": "localhost:1", "origin": "vscode-webview://x"}, "--http-origin vscode-webview"),
        ({"host": "localhost:1", "origin": "http://evil.example:1"}, "--http-origin"),
        ({"host": "localhost:1", "origin": "app://obsidian.md.evil"}, "--http-origin"),
        ({"host": "localhost:1", "origin": "ftp://localhost:1"}, "--http-origin"),
    ],
    ids=str,
)
def test_a_refusal_names_the_setting(headers: dict[str, str], setting: str) -> None:
    with pytest.raises(Forbidden, match=setting):
        OPEN.check(Headers(headers))


def test_a_container_is_told_the_setting_for_its_name_of_the_host() -> None:
    with pytest.raises(Forbidden, match=r"--http-host host\.docker\.internal, or http_hosts"):
        CallerCheck().check(Headers({"host": "host.docker.internal:8210"}))
