"""The logits at the end of whole prompts, kept in memory for requests and on disk for the next
start. A request takes logits from memory and waits for no disk. The last used ones come back from
disk once, after a start. Their files lie among the blocks, for as long as these, and count as they
do.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from kakeya.core.clock import Clock
from kakeya.core.units import pack_ids
from kakeya.generation.kv import LOGIT_BYTES
from kakeya.generation.request import DecodeRequest
from kakeya.generation.retention import BlockClass, Retention
from kakeya.prefix.disk.kvb import StoredBlock
from kakeya.prefix.disk.transfer import PrefixDisk
from kakeya.prefix.names.blocks import ROOT
from kakeya.prefix.names.endings import Ending, Endings
from kakeya.prefix.names.naming import LOGITS, Naming
from kakeya.prefix.names.pieces import Piece
from kakeya.prefix.pages.counts import PrefixCounts

_HOLDS = "logits"
_RECALLED = 512
"""Files that are read at a start, at most."""


class PrefixEndings:
    """See the module. Lives on the event loop."""

    def __init__(self, disk: PrefixDisk | None, *, clock: Clock) -> None:
        self._disk = disk
        self._clock = clock
        self._kept = Endings()
        self._is_recalled = False

    @property
    def count(self) -> int:
        """Prompts whose logits are in memory."""
        return len(self._kept)

    @property
    def held_bytes(self) -> int:
        """The bytes of these."""
        return self._kept.held_bytes

    def takes(self, size: int) -> bool:
        """Whether logits of so many bytes can be kept."""
        return size <= self._kept.limit_bytes

    def find(self, ending: Ending, request: DecodeRequest) -> bytes:
        """The logits of a prompt, for a request that uses them; b"" = they are not known."""
        retention = request.kv_retention
        logits = self._kept.find(ending.id, request.priority.block_class)
        if logits and self._disk is not None and retention.is_on_disk:
            self._disk.store.touch((ending.id,), retention)
        return logits

    def keep(self, naming: Naming, ending: Ending, logits: bytes, request: DecodeRequest) -> None:
        """Keep the logits of a request's prompt, on disk too where its blocks may be there; those
        of the class BATCH are not, which a start would bring back in the place of others."""
        retention, block_class = request.kv_retention, request.priority.block_class
        is_kept = self._kept.keep(ending.id, logits, block_class)
        if not is_kept or self._disk is None or block_class is BlockClass.BATCH:
            return
        if retention.is_on_disk:
            self._disk.keep_payload(self._described(naming, ending, logits, retention), logits)

    async def recall(self) -> None:
        """Bring back the logits that were last used before this start; once."""
        if self._disk is None or self._is_recalled:
            return
        self._is_recalled = True
        store, room = self._disk.store, self._kept.limit_bytes
        ours = (entry for entry in store.entries() if entry.block.facts.get("holds") == _HOLDS)
        wanted = []
        for entry in heapq.nlargest(_RECALLED, ours, key=lambda entry: entry.used_mono):
            room -= entry.block.payload_bytes
            if room < self._kept.held_bytes:
                break
            wanted.append(entry.block.id)
        for ending_id in reversed(wanted):  # the last used is the last to go
            found = await store.get(ending_id)
            if found is not None and store.has(ending_id):  # it may have been wiped meanwhile
                self._kept.keep(ending_id, bytes(found[1]))

    def clear(self) -> None:
        """Forget all logits in memory; the store removes the files."""
        self._kept.clear()

    def _described(
        self, naming: Naming, ending: Ending, logits: bytes, retention: Retention
    ) -> StoredBlock:
        fingerprint = naming.fingerprint
        return StoredBlock(
            id=ending.id,
            parent=ROOT,  # nothing has to stay for it, nor does it for anything
            fingerprint=naming.ending_seed,
            facts={
                "model_id": fingerprint.model_id + LOGITS,
                "adapter": fingerprint.adapter,
                "tenant": fingerprint.tenant,
                "holds": _HOLDS,
            },
            index=0,
            packed_ids=pack_ids((ending.token_id,)),
            payload_bytes=len(logits),
            retention=retention,
            created_at=self._clock.wall(),
        )


class RequestEnding:
    """The logits of one request's prompt. `is_wanted`: its engine is to tell them."""

    def __init__(
        self, endings: PrefixEndings, counts: PrefixCounts, request: DecodeRequest
    ) -> None:
        self._endings = endings
        self._counts = counts
        self._request = request
        self._wanted: tuple[Naming, Ending] | None = None
        self._is_offered = False
        self._is_answered = False

    @property
    def is_wanted(self) -> bool:
        """See the class."""
        return self._wanted is not None

    def offered(
        self,
        naming: Naming,
        pieces: Sequence[Piece],
        token_ids: Sequence[int],
        vocab_size: int,
    ) -> bytes:
        """The logits for the engine that is asked now; b"" = they are not known, or of no use."""
        self.ended()
        if self._request.max_tokens == 0 or self._is_answered:
            return b""
        ending = naming.ending(pieces, token_ids)
        if ending is None:
            return b""
        logits = self._endings.find(ending, self._request)
        self._is_offered = bool(logits)
        if not logits and self._endings.takes(LOGIT_BYTES * vocab_size):
            self._wanted = naming, ending
        return logits

    def told(self, logits: bytes) -> None:
        """Keep the logits that the engine told."""
        wanted, self._wanted = self._wanted, None
        if wanted is not None:
            self._endings.keep(*wanted, logits, self._request)

    def answered(self) -> None:
        """Note that the first token came."""
        if not self._is_answered:
            self._is_answered = True
            self._counts.logits_reused += self._is_offered

    def ended(self) -> None:
        """Note that the engine tells nothing more."""
        self._wanted = None
        self._is_offered = False
