"""The settings of clouds and of commands: the tables [clouds.NAME] and [commands.NAME]."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from kakeya.backends.relay.backend import ANY, Backend
from kakeya.backends.relay.cloud_body import model_of
from kakeya.core.figures import Json
from kakeya.core.settings import Illegal, Several, folder, number, setting, switch, text, whole

_MOST_S = 86_400.0
_MOST_TOLD = 8
"""Models of one cloud that other nodes are told by name: cards are small."""


def _url(raw: object) -> str:
    """Accept the base of an API, as https://api.example.com/v1."""
    url = text(raw).rstrip("/")
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise Illegal(f"{url!r} is no URL; write one as https://api.example.com/v1")
    if parts.username or parts.password or parts.query or parts.fragment:
        # A key in an URL would be shown wherever the URL is.
        raise Illegal("a URL has no user, no ? and no # here; name a variable with key_env")
    return url


def _variable(raw: object) -> str:
    name = text(raw)
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        # Not shown: it may be the key itself.
        raise Illegal("give the name of an environment variable that holds the key, not the key")
    return name


def _words(raw: object) -> tuple[str, ...]:
    """Accept a program and its arguments; unlike `Several` with repetitions and empty ones."""
    if not isinstance(raw, list) or not raw or not all(isinstance(one, str) for one in raw):
        raise Illegal(f'{raw!r} is no command line; write a list of words, as ["llm", "-m", "x"]')
    if not raw[0] or any("\0" in one for one in raw):
        raise Illegal(f"{raw!r} is no command line; its first word names a program")
    return tuple(raw)


@dataclass(frozen=True, slots=True, kw_only=True)
class CloudSettings:
    """A service with an API like OpenAI's."""

    url: str = setting("the base of its API, as https://api.example.com/v1", _url, "")
    key_env: str = setting("the environment variable that holds its key", _variable, "")
    key_file: Path | None = setting("the file that holds its key instead", folder, None)
    models: tuple[str, ...] = setting("the models that may be asked for (all)", Several(text), ())
    timeout_s: float = setting("how long it may be silent", number(0.1, _MOST_S, "seconds"), 120.0)
    shared: bool = setting("whether clients of other nodes are answered too", switch, False)

    def problem(self) -> str:
        """As `BackendSettings`."""
        if not self.url:
            return "url is missing; give the base of its API, as https://api.example.com/v1"
        if self.key_env and self.key_file:
            return "key_env and key_file are given; one key is sent, so give one of them"
        return ""

    def model_ids(self, name: str) -> tuple[str, ...]:
        """As `BackendSettings`."""
        return tuple(f"cloud:{name}/{model}" for model in self.models)

    def serves(self, name: str, model_id: str) -> bool:
        """As `BackendSettings`."""
        model = model_of(name, model_id)
        return bool(model) and (not self.models or model in self.models)

    def shared_ids(self, name: str) -> tuple[str, ...]:
        """As `BackendSettings`."""
        if not self.shared:
            return ()
        if 0 < len(self.models) <= _MOST_TOLD:
            return self.model_ids(name)
        return (f"cloud:{name}/{ANY}",)

    def describe(self) -> Json:
        """As `BackendSettings`."""
        key_file = None if self.key_file is None else str(self.key_file)
        return {
            "url": self.url,
            "key_env": self.key_env or None,
            "key_file": key_file,
            "models": list(self.models),
            "timeout_s": self.timeout_s,
            "shared": self.shared,
        }

    def open(self, name: str) -> Backend:
        """As `BackendSettings`."""
        # Here, since the HTTP client takes 0.1 s to import, and most nodes have no cloud.
        from kakeya.backends.relay.cloud import Cloud

        return Cloud(
            name,
            url=self.url,
            key_env=self.key_env,
            key_file=self.key_file,
            timeout_s=self.timeout_s,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandSettings:
    """A program that reads a prompt and prints an answer."""

    argv: tuple[str, ...] = setting("the program and its arguments", _words, ())
    timeout_s: float = setting("how long it may run", number(0.1, _MOST_S, "seconds"), 120.0)
    at_once: int = setting("how many of it may run", whole(1, 256, "processes"), 4)
    shared: bool = setting("whether clients of other nodes are answered too", switch, False)

    def problem(self) -> str:
        """As `BackendSettings`."""
        return "" if self.argv else 'argv is missing; give the program, as argv = ["llm"]'

    def model_ids(self, name: str) -> tuple[str, ...]:
        """As `BackendSettings`."""
        return (name,)

    def serves(self, name: str, model_id: str) -> bool:
        """As `BackendSettings`."""
        return model_id == name

    def shared_ids(self, name: str) -> tuple[str, ...]:
        """As `BackendSettings`."""
        return (name,) if self.shared else ()

    def describe(self) -> Json:
        """As `BackendSettings`; arguments may hold secrets."""
        return {
            "program": self.argv[0],
            "timeout_s": self.timeout_s,
            "at_once": self.at_once,
            "shared": self.shared,
        }

    def open(self, name: str) -> Backend:
        """As `BackendSettings`."""
        from kakeya.backends.relay.command import CommandBackend

        return CommandBackend(name, self.argv, timeout_s=self.timeout_s, at_once=self.at_once)
