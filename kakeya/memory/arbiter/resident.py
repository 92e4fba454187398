"""Residents: models and other holders of memory, each with a role and a state.

    ABSENT -> LOADING -> READY -> DRAINING -> ABSENT
                 |         ^          |
                 v         +----------+  rescued by a lease, or no longer asked to go
              ABSENT (failed)

A resident that leaves is DRAINING in two steps: at first it takes no new leases, which can be taken
back; then, without leases, it is part of a plan (`is_leaving`), which cannot.

A resident is a value. It neither loads nor evicts anything; its owner is the ledger. Three kinds of
priority exist in this project and are three types: of roles and requests (here), and of page
contents.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum, StrEnum
from typing import NamedTuple, NewType

from kakeya.core import errors

RolePriority = NewType("RolePriority", int)
"""The worth of a role to the node: the lowest is evicted first."""
LeaseId = NewType("LeaseId", int)


class RequestPriority(IntEnum):
    """The urgency of a request: the lowest number is served first, as clients send it."""

    URGENT = 1
    HIGH = 5
    NORMAL = 10
    LOW = 20
    BATCH = 40

    @property
    def rank(self) -> int:
        """The class counted from the most urgent, 0: one step of ageing or decay is 1."""
        return _RANKS[self]


_RANKS = {priority: rank for rank, priority in enumerate(sorted(RequestPriority))}
WORST_RANK = len(_RANKS) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """The part that a group of capabilities plays for the node. Its residents compete for its
    places.

    `places` is how many may be resident at once, None = as many as fit; beyond it, one is swapped
    for the other. A role that does not yield is never evicted for pressure, nor to fit other roles.
    """

    name: str
    priority: RolePriority
    eviction: str
    """The cost of losing a resident of it, for people."""
    yields: bool = True
    places: int | None = 1
    stay_warm_s: float = 300.0
    """Default of `Warmth.stay_warm_s`."""
    is_lent: bool = False
    """The bytes of its residents are lent to other processes, which return them some day."""
    is_room: bool = False
    """The keys of its residents name tenants that wait for room: models are evicted, none is
    loaded."""

    def __post_init__(self) -> None:
        if not self.name:
            raise errors.InvalidArgument("a role needs a name", param="name")
        if self.places is not None and self.places < 1:
            raise errors.InvalidArgument(
                f"role {self.name!r} has {self.places} places; at least 1 is needed, or None",
                param="places",
            )


def _role(name: str, priority: int, eviction: str, stay_warm_s: float = 300.0) -> Role:
    return Role(
        name=name, priority=RolePriority(priority), eviction=eviction, stay_warm_s=stay_warm_s
    )


DRAFTER = Role(
    name="drafter",
    priority=RolePriority(10),
    eviction="generation goes on without drafts of this model",
    places=None,
)
EMOTION = _role("emotion", 15, "weights are unloaded")
SPEAKER_ID = _role("speaker-id", 18, "weights are unloaded")
VISION = _role("vision", 20, "weights are unloaded, projected images forgotten", 60.0)
DIFFUSION = _role("diffusion", 22, "weights are unloaded, and read again for the next image", 900.0)
EMBEDDING = _role("embedding", 25, "weights are unloaded")
TURN_DETECTOR = _role("turn-detector", 28, "weights are unloaded")
WAKE_WORD = _role("wake-word", 30, "weights are unloaded")
VAD = _role("vad", 35, "pages are given back, and read again on use")
ASR = _role("asr", 40, "pages are given back, and read again on use")
TTS = _role("tts", 50, "pages are given back, and read again on use")
TEXT_TARGET = Role(
    name="text-target",
    priority=RolePriority(100),
    eviction="weights are unloaded; sessions prefill again. Only a swap does that, never pressure",
    yields=False,
    places=None,
)
ROOM = Role(
    name="room",
    priority=RolePriority(5),
    eviction="not evicted: it becomes a tenant's as soon as it is there",
    places=None,
    stay_warm_s=0.0,
    is_room=True,
)
ROLES: tuple[Role, ...] = (
    DRAFTER, EMOTION, SPEAKER_ID, VISION, DIFFUSION, EMBEDDING, TURN_DETECTOR, WAKE_WORD, VAD, ASR,
    TTS, TEXT_TARGET,
)  # fmt: skip


class State(StrEnum):
    """The stages in a resident's life."""

    ABSENT = "absent"
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"


TRANSITIONS: Mapping[State, frozenset[State]] = {
    State.ABSENT: frozenset({State.LOADING}),
    State.LOADING: frozenset({State.READY, State.ABSENT}),
    State.READY: frozenset({State.DRAINING}),
    State.DRAINING: frozenset({State.READY, State.ABSENT}),
}


class ResidentKey(NamedTuple):
    """One model of one capability."""

    capability: str
    model_key: str

    def __str__(self) -> str:
        return f"{self.capability}:{self.model_key}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Warmth:
    """The time that a resident stays without being used.

    Until `stay_warm_s` after its last use, requests of equal priority do not take its place. After
    `unload_after_s` it is evicted although no request needs the room; None = it stays. A pinned one
    stays.
    """

    stay_warm_s: float = 0.0
    unload_after_s: float | None = None
    is_pinned: bool = False

    def __post_init__(self) -> None:
        if self.stay_warm_s < 0 or not self.stay_warm_s < float("inf"):
            raise errors.InvalidArgument(
                f"stay_warm_s is {self.stay_warm_s}; 0 or a number of seconds is needed",
                param="stay_warm_s",
            )
        if self.unload_after_s is not None and not self.unload_after_s >= self.stay_warm_s:
            raise errors.InvalidArgument(
                f"unload_after_s is {self.unload_after_s}, less than stay_warm_s, which is "
                f"{self.stay_warm_s}; a model cannot leave while it is kept warm",
                param="unload_after_s",
            )


COLD = Warmth()


@dataclass(frozen=True, slots=True, kw_only=True)
class Resident:
    """A model or another holder of bytes: estimated until it is loaded, then measured.

    `unfilled_bytes` of them it may use and does not use yet, so that the machine shows them as
    free.
    """

    key: ResidentKey
    role: Role
    state: State
    estimate_bytes: int
    measured_bytes: int | None = None
    unfilled_bytes: int = 0
    leases: Mapping[LeaseId, RequestPriority] = field(default_factory=dict)
    warmth: Warmth = COLD
    last_priority: RequestPriority = RequestPriority.NORMAL
    last_used_mono: float = 0.0
    loaded_mono: float | None = None
    kept_warm_mono: float = 0.0
    """Until here it is kept warm at least: a caller asked for it."""
    is_leaving: bool = False

    @property
    def idle_since_mono(self) -> float:
        """The time from which its idleness counts: `stay_warm_s` later it is kept warm no more."""
        return max(self.last_used_mono, self.kept_warm_mono - self.warmth.stay_warm_s)

    @property
    def overdue_mono(self) -> float | None:
        """When it is evicted although no request needs its room; None = it stays."""
        after_s = None if self.warmth.is_pinned else self.warmth.unload_after_s
        return None if after_s is None else max(self.last_used_mono + after_s, self.kept_warm_mono)

    @property
    def bytes(self) -> int:
        """The bytes that the ledger counts."""
        return self.estimate_bytes if self.measured_bytes is None else self.measured_bytes

    @property
    def is_open(self) -> bool:
        """Whether a lease could be given now."""
        return self.state in (State.READY, State.DRAINING) and not self.is_leaving

    @property
    def is_idle(self) -> bool:
        """Whether it is loaded, without leases, and not part of a plan that ends it."""
        return self.is_open and not self.leases

    def moved(self, state: State) -> Resident:
        """The resident in its next state. Raises InvariantBroken for a step not in TRANSITIONS."""
        if state not in TRANSITIONS[self.state]:
            raise errors.InvariantBroken("resident state", f"{self.key}: {self.state} -> {state}")
        return replace(self, state=state, is_leaving=False)

    def leaving(self) -> Resident:
        """The resident as part of a plan that ends it. Raises InvariantBroken when in use."""
        if not self.is_idle:
            raise errors.InvariantBroken(
                "nothing in use leaves",
                f"{self.key}: {self.state}, {len(self.leases)} leases, leaving={self.is_leaving}",
            )
        draining = self if self.state is State.DRAINING else self.moved(State.DRAINING)
        return replace(draining, is_leaving=True)

    def leased(self, leases: Mapping[LeaseId, RequestPriority], now: float) -> Resident:
        """The resident with more leases, one at least."""
        if not self.is_open:
            raise errors.InvariantBroken("lease of a resident", f"{self.key} is {self.state}")
        return replace(
            self,
            leases={**self.leases, **leases},
            last_priority=[*leases.values()][-1],
            last_used_mono=now,
        )

    def released(self, lease: LeaseId, now: float) -> Resident:
        """The resident without a lease. How long it idles counts from here."""
        rest = {held: priority for held, priority in self.leases.items() if held != lease}
        return replace(self, leases=rest, last_used_mono=now)
