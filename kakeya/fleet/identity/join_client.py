"""Joining a fleet with a token: ask the inviting node, check its answer, write the identity.

The key is kept on disk from the first try: a machine that was cut off after the invite had taken
its key can run the same command again and is admitted.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kakeya.core.clock import Clock
from kakeya.core.errors import (
    ConfigError,
    DeadlineExceeded,
    InvalidArgument,
    KakeyaError,
    PeerError,
    PeerProtocol,
    PeerUnavailable,
)
from kakeya.core.files import write_atomically
from kakeya.fleet.identity.authority import already_member
from kakeya.fleet.identity.certificates import (
    BACKDATED_S,
    DAY_S,
    PrivateKey,
    Untrusted,
    authority_key,
    is_valid_label,
    key_pem,
    make_request,
    new_key,
    read_authority,
    read_key,
)
from kakeya.fleet.identity.identity import (
    FOLDER,
    REVOCATIONS,
    Identity,
    duration,
    identity_of,
    load_identity,
    load_peers,
    save_certificate,
    save_identity,
)
from kakeya.fleet.identity.invite import (
    AGAIN,
    CA_HASH_BYTES,
    Revoked,
    Token,
    decode_token,
    is_same_proof,
    proof_of_answer,
    proof_of_request,
)
from kakeya.fleet.identity.revocations import load_revocations
from kakeya.v1 import fleet_pb2 as pb
from kakeya.v1.fleet_pb2_grpc import JoinServiceStub
from kakeya.wire.calls import calling
from kakeya.wire.channels import open_channel

PENDING_KEY = "joining.pem"
"""The key's folder in the data directory, until the fleet has certified the key."""
MAX_CLOCK_GAP_S = DAY_S
"""Largest gap between the clocks of both machines; certificates forgive twice as much."""
_TIMEOUT_S = 4.0
_ROUNDS = 3
_PAUSE_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedFleet:
    """The result of joining; `peers` are the members to gossip with first.

    `is_new` is False when the machine was a member of the token's fleet already: then no node was
    asked.
    """

    identity: Identity
    peers: tuple[str, ...]
    is_new: bool


async def join(
    data_dir: Path, token: str, label: str, *, clock: Clock, is_typed: bool = False
) -> JoinedFleet:
    """Join the fleet that a token leads into, as the node of a data directory. `is_typed`: a person
    asks for it, so the fleet is asked whether it has removed this member: it gets a new key then.

    Raises ConfigError for a member of another fleet and for a clock that is off, InvalidArgument
    for an unreadable token, Denied or Unauthenticated for a token that is not valid, PeerError.
    """
    wanted = decode_token(token)
    if not is_valid_label(label):
        raise InvalidArgument(f"{label!r} is no label; give 1 to 64 bytes of printable text")
    held = await asyncio.to_thread(load_identity, data_dir)
    if held is not None and held.fleet != wanted.fleet:
        raise ConfigError(
            f"the token leads into fleet {wanted.fleet}, and {already_member(held, data_dir)}"
        )
    if held is not None and await asyncio.to_thread(_is_revoked, data_dir, held):
        held = None
    is_valid = held is not None and not held.fault_at(clock.wall())
    if (
        held is not None
        and is_valid
        and is_typed
        and await _was_removed(held, wanted, label, clock)
    ):
        held = None
    if held is not None and not held.fault_at(clock.wall()):
        peers = await asyncio.to_thread(load_peers, data_dir)
        return JoinedFleet(identity=held, peers=peers, is_new=False)
    key = await asyncio.to_thread(_key_for, data_dir, held)
    csr = make_request(key, label)
    address, answer = await _ask_until_answered(wanted, csr, clock)
    identity = check_answer(wanted, csr, key, answer, address=address, now=clock.wall())
    peers = tuple(answer.peers)
    await asyncio.to_thread(_save, data_dir, held, identity, peers, answer.revocations)
    return JoinedFleet(identity=identity, peers=peers, is_new=True)


def check_answer(
    token: Token,
    csr: bytes,
    key: PrivateKey,
    answer: pb.JoinResponse,
    *,
    address: str,
    now: float,
) -> Identity:
    """Make the identity from the answer, which must be the inviter's, of its fleet, for this key.

    Raises PeerProtocol when it is not, ConfigError when the two clocks are too far apart.
    """
    expected = proof_of_answer(
        token.secret,
        csr=csr,
        certificate=answer.certificate,
        authority=answer.authority,
        peers=tuple(answer.peers),
        revocations=answer.revocations,
    )
    if not is_same_proof(expected, answer.proof):
        raise PeerProtocol(
            f"the server at {address} is not the node that made the token; check the network "
            f"between the two machines, then {AGAIN}"
        )
    try:
        identity = identity_of(key, answer.certificate, answer.authority)
    except Untrusted as problem:
        raise PeerProtocol(f"{address} issued no usable certificate: {problem}") from problem
    if not identity.authority_hash.startswith(token.ca_hash[:CA_HASH_BYTES]):
        raise PeerProtocol(
            f"{address} leads into fleet {identity.fleet} and the token into {token.fleet}; {AGAIN}"
        )
    _check_clock(now, made_at=identity.not_before_at + BACKDATED_S, address=address)
    return identity


def _check_clock(now: float, *, made_at: float, address: str) -> None:
    gap_s = now - made_at
    if abs(gap_s) > MAX_CLOCK_GAP_S:
        side = "ahead of" if gap_s > 0 else "behind"
        raise ConfigError(
            f"the clock of this machine is {duration(abs(gap_s))} {side} that of {address}; set "
            "the one that is wrong (on a Mac: sudo sntp -sS time.apple.com) and run the same "
            "command again"
        )


def _key_for(data_dir: Path, held: Identity | None) -> PrivateKey:
    """The key to join with: of an expired identity, of an interrupted try, or a new one."""
    if held is not None:
        return read_key(held.tls.key)
    path = data_dir / PENDING_KEY
    try:
        return read_key(path.read_bytes())
    except (OSError, Untrusted):
        key = new_key()
    try:
        data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomically(path, key_pem(key))
    except OSError as problem:
        raise ConfigError(f"{path} cannot be written: {problem.strerror or problem}") from problem
    return key


async def _was_removed(held: Identity, token: Token, label: str, clock: Clock) -> bool:
    """Ask the fleet whether the key of a member is revoked; False where it cannot be asked."""
    csr = make_request(read_key(held.tls.key), label)
    try:
        await _ask_until_answered(token, csr, clock)
    except Revoked:
        return True
    except KakeyaError:
        pass
    return False


def _is_revoked(data_dir: Path, held: Identity) -> bool:
    """Whether this machine has heard that its fleet removed it: its key is of no use any more."""
    root = authority_key(read_authority(held.tls.authority))
    return held.node_id in load_revocations(data_dir / FOLDER / REVOCATIONS, root).node_ids


def _set_aside(data_dir: Path) -> None:
    """Move the identity of a revoked node away. Raises ConfigError."""
    old = data_dir / FOLDER
    aside = old.with_suffix(".revoked")
    try:
        if old.exists():
            shutil.rmtree(aside, ignore_errors=True)
            old.rename(aside)
    except OSError as problem:
        raise ConfigError(
            f"{old} cannot be moved to {aside}: {problem.strerror or problem}"
        ) from problem


def _save(
    data_dir: Path,
    held: Identity | None,
    identity: Identity,
    peers: Sequence[str],
    revocations: bytes,
) -> None:
    if held is None:
        _set_aside(data_dir)
        save_identity(data_dir, identity, peers=peers, revocations=revocations)
        (data_dir / PENDING_KEY).unlink(missing_ok=True)
        return
    try:
        save_certificate(data_dir, identity)
        if revocations:
            write_atomically(data_dir / FOLDER / REVOCATIONS, revocations)
    except OSError as problem:
        raise ConfigError(
            f"the certificate cannot be written to {data_dir / FOLDER}: "
            f"{problem.strerror or problem}"
        ) from problem


async def _ask_until_answered(
    token: Token, csr: bytes, clock: Clock
) -> tuple[str, pb.JoinResponse]:
    """Ask at each address, a few times over. Raises the refusal, or PeerUnavailable."""
    proof = proof_of_request(token.secret, ca_hash=token.ca_hash, csr=csr)
    request = pb.JoinRequest(csr=csr, proof=proof)
    silent: KakeyaError | None = None
    for turn in range(_ROUNDS):
        refused: KakeyaError | None = None
        for address in token.addresses:
            try:
                return address, await _ask(address, request)
            except (PeerUnavailable, DeadlineExceeded) as failure:
                silent = failure
            except KakeyaError as refusal:
                # Another address may still lead to the right node: this one may be another machine.
                refused = refused or refusal
        if refused is not None:
            raise refused
        if turn < _ROUNDS - 1:
            await clock.sleep(_PAUSE_S)
    raise _nobody_answers(token, clock.wall(), silent)


async def _ask(address: str, request: pb.JoinRequest) -> pb.JoinResponse:
    async with open_channel(address) as channel:
        with calling(address, Revoked):
            return await JoinServiceStub(channel).Join(request, timeout=_TIMEOUT_S)


def _nobody_answers(token: Token, now: float, failure: KakeyaError | None) -> PeerError:
    where = ", ".join(token.addresses)
    late_s = now - token.expires_at
    if late_s > 0:
        return PeerUnavailable(
            f"the token expired {duration(late_s)} ago, and no node answers at {where}; {AGAIN}"
        )
    why = failure.message if failure is not None else "no address"
    return PeerUnavailable(
        f"no node answers at {where} ({why}); check that the inviting node still runs and that "
        "this machine reaches it, then run the same command again"
    )
