"""Findings about one model on this machine, kept for its next load: checks, and measured speeds.

The name of the file is a digest of all that they depend on: weights, versions, machine, BLAS and
its threads, layout. A file that does not read back is as good as none: all is found again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path

from kakeya.core.files import write_atomically
from kakeya.mlx.loader import LoadedModel
from kakeya.mlx.numerics.grid import exactness

FORMAT = 2
_MOST_BYTES = 1 << 16
_KEPT_FILES = 64
"""Older files are of weights or versions that are not loaded any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    """Measured times of a model on a quiet machine; empty = not measured.

    `forwards_s` are of steps and blocks by their rows, 1 = the pipelined plain step; `pieces_s` of
    pieces of a prompt by their tokens. Each token of context adds `context_s` to each token of a
    piece.
    """

    forwards_s: Mapping[int, float] = field(default_factory=dict)
    pieces_s: Mapping[int, float] = field(default_factory=dict)
    context_s: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        """Of plain decoding; 0 = not measured."""
        return 1 / self.forwards_s[1] if self.forwards_s else 0.0

    def prefill_tokens_per_second(self, tokens: int) -> float:
        """In pieces of so many tokens, or of the nearest measured size; 0 = not measured."""
        if not self.pieces_s:
            return 0.0
        nearest = min(self.pieces_s, key=lambda size: (abs(size - tokens), size))
        return nearest / self.pieces_s[nearest]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """The way in which sequences of a model share forwards: `turns_reason` says why they cannot,
    "" = they can, and `in_slabs` whether their KV lies in slabs then. Reading a shared prefix once
    must save `prefix_from` tokens; None = it never pays. Pieces of prompts of at least
    `pieces_from` tokens have the same bits together as alone; 0 = none are known to."""

    turns_reason: str = ""
    in_slabs: bool = False
    prefix_from: int | None = None
    pieces_from: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """All that is known of a model; `sharing` None = it was not tried. `are_blocks_tried`: its KV
    can be taken up from blocks."""

    are_blocks_tried: bool = False
    sharing: Sharing | None = None
    speeds: Speeds = field(default_factory=Speeds)


class FindingsFile:
    """The findings of one model in a folder; None = none are kept. Its methods block."""

    def __init__(self, folder: Path | None, model: LoadedModel) -> None:
        known = folder is not None and model.weights_state
        self._path = folder / f"{_digest(model)}.json" if folder is not None and known else None

    def read(self) -> Findings:
        """The findings of an earlier load."""
        if self._path is None:
            return Findings()
        try:
            with self._path.open("rb") as file:
                return decode_findings(file.read(_MOST_BYTES))
        except (OSError, ValueError):
            return Findings()

    def write(self, found: Findings) -> None:
        """Keep findings; without room on the disk they are found again."""
        if self._path is None:
            return
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_atomically(self._path, encode_findings(found))
            files = sorted(self._path.parent.glob("*.json"), key=lambda file: file.stat().st_mtime)
            for old in files[:-_KEPT_FILES]:
                old.unlink(missing_ok=True)


def encode_findings(found: Findings) -> bytes:
    """Write findings with their format."""
    return json.dumps({"format": FORMAT, **asdict(found)}).encode()


def decode_findings(data: bytes) -> Findings:
    """Read what `encode_findings` wrote. Raises ValueError for anything else."""
    try:
        said = json.loads(data)
        speeds, sharing = said["speeds"], said["sharing"]
        if said["format"] != FORMAT:
            raise ValueError("findings of another format")
        return Findings(
            are_blocks_tried=said["are_blocks_tried"] is True,
            sharing=None if sharing is None else _sharing(**sharing),
            speeds=Speeds(
                forwards_s=_times(speeds["forwards_s"]),
                pieces_s=_times(speeds["pieces_s"]),
                context_s=max(0.0, float(speeds["context_s"])),
            ),
        )
    except (KeyError, TypeError, AttributeError, RecursionError) as problem:
        raise ValueError(f"no findings: {problem}") from problem


def _sharing(
    turns_reason: object, in_slabs: object, prefix_from: object, pieces_from: object
) -> Sharing:
    return Sharing(
        turns_reason=str(turns_reason),
        in_slabs=in_slabs is True,
        prefix_from=None if prefix_from is None else int(str(prefix_from)),
        pieces_from=max(0, int(str(pieces_from))),
    )


def _times(said: Mapping[str, float]) -> dict[int, float]:
    found = {int(size): float(seconds) for size, seconds in said.items()}
    if found and (min(found) < 1 or not all(0 < seconds < 3600 for seconds in found.values())):
        raise ValueError(f"{found} are no times")
    return found


def _digest(model: LoadedModel) -> str:
    about = [
        version("kakeya"),
        model.weights_state,
        exactness(model, ()),
        os.cpu_count(),
        model.quantization,
        model.context_tokens,
    ]
    return hashlib.sha256(json.dumps(about).encode()).hexdigest()[:32]
