"""What the KV of a model is called: fingerprints, and the chains of block ids that begin with them.

An engine says what its KV looks like; what it does not say is which weights it read. They are named
as adapters name the base they were made for, by headers, sizes and samples of the files, once for
each state of the files.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from kakeya.core.errors import KakeyaError, NotFound
from kakeya.core.log import event
from kakeya.memory.adapter_base import read_base
from kakeya.node.arena import paged_bytes
from kakeya.precache.blocks import BlockChain
from kakeya.precache.fingerprint import KvFingerprint, fingerprint_of
from kakeya.runtime.generation import ModelFacts

_log = logging.getLogger(__name__)
_ROPE_KEYS = (
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "rope_local_base_freq",
    "partial_rotary_factor",
    "max_position_embeddings",
)
_CONFIG_BYTES = 1 << 20
_FilesState = tuple[tuple[str, int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Naming:
    """How the KV of one engine, with one adapter or none, is named, and what a block takes.

    `prefill_tokens_per_s` 0 = not measured.
    """

    fingerprint: KvFingerprint
    chain: BlockChain
    block_bytes: int
    state_bytes: int
    prefill_tokens_per_s: float

    @property
    def block_tokens(self) -> int:
        """Tokens of a whole block."""
        return self.chain.block_tokens

    @property
    def seed(self) -> bytes:
        """What tells its ids from all others: the exact digest."""
        return self.chain.seed

    def size(self, tokens: int, *, has_state: bool) -> int:
        """Bytes of a piece of so many tokens."""
        size = self.block_bytes * tokens // self.block_tokens
        return size + self.state_bytes if has_state else size

    def paged_bytes(self, tokens: int) -> int:
        """What so many tokens take in pages, state behind each block counted."""
        whole, rest = divmod(tokens, self.block_tokens)
        last = paged_bytes(self.size(rest, has_state=True)) if rest else 0
        return whole * paged_bytes(self.size(self.block_tokens, has_state=True)) + last

    def compute_s(self, tokens: int) -> float:
        """Seconds to prefill so many tokens; 0 = not known."""
        rate = self.prefill_tokens_per_s
        return tokens / rate if rate > 0 else 0.0


class PrefixNames:
    """Finds namings; each is made once for an engine process."""

    def __init__(
        self, adapter_digest: Callable[[str], str], *, key: bytes = b"", tenant: str = ""
    ) -> None:
        """`adapter_digest` finds the digest of an adapter's content by the id that engines know
        it by, and raises NotFound. `key` makes ids that only its owners can compute."""
        self._adapter_digest = adapter_digest
        self._key = key
        self._tenant = tenant
        self._weights: dict[str, tuple[_FilesState, str]] = {}
        self._made: dict[tuple[str, str], tuple[int, ModelFacts, Naming | None]] = {}
        self._refused: set[tuple[str, str]] = set()

    def known(self, model_id: str, adapter_id: str) -> Naming | None:
        """What was made last for a model; None = nothing, or its KV has no blocks."""
        found = self._made.get((model_id, adapter_id))
        return found[2] if found else None

    async def find(self, facts: ModelFacts, pid: int, adapter_id: str) -> Naming | None:
        """Name the KV of an engine process; None = it has no blocks, or its weights no name."""
        key = (facts.model_id, adapter_id)
        made = self._made.get(key)
        if made is not None and made[0] == pid and made[1] == facts:
            return made[2]
        naming = await self._make(facts, adapter_id)
        self._made[key] = (pid, facts, naming)
        return naming

    def seeds(self, model_ids: Iterable[str]) -> frozenset[bytes] | None:
        """What blocks of these models and their adapters begin with; None = not known of all."""
        if any((model_id, "") not in self._made for model_id in model_ids):
            return None
        return frozenset(made[2].seed for made in self._made.values() if made[2] is not None)

    async def _make(self, facts: ModelFacts, adapter_id: str) -> Naming | None:
        if facts.kv_block_tokens < 1 or facts.kv_block_bytes < 1:
            return None
        try:
            weights, rope = await self._files(facts)
            fingerprint = fingerprint_of(
                model_id=facts.model_id,
                base_fingerprint=weights,
                quantization=facts.quantization,
                dtype=facts.dtype,
                vocabulary_digest=facts.vocabulary_digest,
                kv_block_tokens=facts.kv_block_tokens,
                kv_layout=facts.kv_layout,
                kv_exactness=facts.kv_exactness,
                adapter=self._adapter_digest(adapter_id) if adapter_id else "",
                tenant=self._tenant,
                rope=rope,
            )
            chain = BlockChain(fingerprint.exact(), facts.kv_block_tokens, self._key)
        except NotFound:
            return None  # the adapter was removed meanwhile
        except KakeyaError as problem:
            self._refuse(facts.model_id, problem.message)
            return None
        return Naming(
            fingerprint=fingerprint,
            chain=chain,
            block_bytes=facts.kv_block_bytes,
            state_bytes=facts.kv_state_bytes,
            prefill_tokens_per_s=facts.prefill_tokens_per_second,
        )

    async def _files(self, facts: ModelFacts) -> tuple[str, str]:
        """The names of the weights, and of their RoPE. Raises InvalidArgument."""
        if not facts.model_path:
            return facts.base_fingerprint, ""
        folder = Path(facts.model_path)
        rope = await asyncio.to_thread(_rope, folder)
        if facts.base_fingerprint:
            return facts.base_fingerprint, rope
        state = await asyncio.to_thread(_state, folder)
        known = self._weights.get(facts.model_path)
        if known is None or known[0] != state:
            base = await asyncio.to_thread(read_base, folder)
            known = self._weights[facts.model_path] = (state, base.fingerprint)
        return known[1], rope

    def _refuse(self, model_id: str, reason: str) -> None:
        """Say once what is wrong."""
        if (model_id, reason) not in self._refused:
            self._refused.add((model_id, reason))
            event(
                _log,
                "prompts of this model are not kept: its KV has no safe name",
                level=logging.WARNING,
                model=model_id,
                reason=reason,
            )


def _state(folder: Path) -> _FilesState:
    """Names, sizes and times of the files that a name of weights is made of. Blocks."""
    files = [folder / "config.json", *sorted(folder.glob("model*.safetensors"))]
    found = []
    for file in files:
        try:
            stat = file.stat()
        except OSError:
            continue
        found.append((file.name, stat.st_size, stat.st_mtime_ns))
    return tuple(found)


def _rope(folder: Path) -> str:
    """What a configuration says of positions, canonical JSON; "" = nothing. Blocks."""
    try:
        with (folder / "config.json").open("rb") as file:
            config = json.loads(file.read(_CONFIG_BYTES))
    except (OSError, ValueError):
        return ""
    if not isinstance(config, dict):
        return ""
    inner = config.get("text_config")
    parts = [part for part in (config, inner) if isinstance(part, dict)]
    said = [{key: part[key] for key in _ROPE_KEYS if key in part} for part in parts]
    return json.dumps(said, sort_keys=True, separators=(",", ":")) if any(said) else ""
