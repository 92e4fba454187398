"""Sealing and checking cards: what one costs its owner, and what a hearer pays once per change.

.venv/bin/python -m benchmarks.card_trust

The baseline is the curve operation alone (P-256, SHA-256 over as many bytes).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec

from benchmarks.report import emit, interleaved, median
from kakeya.fleet.identity.authority import authority_of, new_fleet
from kakeya.fleet.identity.trust import FleetTrust
from kakeya.v1 import distributed_pb2 as pb

NOW = 1_700_000_000.0
OWNERS = 100
REPEATS = 15
_SHA256 = ec.ECDSA(hashes.SHA256())


def _body(node_id: str, stamp: float) -> bytes:
    card = pb.NodeCapability(
        node_id=node_id,
        label="mini",
        grpc_address="192.168.1.20:50051",
        platform="darwin-arm64",
        unified_memory_bytes=2**36,
        mlx_version="0.32.4",
        announced_at_unix=stamp,
        ttl_seconds=120,
        incarnation=7,
        protocol_min=1,
        protocol_max=1,
        beat_anchor=bytes(8),
    )
    for role in (1, 2, 2):
        card.models.add(model_id="mlx-community/a-model-of-7B-4bit", role=role, quantization="4bit")
    return card.SerializeToString()


def _us_each(count: int, work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return (time.perf_counter() - started) / count * 1e6


def main() -> None:
    first = new_fleet("mini-1", NOW)
    authority = authority_of(first)
    if authority is None:
        raise SystemExit("a new fleet has no authority")
    owners = [FleetTrust(authority.new_identity(f"mini-{i}", now=NOW)) for i in range(OWNERS)]
    bodies = [_body(owner.identity.node_id, NOW) for owner in owners]
    sealed = [owner.seal(body) for owner, body in zip(owners, bodies, strict=True)]
    changed = [owner.seal(body) for owner, body in zip(owners, bodies, strict=True)]
    key = ec.generate_private_key(ec.SECP256R1())
    signatures = [key.sign(wire, _SHA256) for wire in sealed]

    def verify_alone() -> None:
        public = key.public_key()
        for wire, signature in zip(sealed, signatures, strict=True):
            public.verify(signature, wire, _SHA256)

    def heard(wires: Sequence[bytes], *, of_known: Sequence[bytes] = ()) -> float:
        trust = FleetTrust(first)
        trust.warm(of_known)
        return _us_each(len(wires), lambda: trust.warm(wires))

    taken = interleaved(
        {
            "sign": lambda: _us_each(OWNERS, lambda: [key.sign(wire, _SHA256) for wire in sealed]),
            "seal": lambda: _us_each(
                OWNERS,
                lambda: [owner.seal(body) for owner, body in zip(owners, bodies, strict=True)],
            ),
            "verify": lambda: _us_each(OWNERS, verify_alone),
            "of a new owner": lambda: heard(sealed),
            "of a known owner": lambda: heard(changed, of_known=sealed),
            "that is known": lambda: heard(sealed, of_known=sealed),
        },
        REPEATS,
    )
    us = {name: median(values) for name, values in taken.items()}
    for name, baseline, limit in (
        ("seal", "sign", 2.0),
        ("of a new owner", "verify", 5.0),
        ("of a known owner", "verify", 1.6),
        ("that is known", "verify", 0.05),
    ):
        emit(
            "seal a card, us" if name == "seal" else f"check a card {name}, us",
            ours=us[name],
            baseline=us[baseline],
            ratio=us[name] / us[baseline],
            goal=f"<= {limit:g} x",
            met=us[name] <= limit * us[baseline],
            card_bytes=len(sealed[0]),
            body_bytes=len(bodies[0]),
        )


if __name__ == "__main__":
    main()
