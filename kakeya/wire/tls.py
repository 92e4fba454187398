"""gRPC credentials from PEM texts, the files of an identity, and the name of all members.

Both ends show a certificate of the fleet's authority. A server reads its certificate at each
handshake and a reader of the files notices a change, so that a renewal needs no restart.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import grpc

from kakeya.core.errors import ConfigError, PeerUnavailable
from kakeya.wire.security import TlsMaterial

KEY_FILE, CERTIFICATE_FILE, AUTHORITY_FILE = "key.pem", "cert.pem", "ca.pem"
IDENTITY_FOLDER = "identity"
"""Of a data directory."""
_FILES = (KEY_FILE, CERTIFICATE_FILE, AUTHORITY_FILE)
_SAYS = {
    "Hostname Verification Check failed": "the certificate there is of another node than the one "
    "that is meant; leave the node's id out, or give the address of that node",
    "certificate has expired": "its certificate has expired, or the clock of one of both machines "
    "is wrong; a member renews its own once it reaches its fleet",
    "certificate is not yet valid": "its certificate is not valid yet: the clock of one of both "
    "machines is wrong",
    "CERTIFICATE_VERIFY_FAILED": "its certificate is of another fleet than the identity here; join "
    "its fleet (`kakeya join`), or give the identity that did",
    "WRONG_VERSION_NUMBER": "it speaks no TLS: the node there has no identity, or another program "
    "answers; give the node an identity (`kakeya join`), or call it over loopback without one",
}
"""What a failed handshake means, by words of gRPC; the first that are found count."""
_CLOSED = (
    "it closed the connection before it said a word; so does a node of a fleet for a caller "
    "without a certificate of the fleet that is valid (`identity`), and any node that stops"
)
_Stamp = tuple[tuple[int, int, int], ...]


class TlsFailed(PeerUnavailable):
    """The two ends of a connection do not accept each other; the message says why."""

    code = "tls_failed"
    retryable = False


def handshake_failure(details: str, peer: str) -> PeerUnavailable | None:
    """The error for a connection that did not come about for its TLS, or may not have, by the words
    of gRPC; None = that is not why."""
    for words, meaning in _SAYS.items():
        if words in details:
            return TlsFailed(f"{peer}: {meaning}")
    is_closed = details.startswith("failed to connect") and details.endswith("Socket closed")
    return PeerUnavailable(f"{peer}: {_CLOSED}") if is_closed else None


def channel_credentials(material: TlsMaterial) -> grpc.ChannelCredentials:
    """Make the credentials of a channel: its certificate, and the only authority it trusts."""
    return grpc.ssl_channel_credentials(
        root_certificates=material.authority,
        private_key=material.key,
        certificate_chain=material.certificate,
    )


def server_credentials(
    material: Callable[[], TlsMaterial], on_handshake: Callable[[], object] = lambda: None
) -> grpc.ServerCredentials:
    """Make the credentials of a listener; the handshake refuses a caller without a certificate.

    Both are called at each new connection, on a thread of gRPC, `on_handshake` also for one that
    the handshake refuses then.
    """
    shown = material()

    def renewed() -> grpc.ServerCertificateConfiguration | None:
        nonlocal shown
        on_handshake()
        current = material()
        if current == shown:
            return None
        shown = current
        return _server_configuration(current)

    return grpc.dynamic_ssl_server_credentials(
        _server_configuration(shown),
        renewed,  # type: ignore[arg-type]  # None means no change; the stubs do not say so
        require_client_authentication=True,
    )


def _server_configuration(material: TlsMaterial) -> grpc.ServerCertificateConfiguration:
    pair = (material.key, material.certificate)
    return grpc.ssl_server_certificate_configuration([pair], root_certificates=material.authority)


class MaterialFolder:
    """The TLS files of an identity folder, read again when one of them has changed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stamp: _Stamp = ()
        self._read: TlsMaterial | None = None

    def current(self) -> TlsMaterial | None:
        """Return the current keys; None without an identity. Raises ConfigError naming a file."""
        stamp = self._look()
        if stamp != self._stamp:
            self._read = self._load() if stamp else None
            self._stamp = stamp
        return self._read

    def _look(self) -> _Stamp:
        """Return marks that change when a file does; () without an identity."""
        found = []
        for name in _FILES:
            try:
                status = (self._folder / name).stat()
            except FileNotFoundError:
                continue
            except OSError as problem:
                raise _unreadable(self._folder / name, problem) from problem
            found.append((status.st_ino, status.st_mtime_ns, status.st_size))
        return tuple(found)

    def _load(self) -> TlsMaterial:
        key, certificate, authority = (self._text(self._folder / name) for name in _FILES)
        return TlsMaterial(key=key, certificate=certificate, authority=authority)

    def _text(self, path: Path) -> bytes:
        try:
            return path.read_bytes()
        except OSError as problem:
            raise _unreadable(path, problem) from problem


def _unreadable(path: Path, problem: OSError) -> ConfigError:
    return ConfigError(
        f"{path}: this file of the node's identity cannot be read: {problem.strerror}"
    )


class FolderSecurity:
    """Keys from a folder (`kakeya join`), for a program that is not a node.

    The folder is a data directory, or the one in it that holds the keys. `server_name` is the id
    of the node that must answer; "" = any member of the fleet. Only `refresh` reads files, and an
    event loop calls it in a thread.
    """

    def __init__(self, folder: Path, server_name: str = "") -> None:
        self._folder = folder
        self._files: MaterialFolder | None = None
        self._wanted = server_name
        self._material: TlsMaterial | None = None
        self._server_name = server_name

    def refresh(self) -> None:
        """Read the keys if they have changed. Raises ConfigError without keys."""
        if self._files is None:
            inner = self._folder / IDENTITY_FOLDER
            self._files = MaterialFolder(inner if inner.is_dir() else self._folder)
        material = self._files.current()
        if material is None:
            self._files = None
            raise ConfigError(
                f"{self._folder} holds no identity ({', '.join(_FILES)}); get one with kakeya join"
            )
        if material != self._material:
            self._server_name = self._wanted or any_member(fleet_of(material.authority))
            self._material = material

    def material(self) -> TlsMaterial:
        """Return the keys as of the last `refresh`."""
        if self._material is None:
            raise ConfigError(f"the keys in {self._folder} have not been read yet")
        return self._material

    def server_name(self, address: str) -> str:
        """Return the name that a certificate must carry, at any address."""
        return self._server_name


def fleet_of(authority: bytes) -> str:
    """Return the name of the fleet of an authority, given in PEM. Raises ConfigError."""
    # Imported here: plain processes that import this module need no X.509.
    from cryptography import x509
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    try:
        key = x509.load_pem_x509_certificate(authority).public_key()
    except ValueError as problem:
        raise ConfigError(f"the fleet's authority is not a PEM certificate: {problem}") from problem
    spki = key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return fleet_name(hashlib.sha256(spki).digest())


def fleet_name(authority_hash: bytes) -> str:
    """Return the name of a fleet, 16 hex digits, from the SHA-256 of its authority's public key."""
    return authority_hash[:8].hex()


def any_member(fleet: str) -> str:
    """Return the name in every member's certificate, for the first contact with an address."""
    return f"member.{fleet}.kakeya"
