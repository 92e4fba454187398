"""The registry of clients: counts, cooldowns, and what it forgets."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kakeya.core.errors import QueueFull
from kakeya.dispatch import clients as registry
from kakeya.dispatch.clients import (
    FORGET_S,
    ID_CHARS,
    MOST_COOLDOWN_S,
    Clients,
    CoolingDown,
    RequestLabel,
)
from kakeya.generation.waiting import RequestWait, WaitReason, WaitTeller
from tests.laws import law


class Now:
    def __init__(self) -> None:
        self.mono = 1000.0

    def __call__(self) -> float:
        return self.mono


def of(clients: Clients, client: str, user: str = "") -> dict[str, object]:
    (found,) = (one for one in clients.status() if (one["client"], one["user"]) == (client, user))
    return dict(found)


def test_a_labelled_request_is_told_until_it_is_over_and_its_wait_until_it_begins() -> None:
    now = Now()
    clients = Clients(now)
    wait = RequestWait(reason=WaitReason.PLACE, model_id="m", position=2, seconds=3.0)
    label = RequestLabel(
        request_id="req_" + "a" * ID_CHARS,
        model_id="m",
        priority="batch",
        wait=WaitTeller(lambda: wait),
    )
    with clients.request("desk", "bob", label=label) as use:
        now.mono += 2
        (told,) = clients.waiting()
        assert (told["client"], told["user"], told["priority"]) == ("desk", "bob", "batch")
        assert told["waits_for"] == wait.as_json()
        assert clients.find("chatcmpl-" + "a" * ID_CHARS) == (
            "desk",
            {key: told[key] for key in told if key not in ("client", "user")},
        )
        use.begin()
        assert not clients.waiting()
        found = clients.find(label.request_id)
        assert found is not None
        assert (found[1]["state"], found[1]["waits_for"]) == ("answering", None)
    assert clients.find(label.request_id) is None


def test_a_request_waits_then_runs_then_is_over() -> None:
    now = Now()
    clients = Clients(now)
    with clients.request("desk", "bob") as use:
        assert (of(clients, "desk", "bob")["waiting"], of(clients, "desk", "bob")["running"]) == (
            1,
            0,
        )
        use.begin()
        use.begin()
        assert (of(clients, "desk", "bob")["waiting"], of(clients, "desk", "bob")["running"]) == (
            0,
            1,
        )
    now.mono += 7
    assert of(clients, "desk", "bob") == {
        "client": "desk", "user": "bob", "requests": 1, "refused": 0,
        "running": 0, "waiting": 0, "idle_s": 7.0, "cooldown_s": 0.0,
    }  # fmt: skip


def test_a_cooldown_refuses_its_client_alone_and_says_how_long() -> None:
    now = Now()
    clients = Clients(now)
    with clients.request("desk", cooldown_s=5) as use:
        use.begin()
        with clients.request("desk"):
            now.mono += 3
    now.mono += 1
    with pytest.raises(CoolingDown, match=r"desk asked for a cooldown, of which 4 s") as refused:
        with clients.request("desk"):
            pass
    assert refused.value.retry_after_s == 4
    with clients.request("desk", "bob"), clients.request("shelf"):
        pass
    now.mono += 4
    with clients.request("desk"):
        pass
    assert (of(clients, "desk")["requests"], of(clients, "desk")["refused"]) == (3, 1)


def test_a_request_that_was_not_answered_brings_no_cooldown() -> None:
    clients = Clients(Now())
    with pytest.raises(QueueFull):
        with clients.request("desk", cooldown_s=5):
            raise QueueFull("full")
    with clients.request("desk"):
        pass


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.integers(0, 9), st.floats(0, 2 * MOST_COOLDOWN_S)),
        st.tuples(st.sampled_from(["begin", "end"]), st.integers(0, 9), st.just(0.0)),
        st.tuples(st.just("wait"), st.just(0), st.floats(0, 1.5 * FORGET_S)),
    ),
    max_size=60,
)


@given(STEPS)
@law(2400)
def test_what_it_counts_is_what_is_here_and_nobody_idle_is_kept_for_long(
    steps: list[tuple[str, int, float]],
) -> None:
    now, most = Now(), 4
    with pytest.MonkeyPatch.context() as patch, ExitStack() as rest:
        patch.setattr(registry, "MOST_CLIENTS", most)
        clients = Clients(now)
        here: list[tuple[str, ExitStack, registry.ClientRequest]] = []
        for step, number, seconds in steps:
            if step == "wait":
                now.mono += seconds
            elif step == "ask":
                name = f"c{number}"
                held = rest.enter_context(ExitStack())
                known = {str(one["client"]): one["cooldown_s"] for one in clients.status()}
                left_s = None
                try:
                    use = held.enter_context(clients.request(name, cooldown_s=seconds))
                except CoolingDown as refused:
                    left_s = refused.retry_after_s or 0.0
                if left_s is None:
                    assert known.get(name, 0.0) <= 0.05  # rounded
                    here.append((name, held, use))
                else:
                    assert 0 < left_s <= MOST_COOLDOWN_S
                    assert abs(left_s - known[name]) <= 0.05 + 1e-9
                shown = clients.status()
                active = {one for one, _, _ in here}
                assert len(shown) <= max(most, len(active) + 1)
                assert all(one["idle_s"] <= FORGET_S for one in shown)
            elif here:
                name, held, use = here[number % len(here)]
                use.begin()
                if step == "end":
                    held.close()
                    here.remove((name, held, use))
            shown = clients.status()
            for key, has_begun in (("running", True), ("waiting", False)):
                counted = {str(one["client"]): one[key] for one in shown if one[key]}
                names = [one for one, _, use in here if use.has_begun is has_begun]
                assert counted == {one: names.count(one) for one in names}
