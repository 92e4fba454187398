"""The memory that a model will take, before it is loaded. The first of these that is known counts:

    stated    the size that the owner of the node states, and room to compute in
    history   the measured size of earlier loads, and room to compute in
    headers   its tensors as they come into memory, plus an engine's own needs
    files     1.3 times its weight files, where their headers are damaged; 1.1 times a GGUF file
    name      the parameters and bits in its name, where nothing is on disk yet

An engine needs more than weights: its process, room to compute in, and keys and values. The last
are separate, because they grow with the requests. Reads files, and so blocks; the measured size of
a load replaces an estimate.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from kakeya.core import errors
from kakeya.core.gguf import gguf_shards
from kakeya.core.safetensors import ArrayEntry
from kakeya.core.units import ENCODER_CPU_TOKENS, ENCODER_SCORE_BYTES, ENCODER_TOKENS, MIB
from kakeya.core.weight_files import weight_files
from kakeya.memory.estimate.headers import Headers, read_headers
from kakeya.memory.estimate.history import SizeHistory
from kakeya.memory.estimate.kv import (
    is_loaded,
    kv_bytes,
    kv_bytes_per_token,
    kv_layers,
    text_config,
)

PROCESS_BYTES = 112 * MIB
"""An engine's interpreter and libraries, measured on Linux: 87 MiB before the weights with Python
3.11, 94 with 3.13, and the allocator's slack after them."""
FILES_FACTOR = 1.3
GGUF_FACTOR = 1.1
NAME_FACTOR = 1.2
"""Names are rounded, and leave out embeddings and scales."""
UNKNOWN_PARAMETERS = 4e9
"""Parameters of a model with no number in its name: a size that fits a small machine."""
_CHUNK_ROWS = 256
"""The most tokens that an engine prefills at once."""
_SCORED_TOKENS = 1536
"""Behind fewer tokens than that, scores are not computed in parts."""
_BLOCK_ROWS = 32
"""More rows than an engine verifies at once; only these rows have logits."""
STEP_BYTES = 16 * MIB
"""Bytes of a step of any model, beside its KV and the tensors that its own sizes give."""
GROWTH_BYTES = 8 * MIB
"""Bytes by which Python and libraries grow in use before spare buffers pay for it."""
_FIXED_WORK_BYTES = STEP_BYTES + GROWTH_BYTES
_GROUP = 64
"""Weights that share a scale and a bias of 16 bits, in the usual quantization."""

Source = Literal["stated", "history", "headers", "files", "name"]
_SIZE = re.compile(r"(?<![a-z0-9.])(e?)(?:(\d+)x)?(\d+(?:\.\d+)?)([bm])(?![a-z0-9])")
_BITS = re.compile(r"(\d+(?:\.\d+)?)-?bits?|(?:int|fp|mxfp|nvfp|[^a-z]q|w)(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """The bytes that a load will take."""

    base_bytes: int
    """Before any request: weights, process, room to compute in."""
    weights_bytes: int
    kv_bytes: int
    """Keys and values of the tokens in question."""
    kv_bytes_per_token: int
    """Bytes of one more token; layers with a window do not count."""
    source: Source
    digest: str = ""
    """Names the model in the history; "" = not on disk."""
    problem: str = ""
    """Faults of its files, by name; "" = none is known."""
    work_bytes: int = 0
    """The part of the base to compute in and to grow in use: not taken yet right after the load."""

    @property
    def bytes(self) -> int:
        """The sum of both."""
        return self.base_bytes + self.kv_bytes


def stated(estimate: Estimate, size: int) -> Estimate:
    """The estimate with the size that the owner states, before any request."""
    return replace(estimate, base_bytes=size + estimate.work_bytes, source="stated")


def estimate_model(
    folder: Path,
    *,
    kv_tokens: int,
    widens: bool,
    history: SizeHistory | None = None,
    kind: str = "text",
    encodes: bool = False,
) -> Estimate:
    """Estimate the model in a folder, with `kv_tokens` tokens of one sequence.

    `widens` = 16-bit weights become 32-bit ones, as on the CPU backend. `kind` is the use of the
    model, in the history. An encoder (`encodes`) has no keys and values. Raises ConfigError when
    the folder holds no weights.
    """
    if not weight_files(folder):
        return _from_other_files(folder)
    headers = read_headers(folder)
    config = text_config(headers.config)
    layers = () if encodes else kv_layers(config, headers.tensors)
    number_bytes = 4 if widens else kv_number_bytes(headers.tensors)
    if headers.problems:
        weights, source = int(headers.file_bytes * FILES_FACTOR), _FILES
        if widens:
            weights = max(weights, _loaded_bytes(headers, config, widens))
    else:
        weights, source = _loaded_bytes(headers, config, widens), _HEADERS
    work = _encoder_work_bytes(config, widens) if encodes else _work_bytes(config, widens)
    known = history.peak_bytes(headers.digest, kind) if history else None
    return Estimate(
        base_bytes=(weights + PROCESS_BYTES if known is None else known) + work,
        weights_bytes=weights,
        kv_bytes=kv_bytes(layers, kv_tokens, number_bytes),
        kv_bytes_per_token=kv_bytes_per_token(layers, number_bytes),
        source=source if known is None else _HISTORY,
        digest=headers.digest,
        problem=f"{folder}: {'; '.join(headers.problems)}" if headers.problems else "",
        work_bytes=work,
    )


def estimate_source(
    source: str,
    *,
    hub: Path | None,
    kv_tokens: int,
    widens: bool,
    history: SizeHistory | None = None,
    kind: str = "text",
    encodes: bool = False,
) -> Estimate:
    """Estimate a folder or a Hugging Face id: by its newest cached snapshot below `hub`, by its
    name where nothing is cached."""
    folder = Path(source).expanduser()
    if not folder.exists():
        cached = cached_snapshot(source, hub)
        if cached is None:
            return estimate_name(source, widens=widens)
        folder = cached
    return estimate_model(
        folder, kv_tokens=kv_tokens, widens=widens, history=history, kind=kind, encodes=encodes
    )


def cached_snapshot(hub_id: str, hub: Path | None) -> Path | None:
    """The folder of a model's weights in a Hugging Face cache; None = not there."""
    if hub is None or hub_id.count("/") != 1:
        return None
    repository = hub / f"models--{hub_id.replace('/', '--')}"
    try:
        named = (repository / "refs" / "main").read_text("utf-8").strip()
        folders = [repository / "snapshots" / named] if named else []
    except (OSError, ValueError):
        folders = []
    try:
        others = sorted((repository / "snapshots").iterdir(), key=lambda one: one.stat().st_mtime)
        folders += reversed(others)
        return next((one for one in folders if one.is_dir() and weight_files(one)), None)
    except (OSError, ValueError):
        return None


def estimate_name(name: str, *, widens: bool) -> Estimate:
    """Guess by a name: `Qwen3-0.6B-4bit`, `Mixtral-8x7B`, `30B-A3B`."""
    text = name.rpartition("/")[2].lower()
    parameters = _parameters(text)
    bits = _bits(text)
    stored = bits + 32 / _GROUP if bits < 16 else (32.0 if widens else bits)
    return _of_unknown_layers(int(parameters * stored / 8 * NAME_FACTOR), "name")


_HISTORY: Source = "history"
_HEADERS: Source = "headers"
_FILES: Source = "files"


def _loaded_bytes(headers: Headers, config: Mapping[str, Any], widens: bool) -> int:
    return sum(loaded_tensors(headers, config, widens=widens).values())


def loaded_tensors(headers: Headers, config: Mapping[str, Any], *, widens: bool) -> dict[str, int]:
    """The bytes of each tensor in memory: packed ones stay packed, 8-bit floats become 16-bit
    ones, and dense ones 32-bit ones where the backend widens. `config` is the language model's."""
    packed = {n.rpartition(".")[0] for n in headers.tensors if n.endswith((".scales", "_scales"))}
    return {
        name: _tensor_bytes(tensor, widens and name.rpartition(".")[0] not in packed)
        for name, tensor in headers.tensors.items()
        if is_loaded(name, config)
    }


def _tensor_bytes(tensor: ArrayEntry, widens: bool) -> int:
    if not tensor.is_float:
        return tensor.nbytes
    if widens:
        return tensor.count * max(4, tensor.nbytes // max(1, tensor.count))
    return max(tensor.nbytes, tensor.count * 2)


def kv_number_bytes(tensors: Mapping[str, ArrayEntry]) -> int:
    """Bytes of one number in keys and values: that of most weights, or of the norms where those
    are wider, since they decide the type of their layers' output."""
    by_dtype: dict[str, int] = {}
    for tensor in tensors.values():
        if tensor.is_float:
            by_dtype[tensor.dtype] = by_dtype.get(tensor.dtype, 0) + tensor.nbytes
    if not by_dtype:
        return 2
    norms = {t.dtype for n, t in tensors.items() if n.endswith("norm.weight") and t.is_float}
    main = max(by_dtype, key=lambda dtype: by_dtype[dtype])
    return 4 if "F32" in {main, *norms} else 2


def _work_bytes(config: Mapping[str, Any], widens: bool) -> int:
    """Room for one chunk of prefill, the logits of one block, and what grows in use.

    On the CPU backend, which widens, all scores of a chunk are there at once, and once more.
    """
    hidden, inner, vocabulary, heads = (
        value if isinstance(value := config.get(name), int) else 0
        for name in ("hidden_size", "intermediate_size", "vocab_size", "num_attention_heads")
    )
    rows = _CHUNK_ROWS * (8 * hidden + 3 * inner)
    scores = 2 * heads * _CHUNK_ROWS * _SCORED_TOKENS if widens else 0
    return _FIXED_WORK_BYTES + 4 * (rows + scores + _BLOCK_ROWS * vocabulary)


def _encoder_work_bytes(config: Mapping[str, Any], widens: bool) -> int:
    """Room for one forward of an encoder: a whole batch, or one text of all positions."""
    hidden, inner, positions = (
        value if isinstance(value := config.get(name), int) else 0
        for name in ("hidden_size", "intermediate_size", "max_position_embeddings")
    )
    rows = max(ENCODER_CPU_TOKENS if widens else ENCODER_TOKENS, positions)
    return _FIXED_WORK_BYTES + 4 * rows * (8 * hidden + 5 * inner) + 3 * ENCODER_SCORE_BYTES


def _of_unknown_layers(weights: int, source: Source, problem: str = "") -> Estimate:
    """Estimate by the weights alone: room that layers need to compute, and KV, are left out."""
    return Estimate(
        base_bytes=weights + PROCESS_BYTES + _FIXED_WORK_BYTES,
        weights_bytes=weights,
        kv_bytes=0,
        kv_bytes_per_token=0,
        source=source,
        problem=problem,
        work_bytes=_FIXED_WORK_BYTES,
    )


def _from_other_files(folder: Path) -> Estimate:
    """Estimate by the sizes of GGUF files, else of PyTorch ones."""
    for pattern, factor in (("*.gguf", GGUF_FACTOR), ("*.bin", FILES_FACTOR)):
        found = gguf_shards(folder) if folder.match(pattern) else sorted(folder.glob(pattern))
        sizes = [size for path in found if (size := _size(path)) is not None]
        if sizes:
            weights = int(sum(sizes) * factor)
            lost = len(found) - len(sizes)
            problem = f"{lost} files of {folder} cannot be read" if lost else ""
            return _of_unknown_layers(weights, _FILES, problem)
    raise errors.ConfigError(
        f"model folder {folder} holds no weights; *.safetensors or *.gguf files are needed"
    )


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None


def _parameters(text: str) -> float:
    """The largest number of parameters in a name; experts multiply."""
    found = [
        float(size) * (1e9 if unit == "b" else 1e6) * int(times or 1) * (2 if effective else 1)
        for effective, times, size, unit in _SIZE.findall(text)
    ]
    return max(found, default=UNKNOWN_PARAMETERS)


def _bits(text: str) -> float:
    """Bits of a weight; 16 where the name says nothing."""
    found = [float(one or other) for one, other in _BITS.findall(text)]
    return min((bits for bits in found if 1 <= bits <= 32), default=16.0)
