"""What TLS makes of the fleet's certificates, between real servers and channels."""

from __future__ import annotations

import datetime
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import grpc
import grpc.aio
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.serialization import Encoding

from kakeya.core.errors import InvalidArgument
from kakeya.fleet.identity.authority import Authority, authority_of, new_fleet
from kakeya.fleet.identity.certificates import (
    Untrusted,
    certificate_der,
    certificate_pem,
    make_request,
    new_key,
    node_id_of,
    read_authority,
    read_der,
    read_holder,
    read_id,
    read_key,
    read_leaf,
    spki_hash,
)
from kakeya.fleet.identity.identity import Identity
from kakeya.fleet.identity.trust import FleetTrust
from kakeya.wire.security import CertRole, TlsMaterial
from kakeya.wire.tls import channel_credentials, fleet_of, server_credentials

FIRST = new_fleet("mini-1", time.time())
AUTHORITY: Authority = authority_of(FIRST)  # type: ignore[assignment]


def made(
    role: CertRole = CertRole.MEMBER, *, age_s: float = 0.0, life_s: float = 86_400.0
) -> Identity:
    return AUTHORITY.new_identity("mini", role=role, now=time.time() - age_s, life_s=life_s)


async def _echo(request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
    (pem,) = context.auth_context()["x509_pem_cert"]
    caller = FleetTrust(FIRST).caller_of(pem)
    assert caller is not None
    return caller.node_id.encode()


@asynccontextmanager
async def served_by(material: TlsMaterial) -> AsyncIterator[str]:
    server = grpc.aio.server()
    handlers = {"Echo": grpc.unary_unary_rpc_method_handler(_echo)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", handlers),))
    port = server.add_secure_port("127.0.0.1:0", server_credentials(lambda: material))
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def call(address: str, material: TlsMaterial, name: str) -> str:
    options = (("grpc.ssl_target_name_override", name),)
    credentials = channel_credentials(material)
    async with grpc.aio.secure_channel(address, credentials, options=options) as channel:
        answer: bytes = await channel.unary_unary("/test/Echo")(b"", timeout=5)
        return answer.decode()


async def test_a_member_answers_to_its_id_and_to_the_name_of_every_member() -> None:
    server, client = made(), made()
    async with served_by(server.tls) as address:
        for name in (server.node_id, server.member_name):
            assert await call(address, client.tls, name) == client.node_id


async def test_a_member_does_not_answer_for_another() -> None:
    server, other = made(), made()
    async with served_by(server.tls) as address:
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await call(address, other.tls, other.node_id)
    assert failure.value.code() is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("role", [CertRole.CLIENT, CertRole.ADMIN])
async def test_who_is_no_member_calls_but_never_answers(role: CertRole) -> None:
    guest, member = made(role), made()
    async with served_by(member.tls) as address:
        assert await call(address, guest.tls, member.node_id) == guest.node_id
    async with served_by(guest.tls) as address:
        for name in (guest.node_id, guest.member_name):
            with pytest.raises(grpc.aio.AioRpcError):
                await call(address, member.tls, name)


async def test_strangers_and_those_whose_time_is_over_end_in_the_handshake() -> None:
    member = made()
    foreign = new_fleet("mini-1", time.time())
    late = made(age_s=200, life_s=100)
    early = made(age_s=-5 * 86_400)
    crossed = TlsMaterial(
        key=foreign.tls.key,
        certificate=foreign.tls.certificate,
        authority=member.tls.authority,
    )
    async with served_by(member.tls) as address:
        for material in (late.tls, early.tls, crossed):
            with pytest.raises(grpc.aio.AioRpcError):
                await call(address, material, member.node_id)
        assert await call(address, made().tls, member.node_id)  # the control


async def test_a_machine_whose_clock_is_a_day_behind_is_let_in() -> None:
    """Its peers made their certificates, by its clock, tomorrow."""
    member, ahead = made(), made(age_s=-1.9 * 86_400)
    async with served_by(member.tls) as address:
        assert await call(address, ahead.tls, member.node_id) == ahead.node_id


async def test_a_member_is_no_authority() -> None:
    mallory = made()
    key = new_key()
    moment = datetime.datetime.now(datetime.UTC)
    victim = made()
    leaf = read_leaf(mallory.tls.certificate)
    forged = (
        x509.CertificateBuilder()
        .subject_name(leaf.subject)
        .issuer_name(leaf.subject)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(moment - datetime.timedelta(days=1))
        .not_valid_after(moment + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(victim.node_id)]), critical=False)
        .sign(read_key(mallory.tls.key), hashes.SHA256())
    )
    chain = certificate_pem(forged) + mallory.tls.certificate
    with pytest.raises(Untrusted):
        read_holder(forged, read_authority(FIRST.tls.authority))
    assert FleetTrust(FIRST).caller_of(chain) is None
    with pytest.raises(Untrusted):
        read_authority(mallory.tls.certificate)
    from kakeya.fleet.identity.certificates import key_pem

    material = TlsMaterial(key=key_pem(key), certificate=chain, authority=FIRST.tls.authority)
    async with served_by(victim.tls) as address:
        with pytest.raises(grpc.aio.AioRpcError):
            await call(address, material, victim.node_id)


def test_a_request_names_its_key_and_nothing_else() -> None:
    """Names that a joiner writes into its request are not certified."""
    key = new_key()
    victim = made()
    wished = (
        x509.CertificateSigningRequestBuilder()
        .subject_name(x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "mini-9")]))
        .add_extension(
            x509.SubjectAlternativeName(
                [
                    x509.DNSName(victim.node_id),
                    x509.UniformResourceIdentifier("kakeya:role:admin"),
                ]
            ),
            critical=False,
        )
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
        .public_bytes(Encoding.DER)
    )
    pem = AUTHORITY.issue(AUTHORITY.read(wished), role=CertRole.CLIENT, now=time.time())
    holder = read_holder(read_leaf(pem), read_authority(FIRST.tls.authority))
    assert (holder.node_id, holder.role) == (node_id_of(key.public_key()), CertRole.CLIENT)
    assert holder.label == "mini-9"
    names = read_leaf(pem).extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == [holder.node_id]
    with pytest.raises(Untrusted):
        read_authority(pem)


def test_no_byte_of_a_request_or_a_certificate_can_be_changed() -> None:
    for _ in range(4):  # signatures end in every kind of bit
        csr = make_request(new_key(), "mini-2")
        pem = AUTHORITY.issue(AUTHORITY.read(csr), role=CertRole.MEMBER, now=time.time())
        root = read_authority(FIRST.tls.authority)
        der = certificate_der(read_leaf(pem))
        for altered in _altered(csr):
            with pytest.raises(InvalidArgument):
                AUTHORITY.read(altered)
        for altered in _altered(der):
            with pytest.raises(Untrusted):
                read_holder(read_der(altered), root)
        assert read_holder(read_der(der), root).label == "mini-2"


def _altered(data: bytes) -> Iterator[bytes]:
    for at in range(len(data)):
        altered = bytearray(data)
        altered[at] ^= 0x01
        yield bytes(altered)
        yield data[:at]


def test_names_are_hashes_of_keys() -> None:
    identity = made()
    key = read_key(identity.tls.key).public_key()
    assert read_id(identity.node_id) == spki_hash(key)
    assert identity.fleet == fleet_of(identity.tls.authority) == FIRST.fleet
