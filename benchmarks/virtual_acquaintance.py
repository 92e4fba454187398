"""Lets every node of a fleet hold every card, at the cost of copies.

One registry really merges all cards; the others get copies of its columns, moved to their own
clocks and without their own card. What each then holds is what it would hold had it merged them
itself (`tests/fleet/test_simulate.py` compares), for a hundredth of the time: 10,000 nodes that
know each other are 10^8 held cards.
"""

# ruff: noqa: SLF001 - what a registry holds is copied here whole, which nobody else may do

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from benchmarks.virtual_time import NodeClock
from kakeya.fleet.view.beats import no_beats
from kakeya.fleet.view.card_table import CardTable
from kakeya.fleet.view.registry import CapabilityRegistry


def introduce(
    registries: Sequence[CapabilityRegistry],
    clocks: Sequence[NodeClock],
    template: CapabilityRegistry,
) -> None:
    """Let each registry hold the cards of all others, just beaten.

    `template` shares their index and belongs to none of them; each knows nobody yet.
    """
    cards = [registry.own for registry in registries]
    beats = replace(
        no_beats(),
        keys=np.array([card.key for card in cards], np.uint64),
        numbers=np.zeros(len(cards), np.uint32),
        ages_s=np.zeros(len(cards)),
    )
    now = clocks[0].wall() - clocks[0].skew_s
    report = template.merge([card.wire for card in cards], now=now, mono=0.0, beats=beats)
    if len(report.changed) != len(cards):
        raise RuntimeError(f"of {len(cards)} cards {len(report.changed)} were merged: {report}")
    held = template.peers.held
    for registry, clock in zip(registries, clocks, strict=True):
        _copy(held, registry.peers.held, mono=clock.mono())
        _forget_own(registry)


def _copy(source: CardTable, target: CardTable, *, mono: float) -> None:
    if len(target) or source._needs_proofs:
        raise RuntimeError("only columns without proofs are copied, and only into empty ones")
    target._count, target._plain = source._count, source._plain
    target._cards = source._cards.copy()
    target._keys, target._numbers = source._keys.copy(), source._numbers.copy()
    target._ttl, target._proofs = source._ttl.copy(), source._proofs.copy()
    target._heard, target._lived = source._heard + mono, source._lived + mono
    target._since = source._since + np.float32(mono)
    target._missed = source._missed.copy()


def _forget_own(registry: CapabilityRegistry) -> None:
    held, own = registry.peers.held, registry.own
    slot = held.index.slot(own.node_id)
    assert slot is not None
    held._cards[slot] = None
    held._keys[slot] = 0
    held._count -= 1
    held._plain -= own.is_plain
