"""Models as their owner sees them: where each one lies, its last use, and what may be removed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kakeya.generation.spec import GGUF
from kakeya.weights.choice import PulledModel
from kakeya.weights.found import RECORD, FoundModel, read_record
from kakeya.weights.partial import PULLS, disk_bytes, remove_folder
from kakeya.weights.peers import WeightsOffer, WeightsPeer


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedModel:
    """One model on the disks of the fleet; `found` None = it is not on this one. The labels are of
    peers that have all of it, and of those that fetch it."""

    name: str
    bytes: int
    digest: str
    found: FoundModel | None = None
    peers: tuple[str, ...] = ()
    fetching: tuple[str, ...] = ()


def listed_models(
    own: Iterable[tuple[FoundModel, str]],
    offers: Mapping[WeightsPeer, Sequence[WeightsOffer]],
) -> list[ListedModel]:
    """The models of this node, each with its digest, "" = not known, and those of peers; by name
    and digest."""
    listed: dict[tuple[str, str], ListedModel] = {}
    for model, digest in own:
        listed[model.name, digest] = ListedModel(
            name=model.name, bytes=model.bytes, digest=digest, found=model
        )
    for peer, models in offers.items():
        for one in models:
            key = (one.name, one.digest)
            known = listed.get(key)
            known = known or ListedModel(name=one.name, bytes=one.bytes, digest=one.digest)
            if one.is_whole:
                listed[key] = replace(known, peers=(*known.peers, peer.label))
            else:
                listed[key] = replace(known, fetching=(*known.fetching, peer.label))
    return [listed[key] for key in sorted(listed)]


def used_at(path: Path) -> float:
    """When a model that a pull brought was used last, wall clock; 0 = not known. Blocks."""
    try:
        return (path / RECORD).stat().st_mtime
    except OSError:
        return 0.0


def note_use(source: str) -> None:
    """Note in its folder that a model is used now. Blocks."""
    path = Path(source)
    with contextlib.suppress(OSError):  # no pull brought it
        os.utime((path.parent if path.suffix == GGUF else path) / RECORD)


def uses(
    model: FoundModel, configured: Mapping[str, str], loaded: Collection[str]
) -> tuple[str, str]:
    """The name by which a model is loaded, and that by which the configuration has it; "" =
    neither. One that a pull brought is loaded by its own name, too. Blocks."""
    real = model.path.resolve()
    names = [
        name
        for name, source in configured.items()
        if source == model.name or real in _paths(source)
    ]
    is_own = model.record is not None and model.name not in configured
    served = [*names, model.name] if is_own else names
    return next((name for name in served if name in loaded), ""), next(iter(names), "")


def pulled_models(
    folder: Path,
    models: Iterable[FoundModel],
    is_spared: Callable[[FoundModel], bool],
    under_way: Collection[str],
) -> Iterator[PulledModel]:
    """What pulls brought: whole models, and parts of others, which are spared where their folder's
    name is of one under way. Blocks."""
    for model in models:
        if model.record is not None:
            yield PulledModel(
                path=str(model.path),
                bytes=model.bytes,
                used_at=used_at(model.path),
                is_spared=model.record.keep or is_spared(model),
            )
    parts = folder / PULLS
    for part in parts.iterdir() if parts.is_dir() else ():
        with contextlib.suppress(FileNotFoundError):  # it has just got its name
            yield PulledModel(
                path=str(part),
                bytes=disk_bytes(part),
                used_at=part.stat().st_mtime,
                is_spared=part.name in under_way,
            )


def parts_of(folder: Path, name: str) -> list[Path]:
    """What is here of models that a pull of this name began. Blocks."""
    parts = folder / PULLS
    found = [(part, read_record(part)) for part in (parts.iterdir() if parts.is_dir() else ())]
    return [part for part, record in found if record is not None and record.name == name]


def drop_parts(folder: Path, name: str) -> None:
    """Remove what pulls of this name began and did not end, where one of them ended: parts of
    another state of the model, or from another source. Blocks."""
    for part in parts_of(folder, name):
        with contextlib.suppress(OSError):
            remove_folder(folder, part)


def _paths(source: str) -> set[Path]:
    """The folder of a configured model, and, of a GGUF file, the file."""
    path = Path(source)
    if not path.is_absolute():
        return set()
    real = path.resolve()
    return {real, real.parent} if real.suffix == GGUF else {real}
