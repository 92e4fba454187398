"""The seal of a card: proof of its owner over its exact bytes.

A sealed card is its body and two more fields, the last of the message:

    body | 110: certificate, DER | 111: signature, 64 bytes, over every byte before field 111

The seal has one spelling only. ECDSA lets any relay turn a valid signature (r, s) into a second
one, (r, n - s), and a relay that could respell a card could put a twin in the place of the
original, so that the owner's beats would count for nothing: hence fixed-width r and s, s in the
lower half, fields in one form.
"""

from __future__ import annotations

from dataclasses import dataclass

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import (
    decode_dss_signature,
    encode_dss_signature,
)

from kakeya.core.errors import InvalidArgument
from kakeya.fleet.cards.cards import CardFault
from kakeya.fleet.cards.framing import LENGTH, read_number, skip_field, write_number
from kakeya.fleet.identity.certificates import PrivateKey, PublicKey

CERTIFICATE_FIELD, SIGNATURE_FIELD = 110, 111
SIGNATURE_BYTES = 64
_MAX_FIELDS = 1024
"""Most outermost fields of a card: a real card has a hundred; thousands take long to split."""
_MARK_BYTES = 32
_CERTIFICATE_TAG, _SIGNATURE_HEAD = b"\xf2\x06", b"\xfa\x06\x40"
_SIGNATURE_FIELD_BYTES = len(_SIGNATURE_HEAD) + SIGNATURE_BYTES
_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
"""The order n of P-256's group: s and n - s verify alike."""
_SHA256 = ec.ECDSA(hashes.SHA256())


class BrokenSeal(ValueError):
    """Bytes without a seal (UNSIGNED), or with one that `seal` never makes (FORGED)."""

    def __init__(self, fault: CardFault) -> None:
        super().__init__(fault.value)
        self.fault = fault


@dataclass(frozen=True, slots=True)
class CardSeal:
    """A card taken apart: the signed bytes, the certificate, the signature."""

    signed: bytes
    certificate: bytes
    signature: bytes

    def is_by(self, key: PublicKey) -> bool:
        """Whether the owner of a key made it."""
        r, s = (int.from_bytes(half, "big") for half in (self.signature[:32], self.signature[32:]))
        if not 0 < s <= _ORDER // 2:
            return False
        try:
            key.verify(encode_dss_signature(r, s), self.signed, _SHA256)
        except InvalidSignature:
            return False
        return True


def seal(body: bytes, *, certificate: bytes, key: PrivateKey) -> bytes:
    """Return the card of a body that has neither field, under a certificate (DER)."""
    signed = body + _CERTIFICATE_TAG + write_number(len(certificate)) + certificate
    r, s = decode_dss_signature(key.sign(signed, _SHA256))
    halves = r.to_bytes(32, "big") + min(s, _ORDER - s).to_bytes(32, "big")
    return signed + _SIGNATURE_HEAD + halves


def open_seal(wire: bytes) -> CardSeal:
    """Take a sealed card apart. Raises BrokenSeal."""
    at = len(wire) - _SIGNATURE_FIELD_BYTES
    is_sealed = at >= 0 and wire.startswith(_SIGNATURE_HEAD, at)
    signed = wire[:at] if is_sealed else wire
    fields = _split(signed)
    certificates = [content for number, content in fields if number == CERTIFICATE_FIELD]
    has_signature = any(number == SIGNATURE_FIELD for number, _ in fields)
    if not is_sealed and not certificates and not has_signature:
        raise BrokenSeal(CardFault.UNSIGNED)
    if not is_sealed or has_signature or len(certificates) != 1:
        raise BrokenSeal(CardFault.FORGED)
    return CardSeal(signed, certificates[0], wire[-SIGNATURE_BYTES:])


def certificate_mark(wire: bytes) -> bytes:
    """A mark that tells certificates in sealed cards apart at no cost: the end of the signature."""
    return wire[:-_SIGNATURE_FIELD_BYTES][-_MARK_BYTES:]


def _split(message: bytes) -> list[tuple[int, bytes]]:
    """The outermost fields: number, and content without tag and length."""
    found: list[tuple[int, bytes]] = []
    at = 0
    try:
        while at < len(message):
            tag, at = read_number(message, at)
            start = read_number(message, at)[1] if tag & 7 == LENGTH else at
            at = skip_field(message, tag, at)
            if len(found) >= _MAX_FIELDS:
                raise BrokenSeal(CardFault.FORGED)
            found.append((tag >> 3, message[start:at]))
    except InvalidArgument as broken:
        raise BrokenSeal(CardFault.FORGED) from broken
    return found
