"""Which model of peers a name stands for, and which models leave the disk for it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from kakeya.core.errors import InvalidArgument
from kakeya.core.units import format_bytes
from kakeya.weights.partial import DiskRefused
from kakeya.weights.peers import WeightsOffer, WeightsPeer


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenModel:
    """The model that a name stands for. Without a digest `unhashed` are nodes that have to compute
    it, and `coming` those that are about to fetch it from the hub, and whether they have begun."""

    digest: str = ""
    unhashed: tuple[WeightsPeer, ...] = ()
    coming: Mapping[WeightsPeer, bool] = field(default_factory=dict)


def choose(
    name: str, offers: Mapping[WeightsPeer, Sequence[WeightsOffer]], digest: str = ""
) -> ChosenModel:
    """Choose by name, or the one with a known digest. Raises InvalidArgument where nodes have
    unlike models of the name."""
    named = [(peer, one) for peer, all in offers.items() for one in all if one.name == name]
    found: dict[str, list[str]] = {}
    for peer, one in named:
        if one.digest:
            found.setdefault(one.digest, []).append(peer.label)
    if digest or len(found) == 1:
        return ChosenModel(digest=digest or next(iter(found)))
    if found:
        told = "; ".join(f"{one[:12]} at {', '.join(at)}" for one, at in sorted(found.items()))
        raise InvalidArgument(
            f"{name} is the name of unlike models: {told}; say which by --from NODE"
        )
    return ChosenModel(
        unhashed=tuple(peer for peer, one in named if one.is_whole),
        coming={peer: one.is_begun for peer, one in named if not one.is_whole},
    )


def sources_of(
    digest: str, offers: Mapping[WeightsPeer, Sequence[WeightsOffer]]
) -> dict[WeightsPeer, bool]:
    """The peers that have a model, by whatever name, and whether they have all of it."""
    found: dict[WeightsPeer, bool] = {}
    for peer, all in offers.items():
        for one in all:
            if one.digest == digest:
                found[peer] = found.get(peer, False) or one.is_whole
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class PulledModel:
    """A model, or a part of one, that a pull brought. `is_spared`: it is loaded, configured, being
    fetched, or was pulled with --keep."""

    path: str
    bytes: int
    used_at: float
    is_spared: bool


def to_remove(models: Iterable[PulledModel], needed_bytes: int, budget_bytes: int) -> list[str]:
    """The paths to remove, those first that were not used for longest, so that so many bytes more
    are within the budget, 0 = there is none. Raises DiskRefused where that cannot be; nothing is to
    be removed then."""
    pulled = list(models)
    over = sum(one.bytes for one in pulled) + needed_bytes - budget_bytes
    chosen: list[str] = []
    if not budget_bytes or over <= 0:
        return chosen
    for one in sorted(pulled, key=lambda one: (one.used_at, one.path)):
        if over > 0 and not one.is_spared and one.bytes:
            chosen.append(one.path)
            over -= one.bytes
    if over > 0:
        spared = sum(one.bytes for one in pulled if one.is_spared)
        raise DiskRefused(
            f"the model needs {format_bytes(needed_bytes)} of the {format_bytes(budget_bytes)} for "
            f"pulled models (weights.disk_mb), of which {format_bytes(spared)} are in use or kept"
        )
    return chosen
