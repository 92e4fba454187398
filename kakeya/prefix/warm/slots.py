"""The slot of each open conversation of a model: the least loaded one, for as long as it lasts.

A slot names KV that the engine keeps behind a generation, decoded tokens included. Conversations
that share one cost each other that KV and no more: whole blocks are found by their content. So a
slot is chosen for even load, and nothing is ever refused for want of slots.

    load          open conversations of a slot; ties are broken by the hash of the key
    high water    the most conversations of a model that were open at once; it never falls
    recommended   as many slots as that, and a quarter more, as far as memory holds their KV

Pure: callers pass `now` in monotonic seconds. Prompts that are only kept warm are no
conversations, so they are no load here and do not age.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field

from kakeya.core.errors import Conflict, InvalidArgument
from kakeya.generation.retention import Retention
from kakeya.prefix.names.keys import derive_slot_id

MAX_CONVERSATIONS = 10_000
"""Open at once on a node, about 4 MB; beyond it the one that idles longest is closed."""
AUTO_SLOTS = range(2, 17)
MOST_SLOTS = 1024
"""The limits of the setting."""
_AUTO_SHARE = 0.25
SLOT_TOKENS = 8192
"""Tokens of a conversation that a slot is counted with: few grow longer, and KV is asked for as
they do."""
_SPARE_SHARE, _SPARE_LEAST = 0.25, 2


@dataclass(slots=True, eq=False)
class Conversation:
    """An open conversation; mutated by its registry only."""

    model_id: str
    conversation_id: str
    slot: int
    ttl_s: float
    opened_mono: float
    used_mono: float
    is_closed: bool = False

    @property
    def kv_key(self) -> str:
        """The key of its KV at the engine."""
        return slot_key(self.slot)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotStatus:
    """The slots of one model: open conversations by slot, and counts of them."""

    model_id: str
    parallel: int
    loads: tuple[int, ...]
    high_water: int
    recommended: int

    @property
    def is_crowded(self) -> bool:
        """Whether there were more conversations than slots."""
        return self.high_water > self.parallel


@dataclass(slots=True)
class _Model:
    parallel: int
    most: int
    loads: Counter[int] = field(default_factory=Counter)
    open: int = 0
    high_water: int = 0


class ConversationRegistry:
    """The open conversations of all models, by (model, conversation)."""

    def __init__(self, *, most: int = MAX_CONVERSATIONS) -> None:
        self._most = most
        self._open: OrderedDict[tuple[str, str], Conversation] = OrderedDict()
        self._models: dict[str, _Model] = {}

    def __len__(self) -> int:
        return len(self._open)

    def open(
        self,
        model_id: str,
        conversation_id: str,
        now: float,
        *,
        parallel: int,
        most: int = MOST_SLOTS,
        retention: Retention = Retention.LONG,
    ) -> Conversation:
        """Find or open a conversation, and note its use.

        It keeps its slot while the model has that slot; more than `most` are not recommended. Idle
        for longer than `retention` it may be closed, an hour at the least. Raises InvalidArgument
        for less than one slot.
        """
        if parallel < 1:
            raise InvalidArgument(f"model {model_id} has {parallel} slots; it needs at least one")
        model = self._models.setdefault(model_id, _Model(parallel, most))
        model.parallel, model.most = parallel, most
        known = self._open.get((model_id, conversation_id))
        if known is None:
            known = self._begin(model, model_id, conversation_id, now)
        elif known.slot >= parallel:
            self._leave(model, known.slot)
            known.slot = self._enter(model, conversation_id)
        known.ttl_s = float(max(retention, Retention.LONG).seconds)
        self.use(known, now)
        return known

    def get(self, model_id: str, conversation_id: str, now: float) -> Conversation | None:
        """Find an open conversation, and note its use."""
        known = self._open.get((model_id, conversation_id))
        if known is not None:
            self.use(known, now)
        return known

    def use(self, conversation: Conversation, now: float) -> None:
        """Note that a conversation is used. Raises Conflict for one that was closed."""
        if conversation.is_closed:
            raise Conflict(
                f"conversation {conversation.conversation_id!r} was closed; open it again"
            )
        conversation.used_mono = max(conversation.used_mono, now)
        self._open.move_to_end((conversation.model_id, conversation.conversation_id))

    def close(self, conversation: Conversation) -> bool:
        """Give its slot back; False = it was closed before."""
        if conversation.is_closed:
            return False
        conversation.is_closed = True
        del self._open[conversation.model_id, conversation.conversation_id]
        self._leave(self._models[conversation.model_id], conversation.slot)
        return True

    def evict_idle(self, now: float) -> tuple[Conversation, ...]:
        """Close and return those that idle for longer than they may, the oldest use first."""
        idle = tuple(one for one in self._open.values() if now - one.used_mono > one.ttl_s)
        for one in idle:
            self.close(one)
        return idle

    def overflow(self) -> tuple[Conversation, ...]:
        """Close and return the longest idle conversations beyond the limit of a node."""
        excess = tuple(self._open.values())[: max(0, len(self._open) - self._most)]
        for one in excess:
            self.close(one)
        return excess

    def status(self) -> Mapping[str, SlotStatus]:
        """Each model that ever had a conversation."""
        return {
            model_id: SlotStatus(
                model_id=model_id,
                parallel=model.parallel,
                loads=tuple(model.loads[slot] for slot in range(model.parallel)),
                high_water=model.high_water,
                recommended=recommended_parallel(model.parallel, model.high_water, model.most),
            )
            for model_id, model in self._models.items()
        }

    def _begin(
        self, model: _Model, model_id: str, conversation_id: str, now: float
    ) -> Conversation:
        opened = Conversation(
            model_id=model_id,
            conversation_id=conversation_id,
            slot=self._enter(model, conversation_id),
            ttl_s=0.0,
            opened_mono=now,
            used_mono=now,
        )
        self._open[model_id, conversation_id] = opened
        return opened

    def _enter(self, model: _Model, conversation_id: str) -> int:
        loads = [model.loads[slot] for slot in range(model.parallel)]
        slot = least_loaded(loads, conversation_id)
        model.loads[slot] += 1
        model.open += 1
        model.high_water = max(model.high_water, model.open)
        return slot

    def _leave(self, model: _Model, slot: int) -> None:
        model.loads[slot] -= 1
        model.open -= 1


def slot_key(slot: int) -> str:
    """The key of a slot's KV at an engine; "" for no slot in particular."""
    return f"slot:{slot}" if slot >= 0 else ""


def least_loaded(loads: list[int], key: str) -> int:
    """The slot with the least load; among several, the one that the key's hash says."""
    least = min(loads)
    ties = [slot for slot, load in enumerate(loads) if load == least]
    return ties[derive_slot_id(key, len(ties))] if key else ties[0]


def recommended_parallel(parallel: int, high_water: int, most: int = MOST_SLOTS) -> int:
    """How many slots there should be, after so many conversations were open at once.

    No more than `most`: beyond the slots that memory holds, conversations only take each other's
    KV.
    """
    spare = max(_SPARE_LEAST, math.ceil(high_water * _SPARE_SHARE))
    return max(parallel, min(high_water + spare, most, MOST_SLOTS))


def fitting_parallel(usable_bytes: int, kv_bytes_per_token: int, context_tokens: int) -> int:
    """How many slots a quarter of the memory holds, each with a full context or SLOT_TOKENS."""
    full_bytes = max(1, kv_bytes_per_token * min(context_tokens, SLOT_TOKENS))
    return min(int(usable_bytes * _AUTO_SHARE) // full_bytes, MOST_SLOTS)


def auto_parallel(usable_bytes: int, kv_bytes_per_token: int, context_tokens: int) -> int:
    """The slots of a model where none are set: those that fit; 2 to 16."""
    fits = fitting_parallel(usable_bytes, kv_bytes_per_token, context_tokens)
    return min(max(fits, AUTO_SLOTS.start), AUTO_SLOTS.stop - 1)
