"""Manifests and sets of pieces, to and from the wire; what a peer sends is checked."""

from __future__ import annotations

from collections.abc import Iterable

from kakeya.core.errors import InvalidArgument, PeerProtocol
from kakeya.v1 import weights_pb2 as pb
from kakeya.weights.manifest import WeightsFile, WeightsManifest, checked_manifest

_HASH_BYTES = 32


def manifest_to_wire(manifest: WeightsManifest) -> pb.WeightsManifest:
    """Write a manifest."""
    return pb.WeightsManifest(
        files=[
            pb.WeightsFile(
                name=file.name,
                bytes=file.size,
                sha256=file.sha256,
                piece_sha256s=b"".join(file.pieces),
            )
            for file in manifest.files
        ]
    )


def manifest_from_wire(told: pb.WeightsManifest, digest: str, peer: str) -> WeightsManifest:
    """Read the manifest of a peer's model. Raises PeerProtocol for one that is not that of the
    digest, "" = of any, or that no correct node makes."""
    files = [
        WeightsFile(
            name=one.name,
            size=one.bytes,
            sha256=one.sha256,
            pieces=tuple(
                one.piece_sha256s[at : at + _HASH_BYTES]
                for at in range(0, len(one.piece_sha256s), _HASH_BYTES)
            ),
        )
        for one in told.files
    ]
    try:
        return checked_manifest(files, digest)
    except InvalidArgument as lie:
        raise PeerProtocol(f"{peer}: {lie.message}") from lie


def held_to_wire(held: Iterable[int], count: int) -> pb.HeldPieces:
    """Write the pieces that are here, of so many."""
    bits = bytearray(-(-count // 8))
    for piece in held:
        bits[piece // 8] |= 1 << piece % 8
    return pb.HeldPieces(held=bytes(bits))


def held_from_wire(told: pb.HeldPieces, count: int) -> set[int]:
    """Read the pieces of a model of so many; bits beyond count for nothing."""
    bits = told.held
    return {
        piece for piece in range(min(count, 8 * len(bits))) if bits[piece // 8] >> piece % 8 & 1
    }
