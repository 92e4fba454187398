"""How llama-server is started: its arguments, and the memory of its KV, by model and machine.

    --ctx-size   tokens of KV of all slots together; one sequence may fill them, up to the length
                 for which the model was made
    memory       KV is taken whole at the start: it is part of the lease from the load on

Text of the model's own options wins over what is chosen here.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kakeya.backends.engine.process import Command
from kakeya.core.errors import ConfigError, InvalidArgument, Unsupported
from kakeya.core.gguf import gguf_shards, read_gguf
from kakeya.core.host import unified_memory_bytes
from kakeya.core.units import MIB
from kakeya.generation.spec import is_gguf
from kakeya.text.gguf import known_cuts, text_folder

SLOTS = 8
"""Sequences that are computed at once."""
MOST_CONTEXT_TOKENS = 32_768
"""Of one sequence, where the options say nothing."""
LEAST_KV_TOKENS = 16_384
"""Of all slots together, where memory allows it and the options say nothing."""
LEAST_KV_BYTES = 256 * MIB
KV_PART = 8
"""KV may take one part in so many of the machine's memory, but at least LEAST_KV_BYTES."""
BATCH_TOKENS = 512 if sys.platform == "darwin" else 256
"""Tokens of a prompt in one step, which holds up other sequences: for a minute and more where a CPU
reads a large model."""
MAX_STEP_S = 600.0
"""A step that takes longer is taken for a fault."""
_KV_NUMBER_BYTES = 2
_BOUND = """
export OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-passive}"
exec 3<&0 </dev/null
{ cat <&3; kill -s KILL -- -$$; } >/dev/null 2>&1 &
exec 3<&-
exec "$@"
"""
"""Runs a program in place of the shell. Its group is killed at the end of the standard input, which
the agent holds: llama-server itself would live on without its agent. Its threads sleep while they
wait for each other: where other programs keep the cores busy, two that spin are slower than one."""
LLAMA_OPTIONS = ("ctx_size", "parallel", "gpu_layers", "flash_attn", "threads", "threads_batch")
"""Options of a model's table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaPlan:
    """The arguments of llama-server for one model, and what they take."""

    model: Path
    kv_tokens: int
    """Of all slots together."""
    slots: int
    kv_bytes: int
    """The memory of these tokens; 0 = the file does not tell."""
    flags: tuple[str, ...]
    """Further arguments."""

    @property
    def traits(self) -> tuple[str, ...]:
        """What its KV depends on beside the weights and the program."""
        named = dict(zip(self.flags[::2], self.flags[1::2], strict=True))
        told = [named.get(flag, "") for flag in ("--gpu-layers", "--flash-attn")]
        return (*told, str(BATCH_TOKENS))

    def command(self, program: Path) -> Command:
        """The command of a child, which ends with the agent."""
        return lambda socket: (
            "/bin/sh",
            "-c",
            _BOUND,
            "sh",
            str(program),
            *self._arguments(socket),
        )

    def _arguments(self, socket: Path) -> Sequence[str]:
        return (
            *("--model", str(self.model)),
            *("--host", str(socket)),
            *("--slot-save-path", str(socket.parent)),
            *("--ctx-size", str(self.kv_tokens)),
            *("--parallel", str(self.slots)),
            *("--batch-size", str(BATCH_TOKENS), "--ubatch-size", str(BATCH_TOKENS)),
            # Beside the KV of the slots, by default it would keep 8 GiB of KV of earlier prompts.
            *("--kv-unified", "--cache-ram", "0"),
            *("--no-webui", "--offline", "--sse-ping-interval", "-1"),
            *("--log-colors", "off", "-lv", "1"),
            *self.flags,
        )


def plan_of(
    model: Path,
    options: Mapping[str, object] | None = None,
    *,
    memory_bytes: int | None = None,
    cores: int | None = None,
) -> LlamaPlan:
    """Plan the server of a GGUF file; `options` are those of the model's configuration. Blocks.

    Raises ConfigError for a file that is damaged or has missing parts, and for a wrong option.
    """
    options = options or {}
    unknown = [name for name in options if name not in LLAMA_OPTIONS]
    if unknown:
        raise ConfigError(
            f"{unknown[0]!r} is no option of a GGUF model; give {', '.join(LLAMA_OPTIONS)}"
        )
    missing = [shard.name for shard in gguf_shards(model) if not shard.is_file()]
    if missing:
        raise ConfigError(f"{model} lacks {' and '.join(missing)} beside it; download it again")
    meta = gguf_metadata(model)
    try:
        known_cuts(meta)
    except Unsupported as fault:
        raise ConfigError(f"{model} cannot be served: {fault.message}") from None
    trained = _number(meta, "context_length") or MOST_CONTEXT_TOKENS
    each = kv_bytes_per_token(meta)
    slots = _option(options, "parallel") or SLOTS
    tokens = _option(options, "ctx_size")
    if not tokens:
        tokens = max(min(trained, MOST_CONTEXT_TOKENS), LEAST_KV_TOKENS)
        room = max(LEAST_KV_BYTES, (memory_bytes or unified_memory_bytes()) // KV_PART)
        tokens = min(tokens, room // each // 256 * 256) if each else tokens
    cores = _cores() if cores is None else cores
    # Single tokens by all cores but one, prompts by all.
    threads = _option(options, "threads") or (max(1, cores - 1) if cores else 0)
    batch = _option(options, "threads_batch") or (0 if "threads" in options else cores)
    flags = ["--threads", str(threads)] if threads else []
    if batch:
        flags += ["--threads-batch", str(batch)]
    if "gpu_layers" in options:
        flags += ["--gpu-layers", str(_option(options, "gpu_layers"))]
    if "flash_attn" in options:
        flags += ["--flash-attn", "on" if options["flash_attn"] else "off"]
    return LlamaPlan(
        model=model, kv_tokens=tokens, slots=slots, kv_bytes=tokens * each, flags=tuple(flags)
    )


def text_source(resolved: str) -> Path:
    """The folder of a model's text: its own, or the one that is made of its GGUF file. Either may
    not be there yet."""
    path = Path(resolved).expanduser()
    return text_folder(path) if is_gguf(resolved) and path.is_file() else path


def gguf_metadata(model: Path) -> Mapping[str, Any]:
    """The metadata of a model's file, with the lengths of long lists in their place. Blocks.

    Raises ConfigError for a file that cannot be read.
    """
    try:
        found = model.stat()
        return _metadata(model, found.st_size, found.st_mtime_ns)
    except OSError as fault:
        raise ConfigError(f"{model} cannot be read: {fault.strerror}") from None
    except InvalidArgument as fault:
        raise ConfigError(fault.message) from None


@functools.lru_cache(maxsize=8)
def _metadata(model: Path, _size: int, _mtime_ns: int) -> Mapping[str, Any]:
    # Without the vocabulary, which is large and of use only once.
    return {
        key: len(value) if isinstance(value, list) and key.startswith("tokenizer.") else value
        for key, value in read_gguf(model).items()
    }


def kv_bytes_per_token(meta: Mapping[str, Any]) -> int:
    """Bytes of KV of one token in all layers, in 16 bits; 0 = the file does not tell."""
    layers, heads = _number(meta, "block_count"), _number(meta, "attention.head_count")
    hidden = _number(meta, "embedding_length")
    told = _told(meta, "attention.head_count_kv")
    kv_heads = sum(told) if isinstance(told, list) else layers * int(told or heads)
    if not (layers and heads and hidden):
        return 0
    usual = hidden // heads
    keys = _number(meta, "attention.key_length") or usual
    values = _number(meta, "attention.value_length") or usual
    return kv_heads * (keys + values) * _KV_NUMBER_BYTES


def _told(meta: Mapping[str, Any], name: str) -> Any:  # noqa: ANN401 - as in the file
    return meta.get(f"{meta.get('general.architecture')}.{name}")


def _number(meta: Mapping[str, Any], name: str) -> int:
    told = _told(meta, name)
    told = max(told, default=0) if isinstance(told, list) else told
    return int(told) if isinstance(told, int | float) else 0


def _option(options: Mapping[str, object], name: str) -> int:
    """The value of an option that is a number; 0 = it is not given."""
    value = options.get(name, 0)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ConfigError(f"{name} is {value!r}, it must be a whole number and not below 0")
    return value


def _cores() -> int:
    """The cores that the node may use; 0 on macOS, where llama-server takes the fast ones.

    Threads wait for each other hundreds of times in each token, and whichever has no core holds up
    the others: on two idle cores, two gave 0.7 of the tokens of one.
    """
    if sys.platform == "darwin":
        return 0
    return len(os.sched_getaffinity(0))
