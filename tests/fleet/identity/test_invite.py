"""Tokens, and who is let in by one: decisions without sockets."""

from __future__ import annotations

import base64
import hashlib
import hmac
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kakeya.core.errors import Denied, InvalidArgument, KakeyaError, Refused, Unauthenticated
from kakeya.fleet.identity.authority import authority_of, new_fleet
from kakeya.fleet.identity.certificates import PrivateKey, make_request, new_key, node_id_of
from kakeya.fleet.identity.invite import (
    MAX_LIVE,
    Invite,
    Invites,
    InviteStats,
    Moment,
    Token,
    decode_token,
    encode_token,
    proof_of_answer,
    proof_of_request,
)
from kakeya.wire.security import CertRole

NOW = 1_700_000_000.0
AUTHORITY = authority_of(new_fleet("mini-1", NOW))
assert AUTHORITY is not None
TOKEN = Token(
    addresses=("192.168.1.5:40001", "[fd7a::1]:40002"),
    ca_hash=bytes(range(16)),
    secret=bytes(range(16, 32)),
    expires_at=NOW + 900,
)


def at(mono: float) -> Moment:
    return Moment(mono, NOW + mono)


def make_invites(*, revoked: frozenset[str] = frozenset()) -> Invites:
    assert AUTHORITY is not None
    return Invites(AUTHORITY, is_revoked=revoked.__contains__)


def ask(invites: Invites, invite: Invite, key: PrivateKey, label: str, mono: float = 1.0) -> str:
    return ask_at(invites, invite, key, label, at(mono))


def ask_at(invites: Invites, invite: Invite, key: PrivateKey, label: str, now: Moment) -> str:
    """The node id that was let in."""
    assert AUTHORITY is not None
    csr = make_request(key, label)
    proof = proof_of_request(invite.secret, ca_hash=AUTHORITY.key_hash, csr=csr)
    return invites.admit(csr, proof, now=now)[1].node_id


def make(invites: Invites, *, mono: float = 0.0, role: CertRole = CertRole.MEMBER) -> Invite:
    return invites.make(role, valid_s=900.0, now=at(mono))


# Tokens


addresses = st.lists(
    st.from_regex(r"[0-9a-z.\[\]:]{3,30}:[0-9]{1,5}", fullmatch=True), min_size=1, max_size=8
)


@given(addresses, st.binary(min_size=16, max_size=16), st.binary(min_size=16, max_size=16))
def test_a_token_is_one_word_that_says_what_was_put_in(
    where: list[str], ca_hash: bytes, secret: bytes
) -> None:
    token = Token(addresses=tuple(where), ca_hash=ca_hash, secret=secret, expires_at=NOW)
    word = encode_token(token)
    assert decode_token(word) == token
    assert all(letter.isalnum() or letter in "-_" for letter in word)


def test_a_pastes_line_breaks_do_not_matter() -> None:
    word = encode_token(TOKEN)
    assert decode_token(f"  {word[:40]}\n {word[40:]}\r\n") == TOKEN


def test_a_token_that_lacks_a_letter_or_has_a_wrong_one_is_damaged() -> None:
    word = encode_token(TOKEN)
    for at in range(len("kakeya-"), len(word)):
        wrong = "A" if word[at] != "A" else "B"
        for damaged in (word[:at], word[:at] + word[at + 1 :], word[:at] + wrong + word[at + 1 :]):
            with suppress(InvalidArgument):
                assert decode_token(damaged) == TOKEN  # unused bits of the last letter


@pytest.mark.parametrize("text", ["", "hello", "--flag", "127.0.0.1:50051", "kakeya-", "kakeya-é"])
def test_what_is_no_token_is_told_so(text: str) -> None:
    with pytest.raises(InvalidArgument, match="paste the whole line"):
        decode_token(text)


def test_a_token_of_another_version_is_refused() -> None:
    content = b"\x02" + bytes(40)
    packed = content + hashlib.sha256(content).digest()[:4]
    with pytest.raises(InvalidArgument):
        decode_token("kakeya-" + base64.urlsafe_b64encode(packed).decode())


def test_a_token_does_not_show_its_secret_in_a_log() -> None:
    assert str(TOKEN.secret) not in repr(TOKEN)


# Proofs


def test_proofs_are_hmac_over_every_part_with_its_length() -> None:
    told = {"csr": b"c", "certificate": b"1", "authority": b"2", "revocations": b""}
    proof = proof_of_answer(TOKEN.secret, peers=("a", "b"), **told)  # type: ignore[arg-type]
    text = b"kakeya-join-answer" + b"".join(
        len(part).to_bytes(4, "big") + part for part in (b"c", b"1", b"2", b"", b"a", b"b")
    )
    assert proof == hmac.digest(TOKEN.secret, text, "sha256")
    moved = proof_of_answer(TOKEN.secret, peers=("ab",), **told)  # type: ignore[arg-type]
    assert moved != proof


# Invites


def test_an_invite_takes_in_one_key_and_that_one_again() -> None:
    invites = make_invites()
    invite = make(invites)
    key = new_key()
    assert ask(invites, invite, key, "mini-2") == node_id_of(key.public_key())
    assert ask(invites, invite, key, "mini-2") == node_id_of(key.public_key())
    with pytest.raises(Denied, match=r"used already, by mini-2.*kakeya invite"):
        ask(invites, invite, new_key(), "mini-3")
    assert ask(invites, invite, key, "mini-2", mono=899.9)
    assert invites.stats == InviteStats(made=1, admitted=1, refused=1)


def test_an_invite_ends() -> None:
    invites = make_invites()
    invite = make(invites)
    key = new_key()
    with pytest.raises(Denied, match=r"expired 5 min ago.*kakeya invite"):
        ask(invites, invite, key, "mini-2", mono=1200.0)
    with pytest.raises(Denied, match="expired"):
        ask(invites, invite, key, "mini-2", mono=900.0)
    assert ask(invites, make(invites, mono=1200.0), key, "mini-2", mono=1201.0)


@pytest.mark.parametrize(
    ("now", "words"),
    [
        (Moment(60.0, NOW + 8 * 3600.0), "expired 465 min ago"),  # its machine slept meanwhile
        (Moment(960.0, NOW + 5.0), "expired 60 s ago"),  # its wall clock was set back
    ],
)
def test_an_invite_ends_when_either_clock_says_so(now: Moment, words: str) -> None:
    invites = make_invites()
    invite = make(invites)
    assert invites.left_s(at(1.0)) == 899.0
    assert invites.left_s(now) == 0.0
    with pytest.raises(Denied, match=words):
        ask_at(invites, invite, new_key(), "mini-2", now)


def test_wrong_proofs_are_counted_and_cost_the_invite_nothing() -> None:
    invites = make_invites()
    invite = make(invites)
    stranger = Invite(secret=bytes(16), role=CertRole.ADMIN, ends=at(900.0))
    for _ in range(100):
        with pytest.raises(Unauthenticated, match="does not know this token"):
            ask(invites, stranger, new_key(), "thief")
    for proof in (b"", bytes(32), b"x" * 1000):
        with pytest.raises(Unauthenticated):
            invites.admit(make_request(new_key(), "thief"), proof, now=at(1.0))
    assert invites.stats.wrong_proofs == 103
    assert ask(invites, invite, new_key(), "mini-2")


def test_a_right_proof_over_rubbish_costs_the_invite_nothing() -> None:
    assert AUTHORITY is not None
    invites = make_invites()
    invite = make(invites)
    good = make_request(new_key(), "mini-2")
    for csr in (b"", b"rubbish", good[:-1], good[:-1] + bytes((good[-1] ^ 1,))):
        proof = proof_of_request(invite.secret, ca_hash=AUTHORITY.key_hash, csr=csr)
        with pytest.raises(KakeyaError):
            invites.admit(csr, proof, now=at(1.0))
    assert ask(invites, invite, new_key(), "mini-2")


def test_the_token_says_the_role_not_the_joiner() -> None:
    assert AUTHORITY is not None
    invites = make_invites()
    member, client = make(invites), make(invites, role=CertRole.CLIENT)
    for invite in (client, member):
        csr = make_request(new_key(), "x")
        proof = proof_of_request(invite.secret, ca_hash=AUTHORITY.key_hash, csr=csr)
        assert invites.admit(csr, proof, now=at(1.0))[0].role is invite.role


def test_a_revoked_key_does_not_come_back_by_an_invite() -> None:
    key = new_key()
    invites = make_invites(revoked=frozenset({node_id_of(key.public_key())}))
    invite = make(invites)
    with pytest.raises(Denied, match="revoked"):
        ask(invites, invite, key, "mini-2")
    assert ask(invites, invite, new_key(), "mini-2")


def test_invites_are_bounded() -> None:
    invites = make_invites()
    for _ in range(MAX_LIVE):
        make(invites)
    with pytest.raises(Refused, match="live already"):
        make(invites)
    for turn in range(1, 20):
        for _ in range(MAX_LIVE):
            make(invites, mono=1000.0 * turn)
    assert len(invites._invites) <= 64 + MAX_LIVE


@pytest.mark.parametrize("valid_s", [0.0, -1.0, 86_401.0, float("nan"), float("inf")])
def test_an_invite_has_a_sensible_length(valid_s: float) -> None:
    with pytest.raises(InvalidArgument):
        make_invites().make(CertRole.MEMBER, valid_s=valid_s, now=at(0.0))
