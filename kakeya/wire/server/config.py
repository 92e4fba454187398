"""Settings of the addresses where a node answers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kakeya.core.errors import ConfigError
from kakeya.core.settings import (
    Several,
    bind_address,
    folder,
    megabytes,
    one_of,
    peer_address,
    setting,
    switch,
    text,
)
from kakeya.core.units import MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenConfig:
    """The addresses where a node answers, and the one that peers are told."""

    bind: str = setting(
        "gRPC listens here; port 0 lets the system choose (127.0.0.1:50051; a member of a fleet "
        "listens on that port of each local network too, encrypted)",
        bind_address,
        "",  # the default depends on the identity, which is read at the start
        argument="HOST:PORT",
    )
    http: str = setting(
        "HTTP listens here; port 0 lets the system choose (127.0.0.1:8210)",
        bind_address,
        "127.0.0.1:8210",
        argument="HOST:PORT",
    )
    http_hosts: tuple[str, ...] = setting(
        "a name that HTTP callers have for this node, as host.docker.internal; any number of times",
        Several(text),
        (),
        argument="NAME",
        flag="--http-host",
    )
    http_origins: tuple[str, ...] = setting(
        "a web page's origin that may call, as app://obsidian.md or tauri://*; any number of times",
        Several(text),
        (),
        argument="ORIGIN",
        flag="--http-origin",
    )
    http_keys: Literal["remote", "always"] = setting(
        "HTTP callers that need an API key: those of other machines, or all (remote)",
        one_of("remote", "always"),
        "remote",
        argument="remote|always",
    )
    http_cert: Path | None = setting(
        "the certificate chain that HTTPS shows, PEM (that of the fleet)",
        folder,
        None,
        argument="FILE",
    )
    http_cert_key: Path | None = setting(
        "the private key of --http-cert, PEM without a password",
        folder,
        None,
        argument="FILE",
    )
    http_store_bytes: int = setting(
        "the most memory for answers of /v1/responses, kept a day for previous_response_id; 0: "
        "none is kept (0)",
        megabytes(0, 64 * 1024),
        0,
        argument="MB",
    )
    http_resume_bytes: int = setting(
        "the most memory for copies of answers that other nodes stream, and for own ones without a "
        "peer, to go on with them when their node is lost; 0: none is held or sent (64)",
        megabytes(0, 64 * 1024),
        64 * MIB,
        argument="MB",
    )
    advertise: str = setting(
        "the gRPC address that peers are told (the address of --bind)",
        peer_address,
        "",  # the bound one
        argument="HOST:PORT",
    )
    insecure_lan: bool = setting(
        "listen beyond this machine without encryption or authentication; warns at every start",
        switch,
        False,
        argument="",
    )

    def __post_init__(self) -> None:
        # Beyond loopback, gRPC and HTTP need what is read at the start: an identity, and keys.
        if (self.http_cert is None) != (self.http_cert_key is None):
            given, other = ("--http-cert", "--http-cert-key")[:: 1 if self.http_cert else -1]
            raise ConfigError(f"{given} needs {other} beside it: a certificate and its private key")

    @property
    def needs_key(self) -> Literal["remote", "always", "never"]:
        """The HTTP callers that need an API key."""
        is_open = self.insecure_lan and self.http_keys == "remote"
        return "never" if is_open else self.http_keys
