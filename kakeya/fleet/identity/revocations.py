"""The fleet's list of revoked keys: made by its authority, carried by gossip.

A list is one signed blob that nodes pass on unchanged; the larger version replaces the smaller.
Versions follow the wall clock, so that an authority that lost its own list does not begin below
the version that the fleet holds.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from google.protobuf.message import DecodeError

from kakeya.core.errors import ConfigError
from kakeya.core.files import write_atomically
from kakeya.core.log import event
from kakeya.core.units import KIB
from kakeya.fleet.identity.certificates import PrivateKey, PublicKey, read_id, spell_id
from kakeya.v1 import fleet_pb2 as pb

_log = logging.getLogger(__name__)
MAX_LIST_BYTES = 256 * KIB
"""About 7,700 keys; fits a gossip message many times."""
_PURPOSE = b"kakeya-revocations"
_HASH_BYTES = 32
_MAX_VERSION = 2**63


class BadList(ValueError):
    """A blob that this fleet's authority did not sign."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Revocations:
    """A list and its signed bytes; version 0 = none was ever made."""

    version: int = 0
    made_at: float = 0.0
    node_ids: frozenset[str] = frozenset()
    blob: bytes = b""


NONE = Revocations()


def sign_list(
    node_ids: Iterable[str], *, after: Revocations, key: PrivateKey, now: float
) -> Revocations:
    """Make the list that follows another. Raises Untrusted for a text that is no id of a key."""
    version = max(after.version + 1, int(now))
    ids = frozenset(node_ids)
    content = pb.RevocationList(
        version=version, made_at_unix=now, key_hashes=sorted(map(read_id, ids))
    ).SerializeToString(deterministic=True)
    signature = key.sign(_PURPOSE + content, ec.ECDSA(hashes.SHA256()))
    blob = pb.SignedRevocations(list=content, signature=signature).SerializeToString()
    return Revocations(version=version, made_at=now, node_ids=ids, blob=blob)


def read_list(blob: bytes, authority: PublicKey) -> Revocations:
    """Read a signed list. Raises BadList."""
    if len(blob) > MAX_LIST_BYTES:
        raise BadList(f"a list of {len(blob)} bytes is too long; at most {MAX_LIST_BYTES} are read")
    try:
        signed = pb.SignedRevocations.FromString(blob)
        authority.verify(signed.signature, _PURPOSE + signed.list, ec.ECDSA(hashes.SHA256()))
        content = pb.RevocationList.FromString(signed.list)
    except (DecodeError, InvalidSignature) as problem:
        raise BadList("the list is damaged, or not signed by this fleet's authority") from problem
    if not 0 < content.version < _MAX_VERSION or not math.isfinite(content.made_at_unix):
        raise BadList(f"the list has version {content.version}")
    if any(len(key_hash) != _HASH_BYTES for key_hash in content.key_hashes):
        raise BadList("the list holds an entry that is no key")
    # Written again: another spelling of the same list must not travel as a second list.
    return Revocations(
        version=content.version,
        made_at=content.made_at_unix,
        node_ids=frozenset(map(spell_id, content.key_hashes)),
        blob=pb.SignedRevocations(list=signed.list, signature=signed.signature).SerializeToString(),
    )


def load_revocations(path: Path, authority: PublicKey) -> Revocations:
    """Read the list on disk; empty without a file, and after a damaged file was set aside.

    Gossip brings a lost list back. Raises ConfigError when it can neither be read nor set aside.
    """
    try:
        return _load(path, authority)
    except FileNotFoundError:
        return NONE
    except OSError as problem:
        raise ConfigError(
            f"{path} cannot be used: {problem.strerror or problem}; make it readable"
        ) from problem


def _load(path: Path, authority: PublicKey) -> Revocations:
    try:
        return read_list(path.read_bytes(), authority)
    except BadList as problem:
        aside = path.with_name(path.name + ".corrupt")
        path.replace(aside)
        event(
            _log,
            "list of revoked nodes was damaged and is set aside; peers will send it again",
            level=logging.WARNING,
            file=aside,
            problem=problem,
        )
        return NONE


def save_revocations(path: Path, revocations: Revocations) -> None:
    """Replace the list on disk. Raises OSError."""
    write_atomically(path, revocations.blob)
