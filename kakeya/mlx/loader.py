"""Loading a model: a local folder or a Hugging Face id becomes a `LoadedModel`.

mlx-lm's model classes, caches and weight formats are used as they are; its generate loops are
not. On the CPU backend dense weights become float32, the only dtype that is fast there, and where
OpenBLAS is below it they are laid out for that (see `openblas`).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from huggingface_hub import snapshot_download
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from kakeya.adapters.files.base import base_fingerprint
from kakeya.core.errors import ConfigError, InvalidArgument
from kakeya.core.log import event
from kakeya.core.weight_files import missing_weights, weight_files
from kakeya.generation.progress import LoadPhase
from kakeya.mlx.context import context_tokens
from kakeya.mlx.device import forbid_wired_limit
from kakeya.mlx.diffusion.tap import StateTap
from kakeya.mlx.download import Told, progress_bar, untold
from kakeya.mlx.lora import AdapterSlots
from kakeya.mlx.numerics.blas import is_openblas, is_strip_faster, threads_for, use_threads
from kakeya.mlx.numerics.openblas import Angles, suit
from kakeya.mlx.ring.share import RingShare
from kakeya.prefix.names.weights import weights_state

_log = logging.getLogger(__name__)
_PATTERNS = [
    "*.json",
    "model*.safetensors",
    "tokenizer.model",
    "*.tiktoken",
    "*.txt",
    "*.jinja",
]

_PART_BYTES = 32 << 20
"""Weights are read in parts of so many bytes, so that progress can be told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """Weights in memory, with the facts of their folder."""

    model_id: str
    path: Path
    network: nn.Module
    config: Mapping[str, Any]
    context_tokens: int
    eos_token_ids: tuple[int, ...]
    quantization: str
    dtype: str
    weight_bytes: int
    vocabulary_digest: str
    fingerprint: str
    """The name of the weights, "" = they have none."""
    adapters: AdapterSlots | None = None
    weights_state: str = ""
    """State of the files that the weights were read from; "" = they changed meanwhile."""
    angles: Angles | None = None
    """Angles that its rotations share, where the network was made to suit OpenBLAS."""
    layout: str = "by output"
    """The order of its weights in memory; see `numerics.openblas`."""
    tap: StateTap | None = None
    """Takes hidden states for a drafter."""
    ring: RingShare | None = None
    """The place in a ring group, where this process holds only a share of the network."""

    def agreed(self, selected: mx.array) -> mx.array:
        """The selection that all ranks go on with. Shape: [L] int32."""
        return selected if self.ring is None else self.ring.agreed(selected)

    def make_cache(self) -> list[Any]:
        """One cache object a layer, of the class that the architecture asks for."""
        caches: list[Any] = make_prompt_cache(self.network)
        return caches

    def vocab_size(self) -> int:
        """How many ids it has a logit for."""
        return int(self.forward(mx.array([[0]]), self.make_cache()).shape[-1])

    def forward(
        self, tokens: mx.array, cache: list[Any], slots: mx.array | None = None
    ) -> mx.array:
        """Run rows through the network. Shapes: tokens [B, L] int32 -> logits [B, L, V].

        `slots` [B] names the rows' adapters; None = no row has one.
        """
        with ExitStack() as building:
            if self.angles is not None:
                building.enter_context(self.angles.forward())
            if slots is not None and self.adapters is not None:
                building.enter_context(self.adapters.rows(slots))
            return self.network(tokens, cache=cache)


def resolve_folder(
    id_or_path: str, told: Told = untold, download: Callable[..., str] = snapshot_download
) -> Path:
    """Find a model's folder, downloading a Hugging Face id that is not cached yet.

    Raises ConfigError naming the missing part.
    """
    told(LoadPhase.FIND, 0, 0)
    folder = Path(id_or_path).expanduser()
    if folder.is_dir():
        return _checked(folder)
    if folder.exists():
        raise ConfigError(f"model {id_or_path!r} is a file; name the folder that holds config.json")
    looks_like_id = id_or_path.count("/") == 1 and not id_or_path.startswith((".", "/", "~"))
    if not looks_like_id:
        raise ConfigError(
            f"model folder {id_or_path!r} does not exist; give an existing folder, "
            "an org/name of Hugging Face, or kakeya-tiny"
        )
    try:
        found = download(id_or_path, allow_patterns=_PATTERNS, tqdm_class=progress_bar(told))
    except Exception as failure:
        raise ConfigError(
            f"model {id_or_path!r} is neither a folder here nor could it be downloaded: "
            f"{type(failure).__name__}: {str(failure).splitlines()[0] if str(failure) else ''}"
        ) from failure
    return _checked(Path(found))


def load(
    id_or_path: str,
    model_id: str,
    *,
    adapter_slots: int = 0,
    adapter_rank: int = 0,
    blas_threads: int = 1,
    told: Told = untold,
    ring: RingShare | None = None,
    states_for: tuple[str, Path] | None = None,
) -> LoadedModel:
    """Load weights into memory; with slots for so many adapters of at most this rank.

    OpenBLAS gets so many threads, 0 = as the model's size suggests. `told` hears how far it is: the
    phase, the bytes that were read, and all bytes. `ring` leaves only this rank's share.
    `states_for` is a drafter that reads hidden states, by its name and folder.

    Raises ConfigError when the folder lacks a part, or holds an architecture or weights that
    mlx-lm cannot read.
    """
    forbid_wired_limit()
    folder = resolve_folder(id_or_path, told)
    state = weights_state(folder)
    network, config = read_network(folder)
    if ring is not None:
        ring.take(network, config)
    quantization = _quantization(config)
    angles, layout = None, "by output"
    is_cpu = mx.default_device().type == mx.DeviceType.cpu
    if is_cpu:
        _to_float32(network)
    weight_bytes = sum(value.nbytes for _, value in tree_flatten(network.parameters()))
    reading = WeightReading(weight_bytes, told)
    # Beside the reading, which leaves Python alone: a large tokenizer takes as long as a forward.
    beside = ThreadPoolExecutor(1)
    digest = beside.submit(vocabulary_digest, folder)
    beside.shutdown(wait=False)
    try:
        if is_cpu and is_openblas():
            use_threads(blas_threads or threads_for(_weights(network)))
            angles, layout = suit(network, reading.has, in_strips=is_strip_faster())
        parameters = [value for _, value in tree_flatten(network.parameters())]
        reading.finish(parameters)
    except RuntimeError as failure:
        raise ConfigError(f"weights in {str(folder)!r} are damaged: {failure}") from failure
    floats = {str(p.dtype).removeprefix("mlx.core.") for p in parameters if _is_float(p)}
    event(_log, "weights loaded", model=model_id, folder=str(folder))
    fingerprint = weights_fingerprint(folder)
    return LoadedModel(
        model_id=model_id,
        path=folder,
        network=network,
        config=config,
        context_tokens=context_tokens(folder, (text_config(config), config)),
        eos_token_ids=_eos_token_ids(folder, config),
        quantization=quantization,
        dtype="+".join(sorted(floats)),
        weight_bytes=weight_bytes,
        vocabulary_digest=digest.result(),
        fingerprint=fingerprint,
        weights_state=state if weights_state(folder) == state else "",
        angles=angles,
        layout=layout,
        tap=_tap(network, model_id, states_for),
        ring=ring,
        adapters=AdapterSlots(network, count=adapter_slots, max_rank=adapter_rank, base=fingerprint)
        if adapter_slots > 0
        else None,
    )


def _tap(network: nn.Module, model_id: str, states_for: tuple[str, Path] | None) -> StateTap | None:
    """The tap for a drafter; None, with a reason in the log, where it cannot read this model."""
    if states_for is None:
        return None
    try:
        return StateTap(network, *states_for)
    except (ConfigError, InvalidArgument) as problem:
        event(
            _log,
            "the drafter gets no hidden states",
            level=logging.WARNING,
            model=model_id,
            drafter=states_for[0],
            problem=problem.message,
        )
        return None


class WeightReading:
    """Counts the bytes of weights that lie in memory."""

    def __init__(self, total_bytes: int, told: Told) -> None:
        self._total_bytes = total_bytes
        self._told = told
        self._done_bytes = 0
        self.has(0)

    def has(self, more_bytes: int) -> None:
        """Note that so many more lie there."""
        self._done_bytes += more_bytes
        self._told(LoadPhase.READ, self._done_bytes, self._total_bytes)

    def finish(self, parameters: Sequence[mx.array]) -> None:
        """Read the rest, in parts. Raises RuntimeError where a file is damaged."""
        seen_bytes, part_bytes, part = 0, 0, []
        for number, value in enumerate(parameters, start=1):
            part.append(value)
            part_bytes += value.nbytes
            if part_bytes >= _PART_BYTES or number == len(parameters):
                mx.eval(part)
                seen_bytes += part_bytes
                part_bytes, part = 0, []
                # Weights that were laid out before are among them, and are counted once.
                self.has(max(0, seen_bytes - self._done_bytes))


def read_network(folder: Path) -> tuple[nn.Module, dict[str, Any]]:
    """Make the network of a folder, with its config; its weights are read when they are used.

    Raises ConfigError.
    """
    try:
        with _as_mlx_lm_reads(folder) as readable:
            network, config = load_model(readable, lazy=True)
    except (ValueError, KeyError, TypeError, RuntimeError, OSError) as failure:
        raise ConfigError(
            f"model folder {str(folder)!r} cannot be loaded: {failure}; "
            "it must hold config.json and weights of an architecture that mlx-lm knows"
        ) from failure
    return network, config


def weights_fingerprint(folder: Path) -> str:
    """The name of the weights; "" where the folder holds them in another way."""
    try:
        return base_fingerprint(folder)
    except InvalidArgument:
        return ""


def vocabulary_digest(folder: Path) -> str:
    """Sha256 over the map of text to ids; equal digests mean that ids mean the same.

    Only the vocabulary and the added tokens count, so templates and casing options that do not
    change ids do not matter. "" when the folder has no tokenizer.json.
    """
    try:
        spec = json.loads((folder / "tokenizer.json").read_text("utf-8"))
        vocabulary = spec["model"]["vocab"]
        added = {entry["content"]: entry["id"] for entry in spec.get("added_tokens", ())}
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    canonical = json.dumps([vocabulary, added], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def _checked(folder: Path) -> Path:
    if not (folder / "config.json").is_file():
        raise ConfigError(f"model folder {str(folder)!r} has no config.json")
    try:
        missing = missing_weights(folder)
    except InvalidArgument as fault:
        raise ConfigError(fault.message) from None
    if missing:
        raise ConfigError(f"model folder {str(folder)!r} has no {missing}")
    return folder


@contextlib.contextmanager
def _as_mlx_lm_reads(folder: Path) -> Iterator[Path]:
    """A folder in which mlx-lm, which reads all model*.safetensors, finds the weight files."""
    files = weight_files(folder)
    if files == sorted(folder.glob("model*.safetensors")):
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="kakeya-") as made:
        for number, file in enumerate(files):
            Path(made, f"model-{number:05d}.safetensors").symlink_to(file.resolve())
        for file in folder.glob("*.json"):
            Path(made, file.name).symlink_to(file.resolve())
        yield Path(made)


def _weights(network: nn.Module) -> int:
    """The count of float32 values, which are those that OpenBLAS multiplies."""
    values = [value for _, value in tree_flatten(network.parameters())]
    return sum(value.size for value in values if value.dtype == mx.float32)


def _is_float(value: mx.array) -> bool:
    return bool(mx.issubdtype(value.dtype, mx.floating))


def _to_float32(network: nn.Module) -> None:
    """Widen 16-bit weights; quantized layers keep their packed words and scales."""
    quantized = {
        name
        for name, module in network.named_modules()
        if type(module).__name__.startswith(("Quantized", "QQ"))
    }

    def widened(name: str, value: mx.array) -> mx.array:
        if name.rpartition(".")[0] in quantized or not _is_float(value):
            return value
        return value.astype(mx.float32)

    flat = [(name, widened(name, value)) for name, value in tree_flatten(network.parameters())]
    network.load_weights(flat, strict=True)


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a model's config that is about text; all of it where it has no such part."""
    nested = config.get("text_config")
    return nested if isinstance(nested, dict) else config


def _eos_token_ids(folder: Path, config: Mapping[str, Any]) -> tuple[int, ...]:
    """Ids that end an answer, by generation_config.json and config.json together."""
    found: list[object] = []
    sources: list[Mapping[str, Any]] = [config, text_config(config)]
    with contextlib.suppress(OSError, ValueError):
        sources.append(json.loads((folder / "generation_config.json").read_text("utf-8")))
    for source in sources:
        value = source.get("eos_token_id")
        found += value if isinstance(value, list) else [value]
    return tuple(dict.fromkeys(token for token in found if isinstance(token, int)))


def _quantization(config: Mapping[str, Any]) -> str:
    spec = config.get("quantization")
    if not isinstance(spec, dict) or "bits" not in spec:
        return ""
    return f"{spec['bits']}bit-g{spec.get('group_size', 64)}"
