from __future__ import annotations

from itertools import product

import pytest

from kakeya.core import errors
from kakeya.memory.arbiter.resident import (
    ROLES,
    TRANSITIONS,
    VISION,
    LeaseId,
    RequestPriority,
    Resident,
    Role,
    RolePriority,
    State,
    Warmth,
)
from tests.memory.worlds import key

NORMAL = RequestPriority.NORMAL


def resident(state: State) -> Resident:
    return Resident(key=key("see"), role=VISION, state=state, estimate_bytes=10)


def test_the_table_of_states_is_the_documented_one() -> None:
    allowed = {(a.value, b.value) for a, b in product(State, State) if b in TRANSITIONS[a]}
    assert allowed == {
        ("absent", "loading"),
        ("loading", "ready"),
        ("loading", "absent"),
        ("ready", "draining"),
        ("draining", "absent"),
        ("draining", "ready"),
    }


@pytest.mark.parametrize(("before", "after"), list(product(State, State)))
def test_only_the_ways_of_the_table_are_gone(before: State, after: State) -> None:
    if after in TRANSITIONS[before]:
        assert resident(before).moved(after).state is after
    else:
        with pytest.raises(errors.InvariantBroken, match=f"{before} -> {after}"):
            resident(before).moved(after)


def test_what_is_in_use_cannot_leave() -> None:
    used = resident(State.READY).leased({LeaseId(1): NORMAL}, 5.0)
    with pytest.raises(errors.InvariantBroken, match="1 leases"):
        used.leaving()
    leaving = used.released(LeaseId(1), 6.0).leaving()
    assert leaving.state is State.DRAINING
    with pytest.raises(errors.InvariantBroken):
        leaving.leased({LeaseId(2): NORMAL}, 7.0)


@pytest.mark.parametrize("state", [State.ABSENT, State.LOADING])
def test_what_is_not_loaded_cannot_be_leased(state: State) -> None:
    with pytest.raises(errors.InvariantBroken):
        resident(state).leased({LeaseId(1): NORMAL}, 0.0)


def test_the_roles_are_those_of_the_contract() -> None:
    priorities = {role.name: role.priority for role in ROLES}
    assert priorities == {
        "drafter": 10, "emotion": 15, "speaker-id": 18, "vision": 20, "diffusion": 22,
        "embedding": 25, "turn-detector": 28, "wake-word": 30, "vad": 35, "asr": 40, "tts": 50,
        "text-target": 100,
    }  # fmt: skip
    assert [role.name for role in ROLES if not role.yields] == ["text-target"]


def test_priorities_of_requests_are_the_numbers_that_clients_send() -> None:
    assert [(one.name.lower(), one.value, one.rank) for one in RequestPriority] == [
        ("urgent", 1, 0),
        ("high", 5, 1),
        ("normal", 10, 2),
        ("low", 20, 3),
        ("batch", 40, 4),
    ]


@pytest.mark.parametrize(
    ("stay_warm_s", "unload_after_s"), [(-1, None), (10, 5), (float("inf"), 1)]
)
def test_a_model_cannot_leave_while_it_is_kept_warm(
    stay_warm_s: float, unload_after_s: float | None
) -> None:
    with pytest.raises(errors.InvalidArgument):
        Warmth(stay_warm_s=stay_warm_s, unload_after_s=unload_after_s)


@pytest.mark.parametrize(("name", "places"), [("", 1), ("x", 0)])
def test_a_role_needs_a_name_and_a_place(name: str, places: int) -> None:
    with pytest.raises(errors.InvalidArgument):
        Role(name=name, priority=RolePriority(1), eviction="nothing", places=places)
