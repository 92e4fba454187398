"""Invites: the token that admits a machine to a fleet, and the proofs of both ends.

    token    kakeya-<base64url of: 1 | expiry | hash of the CA's key, 16 B | secret, 16 B |
             HOST:PORT,... | checksum, 4 B>

    joiner   -> CSR, HMAC(secret; CA hash, CSR)                "I was given the token"
    inviter  <- certificate, CA, ..., HMAC(secret; CSR, all)   "I made the token"

The secret never crosses the wire, and the connection needs no encryption: nothing in it is secret,
and nothing can be changed. An invite takes in one key. The same key may ask again until the invite
ends, because an answer can be lost; wrong proofs are counted and cost the invite nothing.

An invite ends when either clock says so: the monotonic one stands still while a Mac sleeps, and
the wall clock can be set back. Decisions only; sockets are in `join_server.py`.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kakeya.core.errors import Denied, InvalidArgument, Refused, Unauthenticated
from kakeya.core.figures import Json
from kakeya.fleet.identity.authority import Authority
from kakeya.fleet.identity.certificates import Request
from kakeya.wire.security import CertRole
from kakeya.wire.tls import fleet_name

VALID_S = 15 * 60.0
MAX_VALID_S = 24 * 3600.0
MAX_LIVE = 16
"""Invites that live at once; each wrong proof is compared with all of them."""
_MAX_REMEMBERED = 64
"""Ended invites that are kept, to tell a late joiner the reason of its refusal."""
SECRET_BYTES = CA_HASH_BYTES = 16
MAX_ADDRESSES = 8
_PREFIX = "kakeya-"
_VERSION = 1
_HEAD = struct.Struct(f">BI{CA_HASH_BYTES}s{SECRET_BYTES}s")
_CHECK_BYTES = 4
_PURPOSE_ASK, _PURPOSE_ANSWER = b"kakeya-join-ask", b"kakeya-join-answer"
AGAIN = "run `kakeya invite` on the fleet's authority and join with the new token"


class Revoked(Denied):
    """The fleet has removed the node with this key."""

    code = "revoked"


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """The token that the owner carries from the inviting machine to the joining one."""

    addresses: tuple[str, ...]
    ca_hash: bytes
    secret: bytes = field(repr=False)
    expires_at: float

    @property
    def fleet(self) -> str:
        """The name of the token's fleet."""
        return fleet_name(self.ca_hash)


def encode_token(token: Token) -> str:
    """Write a token as one word that needs no quotes in a shell."""
    head = _HEAD.pack(_VERSION, int(token.expires_at), token.ca_hash, token.secret)
    content = head + ",".join(token.addresses).encode()
    packed = content + hashlib.sha256(content).digest()[:_CHECK_BYTES]
    return _PREFIX + base64.urlsafe_b64encode(packed).decode("ascii").rstrip("=")


def decode_token(text: str) -> Token:
    """Read a token; line breaks that a paste brought in do not matter. Raises InvalidArgument."""
    word = "".join(text.split())
    if not word.startswith(_PREFIX):
        raise InvalidArgument(
            f"{word[:24]!r} is no token; paste the whole line that `kakeya invite` printed, "
            f"which begins with {_PREFIX}"
        )
    try:
        return _unpack(word.removeprefix(_PREFIX))
    except (ValueError, struct.error):
        raise InvalidArgument(
            "the token is damaged; paste the whole line that `kakeya invite` printed"
        ) from None


def _unpack(word: str) -> Token:
    packed = base64.b64decode(word + "=" * (-len(word) % 4), altchars=b"-_", validate=True)
    content, check = packed[:-_CHECK_BYTES], packed[-_CHECK_BYTES:]
    if hashlib.sha256(content).digest()[:_CHECK_BYTES] != check:
        raise ValueError("checksum")
    version, expires_at, ca_hash, secret = _HEAD.unpack_from(content)
    addresses = tuple(content[_HEAD.size :].decode().split(","))
    if version != _VERSION or not all(addresses) or len(addresses) > MAX_ADDRESSES:
        raise ValueError("content")
    return Token(addresses=addresses, ca_hash=ca_hash, secret=secret, expires_at=expires_at)


def proof_of_request(secret: bytes, *, ca_hash: bytes, csr: bytes) -> bytes:
    """The proof that a joiner sends beside its request."""
    return _mac(secret, _PURPOSE_ASK, ca_hash[:CA_HASH_BYTES], csr)


def proof_of_answer(
    secret: bytes,
    *,
    csr: bytes,
    certificate: bytes,
    authority: bytes,
    peers: Sequence[str],
    revocations: bytes,
) -> bytes:
    """The proof that the inviter sends beside its answer to exactly that request."""
    told = [peer.encode() for peer in peers]
    return _mac(secret, _PURPOSE_ANSWER, csr, certificate, authority, revocations, *told)


def is_same_proof(one: bytes, other: bytes) -> bool:
    """Compare in constant time, which tells nothing of the proof."""
    return hmac.compare_digest(one, other)


def _mac(secret: bytes, purpose: bytes, *parts: bytes) -> bytes:
    mac = hmac.new(secret, purpose, hashlib.sha256)
    for part in parts:
        mac.update(struct.pack(">I", len(part)) + part)
    return mac.digest()


class Moment(NamedTuple):
    """One moment by both clocks, in seconds."""

    mono: float
    wall: float

    def after(self, seconds: float) -> Moment:
        """The moment that comes so much later."""
        return Moment(self.mono + seconds, self.wall + seconds)


@dataclass(slots=True, kw_only=True)
class Invite:
    """One invite. `taken_by` is the id of the node that joined by it; "" = none yet."""

    secret: bytes = field(repr=False)
    role: CertRole
    ends: Moment
    taken_by: str = ""
    label: str = ""

    def is_over(self, now: Moment) -> bool:
        """Whether one of the clocks has reached the end."""
        return now.mono >= self.ends.mono or now.wall >= self.ends.wall


@dataclass(frozen=True, slots=True, kw_only=True)
class InviteStats:
    """Counts since the start."""

    made: int = 0
    admitted: int = 0
    wrong_proofs: int = 0
    refused: int = 0


class Invites:
    """The invites of one authority; `as_json` and `restore` carry them over a restart."""

    def __init__(
        self,
        authority: Authority,
        *,
        is_revoked: Callable[[str], bool],
        draw: Callable[[int], bytes] = secrets.token_bytes,
    ) -> None:
        self._authority = authority
        self._is_revoked = is_revoked
        self._draw = draw
        self._invites: list[Invite] = []
        self._made = self._admitted = self._wrong_proofs = self._refused = 0

    @property
    def stats(self) -> InviteStats:
        """Counts since the start."""
        return InviteStats(
            made=self._made,
            admitted=self._admitted,
            wrong_proofs=self._wrong_proofs,
            refused=self._refused,
        )

    def make(self, role: CertRole, *, valid_s: float, now: Moment) -> Invite:
        """Make an invite. Raises InvalidArgument for its length, Refused when too many live."""
        if not 0 < valid_s <= MAX_VALID_S:
            raise InvalidArgument(
                f"an invite of {valid_s:g} s is not possible; give 1 to {MAX_VALID_S:g} s"
            )
        over = [each for each in self._invites if each.is_over(now)]
        live = [each for each in self._invites if not each.is_over(now)]
        if len(live) >= MAX_LIVE:
            raise Refused(f"{MAX_LIVE} invites live already; wait until one ends")
        invite = Invite(secret=self._draw(SECRET_BYTES), role=role, ends=now.after(valid_s))
        self._invites = [*over[-_MAX_REMEMBERED:], *live, invite]
        self._made += 1
        return invite

    def as_json(self) -> list[Json]:
        """All invites, for the disk; they end by the wall clock, which outlives a restart."""
        return [
            {
                "secret": one.secret.hex(),
                "role": one.role.value,
                "ends_at": one.ends.wall,
                "taken_by": one.taken_by,
                "label": one.label,
            }
            for one in self._invites
        ]

    def restore(self, told: Sequence[Mapping[str, Any]], now: Moment) -> None:
        """Take over the invites of an earlier run. Raises ValueError, KeyError or TypeError for
        what is no `as_json`."""
        self._invites = [
            Invite(
                secret=bytes.fromhex(one["secret"]),
                role=CertRole(one["role"]),
                # No later than a new invite, whatever the file says.
                ends=now.after(min(MAX_VALID_S, float(one["ends_at"]) - now.wall)),
                taken_by=str(one["taken_by"]),
                label=str(one["label"]),
            )
            for one in told
        ]

    def left_s(self, now: Moment) -> float:
        """Seconds until the last invite ends, if both clocks run; 0 = none lives."""
        live = (invite.ends for invite in self._invites if not invite.is_over(now))
        return max((min(end.mono - now.mono, end.wall - now.wall) for end in live), default=0.0)

    def admit(self, csr: bytes, proof: bytes, *, now: Moment) -> tuple[Invite, Request]:
        """Decide whether a request may join; the first key that comes takes the invite.

        Raises Unauthenticated for a wrong proof, Denied for an invite that ended or was taken and
        for a revoked key, InvalidArgument for an unreadable request.
        """
        invite = self._find(csr, proof)
        try:
            request = self._judge(invite, csr, now)
        except (Denied, InvalidArgument):
            self._refused += 1
            raise
        if not invite.taken_by:
            self._admitted += 1
        invite.taken_by, invite.label = request.node_id, request.label
        return invite, request

    def _find(self, csr: bytes, proof: bytes) -> Invite:
        ca_hash = self._authority.key_hash
        for invite in reversed(self._invites):
            expected = proof_of_request(invite.secret, ca_hash=ca_hash, csr=csr)
            if is_same_proof(expected, proof):
                return invite
        self._wrong_proofs += 1
        raise Unauthenticated(
            f"fleet {fleet_name(ca_hash)} does not know this token: it is long over, or of "
            f"another fleet; {AGAIN}"
        )

    def _judge(self, invite: Invite, csr: bytes, now: Moment) -> Request:
        if invite.is_over(now):
            ago_s = max(now.mono - invite.ends.mono, now.wall - invite.ends.wall)
            raise Denied(f"the token expired {_minutes(ago_s)} ago; {AGAIN}")
        request = self._authority.read(csr)
        if invite.taken_by not in ("", request.node_id):
            raise Denied(
                f"the token was used already, by {invite.label}; each token takes in one machine: "
                f"{AGAIN}"
            )
        if self._is_revoked(request.node_id):
            raise Revoked(
                "the key of this machine was revoked in this fleet; run `kakeya join` there with a "
                "new token, and it gets another one"
            )
        return request


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
