"""The folder that `mlx_lm.lora` writes: adapter_config.json beside adapters.safetensors.

Only plain LoRA on linear modules is read; any other part is refused by name, because an adapter
without one of its parts is not the adapter that was trained.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kakeya.adapters.files.weights import FloatArray, read_array
from kakeya.core.errors import InvalidArgument
from kakeya.core.safetensors import ArrayEntry, open_regular, read_header

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapters.safetensors"
MAX_RANK = 1024
MAX_SCALE = 10_000.0
"""Scales are about 1 to 100; far beyond, products overflow 16 bits."""
_MAX_CONFIG_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterFolder:
    """A folder with an adapter; `pairs` tells where A and B of each module lie."""

    weights: Path
    rank: int
    scale: float
    pairs: Mapping[str, tuple[ArrayEntry, ArrayEntry]]

    def matrices(self) -> Iterator[tuple[str, FloatArray, FloatArray]]:
        """Read module by module, in order. Shapes: A [in, rank], B [rank, out].

        Raises InvalidArgument for values that are not finite numbers of 16 or 32 bits.
        """
        for module, (a, b) in sorted(self.pairs.items()):
            yield (
                module,
                read_array(self.weights, f"{module}.lora_a", a),
                read_array(self.weights, f"{module}.lora_b", b),
            )


def read_adapter(folder: Path) -> AdapterFolder:
    """Inspect a folder. Raises InvalidArgument naming any part that is no plain LoRA adapter."""
    rank, scale = _read_config(folder / CONFIG_FILE)
    weights = folder / WEIGHTS_FILE
    pairs = _pairs(weights, read_header(weights), rank)
    return AdapterFolder(weights=weights, rank=rank, scale=scale, pairs=pairs)


def _read_config(path: Path) -> tuple[int, float]:
    with open_regular(path) as (file, size):
        if size > _MAX_CONFIG_BYTES:
            raise InvalidArgument(f"{path} has {size} bytes; at most {_MAX_CONFIG_BYTES} are read")
        text = file.read(_MAX_CONFIG_BYTES)
    try:
        config = json.loads(text)
    except (ValueError, RecursionError):
        raise InvalidArgument(f"{path} is not JSON") from None
    if not isinstance(config, dict):
        raise InvalidArgument(f"{path} is not a JSON object")
    if "peft_type" in config:
        raise InvalidArgument(f"{path} is of PEFT; only mlx-lm's own adapters are read, convert it")
    kind = config.get("fine_tune_type", "lora")
    if kind != "lora":
        raise InvalidArgument(f"{path} says fine_tune_type {str(kind)[:20]!r}; only lora is served")
    given = config.get("lora_parameters")
    if not isinstance(given, dict):
        raise InvalidArgument(f"{path} has no lora_parameters with rank and scale")
    rank: Any = given.get("rank")
    scale: Any = given.get("scale")
    if not isinstance(rank, int) or isinstance(rank, bool) or not 1 <= rank <= MAX_RANK:
        shown = repr(rank)[:20]
        raise InvalidArgument(f"{path} says rank {shown}; it must be a whole number, 1..{MAX_RANK}")
    if type(scale) not in (int, float) or not -MAX_SCALE <= scale <= MAX_SCALE:
        raise InvalidArgument(
            f"{path} says scale {repr(scale)[:20]}; it must be a number of at most {MAX_SCALE:g}"
        )
    return rank, float(scale)


def _pairs(
    path: Path, header: Mapping[str, ArrayEntry], rank: int
) -> dict[str, tuple[ArrayEntry, ArrayEntry]]:
    found: dict[str, dict[str, ArrayEntry]] = {}
    for name, entry in header.items():
        module, _, leaf = name.rpartition(".")
        if leaf == "m":
            raise InvalidArgument(
                f"{path} holds {name[:80]!r}, which is of DoRA; only LoRA is served"
            )
        if leaf not in ("lora_a", "lora_b") or not module:
            raise InvalidArgument(
                f"{path} holds {name[:80]!r}; an adapter has MODULE.lora_a and MODULE.lora_b only"
            )
        if len(entry.shape) != 2 or 0 in entry.shape:
            raise InvalidArgument(
                f"{name[:80]!r} of {path} has the shape {entry.shape}; only linear modules, whose "
                "matrices have two dimensions, are served"
            )
        if entry.shape[1 if leaf == "lora_a" else 0] != rank:
            wanted = f"(in, {rank})" if leaf == "lora_a" else f"({rank}, out)"
            raise InvalidArgument(
                f"{name[:80]!r} of {path} has the shape {entry.shape}; the rank of "
                f"{CONFIG_FILE} asks for {wanted}"
            )
        found.setdefault(module, {})[leaf] = entry
    lonely = next((module for module, pair in found.items() if len(pair) < 2), None)
    if lonely is not None:
        raise InvalidArgument(f"{path} holds only one of lora_a and lora_b of {lonely[:80]!r}")
    if not found:
        raise InvalidArgument(f"{path} holds no arrays")
    return {module: (pair["lora_a"], pair["lora_b"]) for module, pair in found.items()}
