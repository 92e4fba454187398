"""The memory that a diffusers pipeline will take, before it is loaded: its components' weights as
they come into memory, the process, and room to decode an image in.

A component is a folder that `model_index.json` names. Of each, only the safetensors files count,
and of two variants of them only the one that is loaded.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from kakeya.core import errors
from kakeya.core.safetensors import read_header
from kakeya.core.units import MIB
from kakeya.memory.estimate.estimate import FILES_FACTOR, Estimate
from kakeya.memory.estimate.headers import read_json
from kakeya.memory.estimate.history import SizeHistory

PROCESS_BYTES = 400 * MIB
"""A worker's interpreter with torch and diffusers, measured on Linux with weights of 0.3 MB."""
_GROWTH_BYTES = 64 * MIB
_DECODER_COPIES = 5
"""Of the widest activation of the decoder: the growth of a process that decodes with SDXL's on a
CPU, 317 MiB at 256 x 256 pixels, where one is 64 MiB."""


def estimate_pipeline(
    folder: Path, *, widens: bool, history: SizeHistory | None = None, kind: str = "image"
) -> Estimate:
    """Estimate the pipeline in a folder.

    `widens` = 16-bit weights become 32-bit ones, as on a CPU; else 32-bit ones become 16-bit ones.
    Blocks. Raises ConfigError when the folder holds no weights.
    """
    problems: list[str] = []
    digest = hashlib.sha256()
    number_bytes, weights = 4 if widens else 2, 0
    for path in sorted(_weight_files(folder, read_json(folder / "model_index.json", problems))):
        try:
            size = path.stat().st_size
            digest.update(f"{path.relative_to(folder)} {size}".encode())
            weights += _loaded_bytes(path, number_bytes)
        except errors.InvalidArgument as fault:
            problems.append(fault.message)
            weights += int(size * FILES_FACTOR)
        except OSError as fault:
            problems.append(f"{path.name}: {fault.strerror}")
    if not weights:
        raise errors.ConfigError(
            f"pipeline folder {folder} holds no weights; *.safetensors files are needed in the "
            f"folders of its components{': ' * bool(problems)}{'; '.join(problems)}"
        )
    work = _GROWTH_BYTES + _decoder_bytes(read_json(folder / "vae" / "config.json", problems))
    made = Estimate(
        base_bytes=weights + PROCESS_BYTES + work * number_bytes // 4,
        weights_bytes=weights,
        kv_bytes=0,
        kv_bytes_per_token=0,
        source="headers",
        digest=digest.hexdigest(),
        problem=f"{folder}: {'; '.join(problems)}" if problems else "",
        work_bytes=work * number_bytes // 4,
    )
    known = history.peak_bytes(made.digest, kind) if history else None
    if known is None:
        return made
    return replace(made, base_bytes=known + made.work_bytes, source="history")


def _weight_files(folder: Path, index: Mapping[str, object]) -> Iterator[Path]:
    """The files that are loaded: those in half precision only where there are no others."""
    found = [
        path
        for name, named in index.items()
        if isinstance(named, list) and any(named) and Path(name).name == name
        for path in (folder / name).glob("*.safetensors")
    ]
    plain = [path for path in found if ".fp16." not in path.name]
    yield from plain or found


def _loaded_bytes(path: Path, number_bytes: int) -> int:
    tensors = read_header(path).values()
    return sum(one.count * number_bytes if one.is_float else one.nbytes for one in tensors)


def _decoder_bytes(config: Mapping[str, object]) -> int:
    """Room to decode one tile with 32-bit numbers: at full size the decoder has as many channels
    as its second block."""
    channels, side = config.get("block_out_channels"), config.get("sample_size")
    if not isinstance(channels, list) or not isinstance(side, int):
        return 0
    widest = [one for one in channels[:2] if isinstance(one, int)]
    return _DECODER_COPIES * 4 * max(widest, default=0) * side**2
