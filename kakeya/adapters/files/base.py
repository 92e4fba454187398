"""The base model of an adapter: a name for its weights, and the linear layers of its network.

So an adapter of another model is refused when it is registered, not when a request waits for it.

Only headers and a little of each file are read; the weights stay where they are.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path

from kakeya.adapters.files.packed import PackedAdapter
from kakeya.core.errors import InvalidArgument
from kakeya.core.programs import RunProgram, run_program
from kakeya.core.safetensors import ArrayEntry, open_regular, read_header
from kakeya.core.weight_files import weight_files

_SAMPLE_BYTES = 4 << 10
LAYERS_S = 60.0
"""The limit of the child that tells them; it takes some seconds."""
Layers = Mapping[str, tuple[int, int]]
"""Linear layers of a network: path -> features in, features out."""


def check_layers(adapter: PackedAdapter, layers: Layers) -> None:
    """Raise InvalidArgument unless every layer of an adapter is one of these, and as large."""
    for tensor in adapter.tensors:
        found = layers.get(tensor.path)
        if found is None:
            close = difflib.get_close_matches(tensor.path[:120], list(layers)[:2000], n=1)
            hint = f" (the nearest is {close[0]!r})" if close else ""
            raise InvalidArgument(
                f"the adapter changes {tensor.path[:80]!r}, which is no linear layer of the "
                f"base{hint}: it is an adapter of another model"
            )
        if tuple(found) != (tensor.in_size, tensor.out_size):
            raise InvalidArgument(
                f"the adapter's {tensor.path[:80]!r} is made for {tensor.in_size} features in "
                f"and {tensor.out_size} out; the base has {found[0]} and {found[1]}: it is an "
                "adapter of another model"
            )


async def read_layers(folder: Path, run: RunProgram = run_program) -> Layers:
    """Ask a child process for the linear layers of the network in a folder.

    Raises InvalidArgument.
    """
    output = await run((sys.executable, "-m", "kakeya.mlx.linears", str(folder)), LAYERS_S)
    if output is None or output.status is None:
        raise InvalidArgument(
            f"the layers of {folder} were not told within {LAYERS_S:g} s; add the adapter again "
            "when this machine is less busy"
        )
    if output.status != 0:
        said = output.stderr.strip().splitlines() or [f"status {output.status}"]
        raise InvalidArgument(f"the layers of {folder} cannot be told: {said[-1][:500]}")
    found = json.loads(output.stdout)
    return {str(path): (int(ins), int(outs)) for path, (ins, outs) in found.items()}


def base_fingerprint(folder: Path) -> str:
    """Name the weights in a folder: another name for other names, shapes, sizes and samples.

    Blocks. Raises InvalidArgument.
    """
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError) as problem:
        raise InvalidArgument(f"{folder} has no config.json that can be read: {problem}") from None
    if not isinstance(config, dict):
        raise InvalidArgument(f"{folder}/config.json is not a JSON object")
    sha256 = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    files = weight_files(folder)
    if not files:
        raise InvalidArgument(f"{folder} has no *.safetensors to compare an adapter with")
    for file in files:
        header = read_header(file)
        sha256.update(repr(sorted((n, e.dtype, e.shape) for n, e in header.items())).encode())
        sha256.update(_sample(file, header))
    return sha256.hexdigest()


def _sample(file: Path, header: Mapping[str, ArrayEntry]) -> bytes:
    """A few bytes from the middle of every array: tuning may leave any of them unchanged."""
    parts = []
    with open_regular(file) as (opened, _):
        for begin, end in sorted((entry.begin, entry.end) for entry in header.values()):
            opened.seek(begin + max(0, end - begin - _SAMPLE_BYTES) // 2)
            parts.append(opened.read(min(_SAMPLE_BYTES, end - begin)))
    return b"".join(parts)
