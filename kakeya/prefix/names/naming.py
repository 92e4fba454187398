"""The names of a model's KV: fingerprints, and the chains of block ids that begin with them.

An engine tells the layout of its KV, and the state of its weight files when it read them. The
weights are named by a digest of all their bytes, which is made once for each state of the files and
kept; a request does not wait long for it, it is computed without blocks meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from kakeya.core.errors import InvalidArgument, KakeyaError, NotFound
from kakeya.core.files import write_atomically
from kakeya.core.log import event
from kakeya.generation.facts import ModelFacts
from kakeya.prefix.names.blocks import BlockChain
from kakeya.prefix.names.endings import Ending, ending_chain, ending_of
from kakeya.prefix.names.fingerprint import Facts, KvFingerprint, fingerprint_of
from kakeya.prefix.names.pieces import Piece, pieces_of
from kakeya.prefix.names.weights import weights_digest

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
LOGITS = " (logits)"
"""Behind the id of a model, in files of the endings of its prompts."""
_MOST_DIGEST_S = 1.0
"""How long a request waits at most until its model's weights have a digest."""
_LEAST_DIGEST_S = 0.25
"""How long any request waits: small weights have a digest within that."""
_MOST_WARM_S = 5.0
"""How long the warming of a prompt, and all that waits behind it, waits for the same."""
_TOKENS_PER_S = 100.0
"""Taken where prefill was not measured: that of 135 M weights on two cores."""
_FILE_ENTRIES = 64
_FILE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Naming:
    """The names of the KV of one engine, with one adapter or none, and the size of a block.

    `prefill_tokens_per_s` 0 = not measured. `grid` are (position, tokens): from each position on,
    prefill's pieces are of so many tokens; () = their ends are of no account.
    """

    fingerprint: KvFingerprint
    chain: BlockChain
    block_bytes: int
    state_bytes: int
    prefill_tokens_per_s: float
    grid: tuple[tuple[int, int], ...] = ()

    @property
    def block_tokens(self) -> int:
        """Tokens of a whole block."""
        return self.chain.block_tokens

    @property
    def seed(self) -> bytes:
        """The seed of its ids: the exact digest."""
        return self.chain.seed

    def pieces(self, token_ids: Sequence[int], cuts: Sequence[int] = ()) -> tuple[Piece, ...]:
        """Cut a history. Raises InvalidArgument.

        The first cut has a piece of its own: a request that shares no more than that takes it
        before a whole block is there. Elsewhere the block shows its cuts. Only where state is
        needed to go on, the last one, from which the next request may part, has one too.
        """
        inner = [cut for cut in cuts if 0 < cut < len(token_ids) - 1]
        ends = {inner[0], inner[-1]} if inner and self.state_bytes else inner[:1]
        return pieces_of(self.chain, token_ids, inner, ends)

    def ending(self, pieces: Sequence[Piece], token_ids: Sequence[int]) -> Ending | None:
        """Name the ending of a history of these pieces; None for one of a single token."""
        return ending_of(self.chain, pieces, token_ids)

    @property
    def ending_seed(self) -> bytes:
        """The seed of the names of its endings."""
        return ending_chain(self.chain).seed

    def grain(self, index: int) -> int:
        """Tokens of the pieces in which prefill computes a block; 1 = any number."""
        start = index * self.block_tokens
        found = (tokens for position, tokens in reversed(self.grid) if position <= start)
        return min(self.block_tokens, next(found, 1))

    def size(self, tokens: int, *, has_state: bool) -> int:
        """Bytes of a piece of so many tokens."""
        size = self.block_bytes * tokens // self.block_tokens
        return size + self.state_bytes if has_state else size

    def compute_s(self, tokens: int) -> float:
        """Seconds to prefill so many tokens; 0 = not known."""
        rate = self.prefill_tokens_per_s
        return tokens / rate if rate > 0 else 0.0


class PrefixNames:
    """Finds namings; each is made once for an engine process."""

    def __init__(
        self,
        adapter_digest: Callable[[str], str],
        *,
        key: bytes = b"",
        tenant: str = "",
        file: Path | None = None,
    ) -> None:
        """`adapter_digest` finds the digest of an adapter's content by the id that engines know
        it by, and raises NotFound. `key` makes ids that only its owners can compute. Digests of
        weights are kept in `file`."""
        self._file = file
        self._adapter_digest = adapter_digest
        self._key = key
        self._tenant = tenant
        self._digests: dict[str, asyncio.Future[str]] = {}
        self._notes: set[asyncio.Task[None]] = set()
        self._is_closed = threading.Event()
        self._made: dict[tuple[str, str], tuple[int, ModelFacts, Naming | None]] = {}
        self._refused: set[tuple[str, str]] = set()

    def known(self, model_id: str, adapter_id: str) -> Naming | None:
        """The last naming of a model; None = there is none, or its KV has no blocks."""
        found = self._made.get((model_id, adapter_id))
        return found[2] if found else None

    async def find(
        self, facts: ModelFacts, pid: int, adapter_id: str, *, tokens: int | None = None
    ) -> Naming | None:
        """Name the KV of an engine process; None = it has no blocks, or its weights no name.

        Also where their digest takes longer than a prompt of so many tokens is worth: as long as
        its prefill, within bounds. tokens None = it is worth any time.
        """
        key = (facts.model_id, adapter_id)
        if facts.kv_block_tokens < 1 or facts.kv_block_bytes < 1:
            self._made[key] = (pid, facts, None)
            return None
        made = self._made.get(key)
        if made is not None and made[0] == pid and made[1] == facts:
            return made[2]
        try:
            weights, rope = await self._files(facts, _patience_s(facts, tokens))
        except InvalidArgument as problem:
            self._refuse(facts.model_id, problem.message)
            return None
        if not weights and facts.model_path:
            return None  # its digest is being made
        naming = self._make(facts, adapter_id, weights, rope)
        self._made[key] = (pid, facts, naming)
        return naming

    def weights(self, model: Path, state: str) -> asyncio.Future[str]:
        """The digest of the weights in a folder or a GGUF file, made once for each state of them.

        Its result raises InvalidArgument where the files are not those of the state.
        """
        making = self._digests.get(state)
        if making is None:
            making = asyncio.ensure_future(self._digest(model, state))
            self._digests[state] = making
        return making

    async def has_name(self, facts: ModelFacts) -> bool:
        """Whether a model's weights have their digest, without which no KV of it is kept; it is
        waited for `_MOST_WARM_S` at most."""
        if not facts.model_path or not facts.weights_state:
            return True
        making = self.weights(Path(facts.model_path), facts.weights_state)
        done, _ = await asyncio.wait((making,), timeout=_MOST_WARM_S)
        return bool(done)

    async def aclose(self) -> None:
        """Give up the digests that are being made."""
        self._is_closed.set()
        await asyncio.gather(*self._digests.values(), return_exceptions=True)
        await asyncio.gather(*self._notes)

    def are_known(self, model_ids: Iterable[str]) -> bool:
        """Whether all of these models were named."""
        return all((model_id, "") in self._made for model_id in model_ids)

    def usable(
        self,
        known: Mapping[bytes, Facts],
        model_ids: Collection[str],
        adapters: Callable[[], Collection[str]],
    ) -> frozenset[bytes]:
        """Find the fingerprints of stored blocks that these models can use, with the adapters of
        these digests or none. A model without a name yet may use any of its id."""
        named = {one: self.known(one, "") for one in model_ids if self.are_known((one,))}
        digests = {str(facts.get("adapter", "")) for facts in known.values()}
        digests &= {"", *(adapters() if digests - {""} else ())}
        ours = {
            seed
            for naming in named.values()
            if naming is not None
            for digest in digests
            for seed in _seeds(naming, digest)
        }
        if len(named) < len(model_ids):
            ours |= {one for one, facts in known.items() if _model_of(facts) not in named}
        return frozenset(ours & known.keys())

    def _make(self, facts: ModelFacts, adapter_id: str, weights: str, rope: str) -> Naming | None:
        try:
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
            grid=facts.prefill_grid,
        )

    async def _files(self, facts: ModelFacts, patience_s: float | None) -> tuple[str, str]:
        """The names of the weights, and of their RoPE; "" for weights that have none yet.

        Raises InvalidArgument where they were replaced since they were loaded.
        """
        if not facts.model_path:
            return facts.base_fingerprint, ""
        if not facts.weights_state:
            raise InvalidArgument(
                f"the weights in {facts.model_path} changed while they were loaded; restart the "
                "model, so that it serves what lies there"
            )
        folder = Path(facts.model_path)
        rope = await asyncio.to_thread(_rope, folder)
        making = self.weights(folder, facts.weights_state)
        done, _ = await asyncio.wait((making,), timeout=patience_s)
        return (making.result() if done else ""), rope

    async def _digest(self, model: Path, state: str) -> str:
        file = self._file
        known = await asyncio.to_thread(_read_digests, file) if file is not None else {}
        name = f"{model} {state}"
        if name not in known:
            known[name] = await asyncio.to_thread(
                weights_digest, model, state, self._is_closed.is_set
            )
            if file is not None:
                note = asyncio.create_task(_note(file, known), name="digests of weights")
                self._notes.add(note)
                note.add_done_callback(self._notes.discard)
        return known[name]

    def _refuse(self, model_id: str, reason: str) -> None:
        """Log a problem once."""
        if (model_id, reason) not in self._refused:
            self._refused.add((model_id, reason))
            event(
                _log,
                "prompts of this model are not kept: its KV has no safe name",
                level=logging.WARNING,
                model=model_id,
                reason=reason,
            )


def _patience_s(facts: ModelFacts, tokens: int | None) -> float | None:
    if tokens is None:
        return None
    rate = facts.prefill_tokens_per_second
    return max(_LEAST_DIGEST_S, min(_MOST_DIGEST_S, tokens / (rate if rate > 0 else _TOKENS_PER_S)))


@lru_cache(maxsize=1024)
def _seeds(naming: Naming, adapter: str) -> tuple[bytes, bytes]:
    """The seeds of the names of a model's blocks and endings, with the adapter of a digest."""
    seed = replace(naming.fingerprint, adapter=adapter).exact()
    chain = replace(naming.chain, seed=seed)
    return chain.seed, ending_chain(chain).seed


def _model_of(facts: Facts) -> str:
    return str(facts.get("model_id", "")).removesuffix(LOGITS)


def paged_kv_bytes(facts: ModelFacts, tokens: int, paged_bytes: Callable[[int], int]) -> int:
    """The bytes that the KV of so many tokens takes in pages, state behind each block counted; 0
    where it is in no blocks. `paged_bytes` says it of one block."""
    if facts.kv_block_tokens < 1:
        return 0
    whole, rest = divmod(tokens, facts.kv_block_tokens)
    last_bytes = facts.kv_block_bytes * rest // facts.kv_block_tokens + facts.kv_state_bytes
    size = whole * paged_bytes(facts.kv_block_bytes + facts.kv_state_bytes) if whole else 0
    return size + (paged_bytes(last_bytes) if rest else 0)


async def _note(file: Path, known: Mapping[str, str]) -> None:
    newest = dict(list(known.items())[-_FILE_ENTRIES:])
    with contextlib.suppress(OSError):  # it is made anew at the next start
        await asyncio.to_thread(write_atomically, file, json.dumps(newest).encode())


def _read_digests(file: Path) -> dict[str, str]:
    """Read the digests of an earlier start; none where the file is damaged. Blocks."""
    try:
        with file.open("rb") as opened:
            found = json.loads(opened.read(_FILE_BYTES))
    except (OSError, ValueError):
        return {}
    if not isinstance(found, dict):
        return {}
    return {str(name): digest for name, digest in found.items() if _is_digest(digest)}


def _is_digest(found: object) -> bool:
    return isinstance(found, str) and len(found) == 64


def _rope(folder: Path) -> str:
    """Read the settings of positions from a configuration, canonical JSON; "" = none. Blocks."""
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
