"""The arbiter alone: swap, fit, pressure, ageing, pins, and what it answers when it refuses.

Rows of S0 (arbiter) and S3 (model pool) are named where a test answers one; "(d)" marks a known
defect of the documents that must not come back.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from kakeya.core import errors
from kakeya.memory.arbiter.plan import ArbiterOutcome
from kakeya.memory.arbiter.policy import PressureLevel, Rung, Tenant
from kakeya.memory.arbiter.resident import LeaseId, RequestPriority, State, Warmth
from kakeya.memory.leases.rules import JOB
from tests.memory.worlds import MANY, World, ask, key

WARM = Warmth(stay_warm_s=300)
PINNED = Warmth(is_pinned=True)


# Loading and sharing.


def test_the_line_for_memory_counts_models_the_most_urgent_first() -> None:
    world = World.of(100)
    world.loads_by_hand = True
    user = world.ask(ask("c", "text-target", 60, warmth=WARM))
    assert world.arbiter.place_of(key("c"), world.now) is None  # it loads
    world.take(world.arbiter.loaded(key("c"), None, world.now))
    for model, priority in (
        ("a", RequestPriority.LOW),
        ("b", RequestPriority.LOW),
        ("b", RequestPriority.HIGH),
        ("a", RequestPriority.LOW),
        ("d", RequestPriority.BATCH),
    ):
        world.ask(ask(model, "text-target", 60, warmth=WARM, priority=priority))
    places = [world.arbiter.place_of(key(model), world.now) for model in "abcd"]
    assert places == [2, 1, None, 3]
    world.release(user)
    assert world.loading[-1] == key("b")
    places = [world.arbiter.place_of(key(model), world.now) for model in "abcd"]
    assert places == [1, None, None, 2]


def test_a_model_that_a_caller_keeps_warm_leaves_for_idleness_no_earlier() -> None:
    world = World.of(1000)
    warmth = Warmth(stay_warm_s=10, unload_after_s=20)
    world.use(ask("see", warmth=warmth))
    world.arbiter.keep_warm(key("see"), world.now + 60)
    world.arbiter.keep_warm(key("see"), world.now + 30)
    world.arbiter.keep_warm(key("absent"), world.now + 30)
    world.wait(59)
    assert world.resident == {"see"}
    world.wait(2)
    assert world.resident == set()


def test_a_model_is_loaded_at_first_use_and_stays_for_the_next() -> None:
    world = World.of(1000)
    world.use(ask("see"))
    world.use(ask("see"))
    assert [plan.load for plan in world.plans] == [key("see")]
    assert world.resident == {"see"}


def test_requests_during_a_load_share_it_and_hold_leases_the_moment_it_ends() -> None:
    """S0.33. (d) The count rose a tick after the model had become evictable."""
    world = World.of(1000)
    world.loads_by_hand = True
    leases = [world.ask(ask("see")) for _ in range(3)]
    assert world.loading == [key("see")]
    world.take(world.arbiter.observe(PressureLevel.LOW, None, world.now))
    world.take(world.arbiter.loaded(key("see"), 90, world.now))
    assert set(world.grants) == set(leases)
    assert world.resident == {"see"}


def test_a_load_serves_all_who_wait_for_it_though_others_wait_for_its_room() -> None:
    """Else two models that are away would be loaded in turns, once for each request."""
    world = World.of(100)
    world.loads_by_hand = True
    waiting: dict[str, list[LeaseId]] = {"a": [], "b": []}
    user = world.ask(ask("c", "text-target", 60, warmth=WARM))
    world.take(world.arbiter.loaded(key("c"), None, world.now))
    for _ in range(5):
        for model, leases in waiting.items():
            leases.append(world.ask(ask(model, "text-target", 60, warmth=WARM)))
    world.release(user)
    for model, leases in waiting.items():
        world.wait(6)
        assert world.loading[-1] == key(model)
        world.take(world.arbiter.loaded(key(model), None, world.now))
        assert set(leases) <= set(world.grants)
        for lease in leases:
            world.release(lease)
    assert world.loading == [key("c"), key("a"), key("b")]


def test_a_failed_load_fails_all_who_wait_and_the_next_request_tries_again() -> None:
    world = World.of(1000)
    world.loads_by_hand = True
    first, second = world.ask(ask("see")), world.ask(ask("see"))
    world.take(
        world.arbiter.load_failed(key("see"), lambda: errors.LoadFailed("broken"), world.now)
    )
    assert {first, second} == set(world.refusals)
    world.ask(ask("see"))
    assert world.loading == [key("see")] * 2


def test_no_load_begins_for_nobody() -> None:
    """S3 (b): a cancelled client is pruned from the line, and from those who share a load."""
    world = World.of(100)
    world.loads_by_hand = True
    blocker = world.ask(ask("see"))
    world.take(world.arbiter.loaded(key("see"), None, 0))
    waits = world.ask(ask("hear", "asr"))
    world.take(world.arbiter.withdraw(waits, 0))
    world.release(blocker)
    assert world.loading == [key("see")]


def test_a_lease_is_released_once() -> None:
    world = World.of(1000)
    first, second = world.lease(ask("see")), world.lease(ask("see"))
    world.release(first)
    with pytest.raises(errors.NotFound, match="not held"):
        world.arbiter.release(first, 0)
    world.take(world.arbiter.observe(PressureLevel.CRITICAL, None, 0))
    assert world.resident == {"see"}
    world.release(second)
    assert world.resident == set()


def test_a_retained_lease_counts_by_itself() -> None:
    """(d) retain then release left the second count for ever."""
    world = World.of(1000)
    first = world.lease(ask("see"))
    second = world.arbiter.retain(first, 0)
    world.release(first)
    assert world.arbiter.find(key("see")).leases.keys() == {second}  # type: ignore[union-attr]
    world.release(second)
    assert world.arbiter.find(key("see")).is_idle  # type: ignore[union-attr]
    with pytest.raises(errors.NotFound):
        world.arbiter.retain(first, 0)


# Swaps inside a role.


def test_one_model_of_a_role_is_swapped_for_another_across_capabilities() -> None:
    world = World.of(1000)
    for name in ("vision-describe", "image-gen", "vision-describe"):
        world.use(ask(name))
        assert world.resident == {name}
    assert world.gone == [("vision-describe", "swap"), ("image-gen", "swap")]


def test_roles_do_not_swap_each_other() -> None:
    world = World.of(1000)
    world.use(ask("see"))
    world.use(ask("hear", "asr"))
    assert world.resident == {"see", "hear"}
    assert world.gone == []


def test_a_swap_waits_for_those_who_use_what_has_to_go() -> None:
    world = World.of(1000)
    held = world.lease(ask("see:a"))
    waits = world.ask(ask("see:b"))
    assert world.arbiter.find(key("see:a")).state is State.DRAINING  # type: ignore[union-attr]
    assert world.gone == []
    world.release(held)
    assert waits in world.grants
    assert world.gone == [("see", "swap")]


def test_a_newcomer_does_not_slip_in_front_of_a_swap_and_is_not_yanked_by_it() -> None:
    """(d) After the drain a new holder could appear, and the swap took the model from it."""
    world = World.of(1000)
    held = world.lease(ask("see:a"))
    swap = world.ask(ask("see:b"))
    newcomer = world.ask(ask("see:a"))
    world.release(held)
    assert swap in world.grants
    assert newcomer not in world.grants
    world.release(swap)
    assert newcomer in world.grants


def test_two_models_of_one_role_are_never_there_at_once() -> None:
    """(d) Two acquires of different keys in one role both loaded."""
    world = World.of(1000)
    world.loads_by_hand = True
    first, second = world.ask(ask("see:a")), world.ask(ask("see:b"))
    assert world.loading == [key("see:a")]
    world.take(world.arbiter.loaded(key("see:a"), None, 0))
    assert first in world.grants
    assert world.loading == [key("see:a")]
    world.release(first)
    assert world.loading == [key("see:a"), key("see:b")]
    world.take(world.arbiter.loaded(key("see:b"), None, 0))
    assert second in world.grants


def test_a_swap_gives_up_after_ten_seconds_and_says_who_stands_in_the_way() -> None:
    """S0.32, R8: it fails that swap only, and what was draining is rescued."""
    world = World.of(1000)
    world.lease(ask("see:a"))
    waits = world.ask(ask("see:b"))
    world.wait(9.9)
    assert waits not in world.refusals
    world.wait(0.2)
    error = world.refusals[waits]
    assert isinstance(error, errors.DrainTimeout)
    assert "timeout waiting for see:a (refcount=1) to drain" in str(error)
    assert error.retry_after_s
    assert world.arbiter.find(key("see:a")).state is State.READY  # type: ignore[union-attr]
    world.lease(ask("see:a"))


@pytest.mark.parametrize("use_s", [11.0, 40.0, 110.0])
def test_a_request_with_a_deadline_waits_for_a_use_that_ends_before_it(use_s: float) -> None:
    """The ten seconds are for requests that do not say how long they wait."""
    world = World.of(100)
    use = world.lease(ask("text:a", "text-target", 60))
    waits = world.ask(ask("text:b", "text-target", 60, deadline=120.0))
    world.wait(use_s)
    assert waits not in world.refusals
    world.release(use)
    assert waits in world.grants


def test_a_request_whose_deadline_ends_before_the_use_is_told_of_it() -> None:
    world = World.of(100)
    world.lease(ask("text:a", "text-target", 60))
    waits = world.ask(ask("text:b", "text-target", 60, deadline=30.0))
    world.wait(29.9)
    assert waits not in world.refusals
    world.wait(0.2)
    error = world.refusals[waits]
    assert isinstance(error, errors.ModelLoading)
    assert "waited for the room of text:a (refcount=1), still in use after the 30 s" in str(error)
    assert error.retry_after_s
    again = world.ask(ask("text:b", "text-target", 60, deadline=60.0))
    assert world.arbiter._tickets.get(again).has_come_again  # type: ignore[union-attr]


def _held_outside(world: World, size: int) -> None:
    """Other programs have so many bytes of 100."""
    world.take(world.arbiter.observe(PressureLevel.NOMINAL, 100 - size, world.now))


def test_a_request_waits_for_memory_of_other_programs_until_its_deadline() -> None:
    """S3.17."""
    world = World.of(100)
    _held_outside(world, 60)
    waits = world.ask(ask("a", MANY, 50, deadline=120))
    world.wait(119)
    assert not world.refusals
    _held_outside(world, 20)
    assert waits in world.grants


def test_memory_of_other_programs_that_does_not_come_is_told_at_the_deadline() -> None:
    world = World.of(100)
    _held_outside(world, 60)
    waits = world.ask(ask("a", MANY, 50, deadline=120))
    world.wait(120)
    refusal = world.refusals[waits]
    assert isinstance(refusal, errors.MemoryRefused)
    assert "free after a wait of 120 s, and the rest is held by other programs" in refusal.message
    assert refusal.retry_after_s == 10
    _held_outside(world, 20)
    assert world.resident == {"a"}, "it is loaded for the next try"


def test_a_request_without_a_deadline_is_refused_memory_of_other_programs_after_10_s() -> None:
    world = World.of(100)
    _held_outside(world, 60)
    waits = world.ask(ask("a", MANY, 50))
    world.wait(10)
    assert isinstance(world.refusals[waits], errors.MemoryRefused)


def test_a_long_wait_for_memory_of_other_programs_delays_only_its_own_model() -> None:
    """A role with one place counts as taken by what loads, and not by what cannot."""
    world = World.of(100)
    _held_outside(world, 60)
    big = world.ask(ask("see:big", size=50, deadline=120))
    behind = world.ask(ask("see:small", size=30, deadline=120))
    again = world.ask(ask("see:big", size=50, deadline=120))
    world.wait(9)
    assert not world.grants
    world.wait(2)
    assert set(world.grants) == {behind}
    world.release(behind)
    _held_outside(world, 20)
    assert {big, again} <= set(world.grants)


def test_a_request_without_time_for_a_load_finds_its_model_at_the_next_try() -> None:
    """Another model of the role is kept warm, so that the first try is over before its turn."""
    world = World.of(150)
    world.use(ask("any:a", MANY, warmth=Warmth(stay_warm_s=300)))
    first = world.ask(replace(ask("any:b", MANY, deadline=2.0), load_s=20.0))
    world.wait(2.5)
    late = world.refusals[first]
    assert isinstance(late, errors.ModelLoading)
    assert late.retry_after_s == pytest.approx(23), "3 s until its turn, and the load"
    assert world.arbiter.find(key("any:b")) is None
    world.wait(3)
    assert world.arbiter.find(key("any:b")) is not None
    world.lease(ask("any:b", MANY, deadline=world.now + 2.0))


def test_a_wish_takes_no_model_that_is_in_use_and_is_forgotten_in_time() -> None:
    world = World.of(150)
    used = world.lease(ask("any:a", MANY))
    _, outcome = world.arbiter.decline(replace(ask("any:b", MANY, deadline=1.0), load_s=20.0), 0.0)
    world.take(outcome)
    world.wait(10)
    assert world.arbiter.find(key("any:a")).is_open  # type: ignore[union-attr]
    assert world.arbiter.snapshot().waiting == ()
    world.wait(30)
    world.release(used)
    world.wait(100)
    assert world.arbiter.find(key("any:b")) is None


def test_a_caller_that_leaves_at_its_deadline_leaves_a_wish_and_one_that_leaves_earlier_none() -> (
    None
):
    for left_s, comes in ((1.0, False), (2.0, True)):
        world = World.of(150)
        world.use(ask("any:a", MANY, warmth=Warmth(stay_warm_s=300)))
        waits = world.ask(ask("any:b", MANY, deadline=2.2))
        world.wait(left_s)
        world.take(world.arbiter.withdraw(waits, world.now))
        world.wait(10)
        assert (world.arbiter.find(key("any:b")) is not None) is comes


def test_a_deadline_shortens_the_wait() -> None:
    world = World.of(1000)
    world.lease(ask("see:a"))
    waits = world.ask(ask("see:b", deadline=3.0))
    world.wait(2.9)
    assert not world.refusals
    world.wait(0.2)
    assert isinstance(world.refusals[waits], errors.DeadlineExceeded)


def test_a_swap_that_is_called_off_rescues_what_was_draining() -> None:
    world = World.of(1000)
    world.lease(ask("see:a"))
    swap = world.ask(ask("see:b"))
    newcomer = world.ask(ask("see:a"))
    world.take(world.arbiter.withdraw(swap, 0))
    assert newcomer in world.grants


def test_disjoint_swaps_do_not_wait_for_each_other() -> None:
    world = World.of(400)
    world.lease(ask("see:a", size=200))
    stuck = world.ask(ask("see:b", size=200))
    hear = world.lease(ask("hear:a", "asr", 200))
    world.release(hear)
    world.lease(ask("hear:b", "asr", 200))
    assert stuck not in world.grants


def test_a_role_can_have_several_places() -> None:
    world = World.of(1000)
    leases = [world.lease(ask(f"any:{n}", MANY)) for n in range(5)]
    assert len(world.grants) == len(leases)


def test_what_drains_goes_on_to_drain_while_its_uses_end() -> None:
    """The release of one of its leases makes it the one that was used last."""
    world = World.of(250)
    warm = Warmth(stay_warm_s=300)
    leases = {
        name: [world.lease(ask(f"text:{name}", "text-target", warmth=warm)) for _ in range(2)]
        for name in "ab"
    }
    world.wait(5)
    world.ask(ask("text:c", "text-target", warmth=warm, deadline=100))
    world.wait(6)
    assert world.arbiter.find(key("text:a")).state is State.DRAINING  # type: ignore[union-attr]
    world.release(leases["a"][0])
    world.wait(1)
    states = {one.key.model_key: one.state for one in world.arbiter.snapshot().residents}
    assert states == {"a": State.DRAINING, "b": State.READY}
    world.release(leases["a"][1])
    assert {one.key.model_key for one in world.arbiter.snapshot().residents} == {"b", "c"}


def test_an_urgent_request_rescues_what_drains_for_a_lesser_one() -> None:
    world = World.of(1000)
    world.lease(ask("see:a"))
    batch = world.ask(ask("see:b", priority=RequestPriority.BATCH))
    urgent = world.ask(ask("see:a", priority=RequestPriority.URGENT))
    assert urgent in world.grants
    assert batch not in world.grants


# Fit to the budget.


def test_what_was_unused_longest_goes_to_make_room_not_what_was_loaded_first() -> None:
    world = World.of(250)
    for name in ("a", "b"):
        world.use(ask(f"{name}", MANY))
        world.wait(1)
    world.use(ask("a", MANY))
    world.use(ask("c", MANY))
    assert world.gone == [("b", "fit")]


def test_no_more_goes_than_is_needed() -> None:
    world = World.of(300)
    for name, size in (("small", 50), ("large", 240)):
        world.use(ask(name, MANY, size))
        world.wait(1)
    world.use(ask("new", MANY, 240))
    assert world.gone == [("large", "fit")]


def test_foreign_bytes_count() -> None:
    """S3.29: a training job is seen. The control shows that without it both would fit."""
    for foreign, gone in ((0, []), (100, [("a", "fit")])):
        world = World.of(250)
        world.take(world.arbiter.hold("training", foreign, 0))
        world.use(ask("a", MANY))
        world.use(ask("b", MANY))
        assert world.gone == gone


def test_what_the_machine_has_counts_beside_the_ledger() -> None:
    """S3.13: the budget would allow both, the machine has room for one."""
    world = World.of(1000)
    world.take(world.arbiter.observe(PressureLevel.NOMINAL, 150, 0))
    world.use(ask("a", MANY))
    world.take(world.arbiter.observe(PressureLevel.NOMINAL, 50, 0))
    world.use(ask("b", MANY))
    assert world.gone == [("a", "fit")]


def test_what_fits_beside_a_load_under_way_is_not_refused_for_it() -> None:
    """The machine shows more and more of the load; what is left for others stays the same."""
    world = World.of(240)
    world.loads_by_hand = True
    world.take(world.arbiter.observe(PressureLevel.NOMINAL, 200, 0))
    world.ask(ask("text", "text-target", 120))
    world.take(world.arbiter.observe(PressureLevel.NOMINAL, 136, 25))
    world.now = 25
    world.ask(ask("see", size=60))
    assert world.loading == [key("text"), key("see")]
    world.take(world.arbiter.loaded(key("text"), 120, 47))
    assert world.arbiter.snapshot().free_bytes == 20


def test_text_is_not_taken_to_fit_and_the_refusal_says_what_is_there() -> None:
    world = World.of(250)
    world.use(ask("text", "text-target", 200))
    refused = world.ask(ask("see"))
    error = world.refusals[refused]
    assert isinstance(error, errors.MemoryRefused)
    assert "cannot be evicted" in str(error)
    assert world.resident == {"text"}


def test_a_job_that_asks_for_more_than_there_is_hears_what_helps_a_job() -> None:
    world = World.of(250)
    message = str(world.refusals[world.ask(ask("train", JOB, 300))])
    assert message.endswith("lease less, or give the node a larger budget")


def test_an_opt_in_takes_idle_text_as_a_swap() -> None:
    """(d) The documents promise that vision unloads text, and no path of theirs does it. R3."""
    world = World.of(250)
    held = world.lease(ask("text", "text-target", 200))
    waits = world.ask(ask("see", may_displace_text=True, priority=RequestPriority.HIGH))
    assert waits not in world.grants
    world.release(held)
    assert waits in world.grants
    assert world.gone == [("text", "swap")]


def test_text_is_swapped_for_text() -> None:
    world = World.of(250)
    world.use(ask("text:a", "text-target", 200))
    world.use(ask("text:b", "text-target", 200))
    assert world.gone == [("text", "swap")]


def test_what_has_to_wait_for_others_to_let_go_would_not_be_granted() -> None:
    world = World.of(1000)
    held = world.lease(ask("see:a"))
    assert not world.arbiter.would_grant(ask("see:b"), 0)
    waits = world.ask(ask("see:b"))
    world.release(held)
    assert waits in world.grants
    world.release(waits)
    assert world.arbiter.would_grant(ask("see:a"), 0)


def test_what_equals_use_would_not_be_granted_though_it_is_not_waited_for_yet() -> None:
    """Only after 5 s does it count as more urgent than they are; a drain may then be refused."""
    world = World.of(100)
    held = world.lease(ask("text:a", "text-target", 60, warmth=WARM))
    assert not world.arbiter.would_grant(ask("text:b", "text-target", 60), 0)
    waits = world.ask(ask("text:b", "text-target", 60))
    assert not world.arbiter.would_grant(ask("text:b", "text-target", 60), 0)
    world.take(world.arbiter.withdraw(waits, 0))
    world.release(held)
    assert world.arbiter.would_grant(ask("text:b", "text-target", 60), 0), "in its turn, in 5 s"


def test_what_cannot_ever_fit_is_refused_at_once() -> None:
    world = World.of(250)
    refused = world.ask(ask("see", size=251))
    assert "budget is 250 B" in str(world.refusals[refused])


def test_what_only_others_hold_is_waited_for_and_then_refused_with_a_time() -> None:
    world = World.of(250)
    world.take(world.arbiter.hold("training", 200, 0))
    first = world.ask(ask("see"))
    world.wait(5)
    world.take(world.arbiter.hold("training", 0, world.now))
    assert first in world.grants
    world.release(first)
    world.take(world.arbiter.hold("training", 200, world.now))
    assert world.resident == set(), "more is held than there is, so what idles goes"
    second = world.ask(ask("hear", "asr"))
    world.wait(11)
    error = world.refusals[second]
    assert isinstance(error, errors.MemoryRefused)
    assert error.retry_after_s


def test_a_pinned_model_stays_whatever_comes() -> None:
    """S3.27."""
    world = World.of(250)
    world.use(ask("see:pinned", MANY, warmth=PINNED))
    world.wait(10_000)
    world.use(ask("a", MANY))
    world.use(ask("b", MANY))
    world.take(world.arbiter.observe(PressureLevel.CRITICAL, None, world.now))
    assert world.resident == {"see"}
    swap = World.of(1000)
    swap.use(ask("see:a", warmth=PINNED))
    assert "pinned" in str(swap.refusals[swap.ask(ask("see:b"))])


def test_a_lower_priority_goes_at_once_though_it_is_kept_warm() -> None:
    """R2."""
    world = World.of(150)
    world.use(ask("low", MANY, warmth=WARM, priority=RequestPriority.LOW))
    world.lease(ask("normal", MANY, warmth=WARM))
    assert world.gone == [("low", "fit")]


def test_an_equal_goes_when_it_is_no_longer_kept_warm() -> None:
    world = World.of(150)
    world.use(ask("old", MANY, warmth=Warmth(stay_warm_s=3)))
    waits = world.ask(ask("new", MANY))
    assert waits not in world.grants
    world.wait(6)
    assert waits in world.grants
    assert world.gone == [("old", "fit")]


def test_two_normal_models_do_not_starve_each_other() -> None:
    """(d) Only strictly lower priorities yielded: equals waited until the end of stay-warm."""
    world = World.of(150)
    world.use(ask("a", MANY, warmth=WARM))
    for turn in range(6):
        waits = world.ask(ask("ab"[(turn + 1) % 2], MANY, warmth=WARM))
        world.wait(5.1)
        assert waits in world.grants, turn
        world.release(waits)


def test_one_urgent_use_does_not_protect_an_idle_model_for_ever() -> None:
    """(d) last_priority stuck."""
    world = World.of(150)
    warmth = Warmth(stay_warm_s=10)
    world.use(ask("urgent", MANY, warmth=warmth, priority=RequestPriority.URGENT))
    world.wait(31)
    world.lease(ask("low", MANY, priority=RequestPriority.NORMAL))
    assert world.gone == [("urgent", "fit")]


def test_a_batch_request_passes_a_stream_of_urgent_ones_at_last() -> None:
    """(d) warm promotion without ageing let a cold model starve."""
    world = World.of(150)
    held = world.lease(ask("warm", MANY, priority=RequestPriority.URGENT))
    batch = world.ask(ask("cold", MANY, priority=RequestPriority.BATCH))
    for _ in range(40):
        world.wait(1)
        following = world.ask(ask("warm", MANY, priority=RequestPriority.URGENT))
        world.release(held)
        if following not in world.grants:
            break
        held = following
    assert batch in world.grants
    assert world.now <= 30


def test_room_that_was_made_is_not_robbed() -> None:
    """(d) Freed memory was unreserved during the wait, so that another load could steal it."""
    world = World.of(300)
    held = world.lease(ask("a", MANY, 200))
    big = world.ask(ask("b", MANY, 300, priority=RequestPriority.HIGH))
    thief = world.ask(ask("c", MANY, 100))
    assert thief not in world.grants
    world.release(held)
    assert big in world.grants
    assert thief not in world.grants


def test_equals_are_served_in_the_order_they_came() -> None:
    world = World.of(100)
    held = world.lease(ask("x", MANY))
    waiting = [world.ask(ask(name, MANY)) for name in "abc"]
    order = []
    for _ in waiting:
        world.release(held)
        for _ in range(10):
            if any(lease in world.grants and lease not in order for lease in waiting):
                break
            world.wait(1)
        held = next(one for one in waiting if one in world.grants and one not in order)
        order.append(held)
    assert order == waiting


def test_an_estimate_is_replaced_by_what_was_measured_also_for_the_next_load() -> None:
    """S3.25, R7. (d) Estimates were never corrected."""
    world = World.of(1000)
    world.loads_by_hand = True
    lease = world.ask(ask("see", size=100))
    world.take(world.arbiter.loaded(key("see"), 400, 0))
    seen = world.arbiter.snapshot()
    assert seen.committed_bytes == 400
    assert (seen.residents[0].estimate_bytes, seen.residents[0].measured_bytes) == (100, 400)
    world.release(lease)
    world.take(world.arbiter.unload(key("see"), 0))
    world.ask(ask("see", size=100))
    assert world.arbiter.snapshot().committed_bytes == 400


def test_growth_beyond_the_budget_takes_what_idles() -> None:
    world = World.of(300)
    world.use(ask("idle", MANY))
    world.lease(ask("grows", MANY))
    world.take(world.arbiter.measure(key("grows"), 250, 0))
    assert world.gone == [("idle", "fit")]


def test_a_smaller_budget_takes_what_idles() -> None:
    world = World.of(300)
    world.use(ask("a", MANY))
    world.use(ask("b", "drafter"))
    world.take(world.arbiter.set_budget(150, 0))
    assert world.gone == [("b", "fit")]


# Pressure.


def test_low_takes_the_lowest_role_then_the_next_after_the_cooldown() -> None:
    """S0.24, R5. (d) Low acted once per change of level, so it freed one role only."""
    world = World.of(1000)
    for name in ("asr", "drafter", "vision"):
        world.use(ask(name, name))
    world.take(world.arbiter.observe(PressureLevel.LOW, None, 0))
    assert world.gone == [("drafter", "pressure")]
    world.wait(4.9)
    assert len(world.gone) == 1
    world.wait(5.2)
    assert [name for name, _ in world.gone] == ["drafter", "vision", "asr"]


def test_low_passes_over_what_is_held() -> None:
    """(d) When the lowest role was held, nothing went, and it was reported as reclaimed."""
    world = World.of(1000)
    held = world.lease(ask("drafter", "drafter"))
    world.use(ask("vision"))
    world.take(world.arbiter.observe(PressureLevel.LOW, None, 0))
    assert world.gone == [("vision", "pressure")]
    world.release(held)
    world.wait(5)
    assert [name for name, _ in world.gone] == ["vision", "drafter"]


def test_low_never_takes_text() -> None:
    """(d) It did, when text was the only role."""
    for level in (PressureLevel.LOW, PressureLevel.CRITICAL):
        world = World.of(1000)
        world.use(ask("text", "text-target"))
        world.take(world.arbiter.observe(level, None, 0))
        world.wait(100)
        assert world.resident == {"text"}


def test_critical_takes_every_idle_role_but_text() -> None:
    world = World.of(1000)
    for role in ("text-target", "drafter", "vision", "tts"):
        world.use(ask(role, role))
    held = world.lease(ask("asr", "asr"))
    world.take(world.arbiter.observe(PressureLevel.CRITICAL, None, 0))
    assert world.resident == {"text-target", "asr"}
    assert [name for name, _ in world.gone] == ["drafter", "vision", "tts"]
    world.release(held)
    assert world.resident == {"text-target"}


def test_critical_refuses_loads_but_text_and_says_when_to_ask_again() -> None:
    world = World.of(1000)
    world.take(world.arbiter.observe(PressureLevel.CRITICAL, None, 0))
    error = world.refusals[world.ask(ask("see"))]
    assert "pressure is critical; refusing" in str(error)
    assert isinstance(error, errors.MemoryRefused)
    assert error.retry_after_s == 5.0
    world.lease(ask("text", "text-target"))
    world.take(world.arbiter.observe(PressureLevel.NOMINAL, None, 0))
    world.lease(ask("see"))


def test_critical_does_not_refuse_what_is_there() -> None:
    """(d) It refused models that were resident and in use anyway."""
    world = World.of(1000)
    world.lease(ask("see"))
    world.take(world.arbiter.observe(PressureLevel.CRITICAL, None, 0))
    world.lease(ask("see"))


def test_a_load_that_ends_under_critical_pressure_is_taken_back() -> None:
    """(d) Critical was not looked at again after a long load."""
    world = World.of(1000)
    world.loads_by_hand = True
    waits = world.ask(ask("see"))
    world.take(world.arbiter.observe(PressureLevel.CRITICAL, None, 0))
    world.take(world.arbiter.loaded(key("see"), 100, 0))
    assert isinstance(world.refusals[waits], errors.MemoryRefused)
    assert world.resident == set()


def test_requests_in_the_line_are_refused_when_pressure_becomes_critical() -> None:
    world = World.of(1000)
    world.lease(ask("see:a"))
    waits = world.ask(ask("see:b"))
    world.take(world.arbiter.observe(PressureLevel.CRITICAL, None, 0))
    assert waits in world.refusals
    assert world.arbiter.find(key("see:a")).state is State.READY  # type: ignore[union-attr]


def test_pressure_that_finds_nothing_says_so_and_not_all_the_time() -> None:
    """S0.26, R3: held handles are never dropped; exhaustion is an event of its own."""
    world = World.of(1000)
    world.lease(ask("see"))
    world.take(world.arbiter.observe(PressureLevel.LOW, None, 0))
    world.wait(59)
    assert len(world.exhausted) == 1
    world.wait(2)
    assert len(world.exhausted) == 2
    world.take(world.arbiter.observe(PressureLevel.CRITICAL, None, world.now))
    assert len(world.exhausted) == 3, "worse is news"
    assert world.resident == {"see"}


def test_a_shortage_is_not_one_of_nothing_to_take_right_after_something_was_taken() -> None:
    world = World.of(1000)
    world.use(ask("see"))
    world.take(world.arbiter.observe(PressureLevel.LOW, None, 0))
    assert world.resident == set()
    world.wait(1)
    world.take(world.arbiter.observe(PressureLevel.CRITICAL, None, world.now))
    world.wait(58)
    assert not world.exhausted
    world.wait(2)
    assert len(world.exhausted) == 1, "it lasts, and nothing else is to be had"
    world.take(world.arbiter.observe(PressureLevel.NOMINAL, None, world.now))
    world.take(world.arbiter.observe(PressureLevel.CRITICAL, None, world.now))
    assert len(world.exhausted) == 2, "another shortage, in which nothing was taken"


def _with_pages(world: World, size: int) -> dict[str, Tenant]:
    tenants = {"pages": Tenant(name="pages", rung=Rung.PAGES, held_bytes=size, spare_bytes=size)}
    world.arbiter.report(tenants["pages"])
    return tenants


def test_critical_takes_no_more_pages_than_are_wanted_beside_the_models() -> None:
    world = World.of(1000)
    tenants = _with_pages(world, 500)
    world.use(ask("see", size=100))
    world.take(world.arbiter.observe(PressureLevel.CRITICAL, None, 0, spare_bytes=-150))
    assert world.resident == set()
    assert _carry_out_shrinks(world, tenants) == [("pages", 50)]
    assert (world.plans[-1].asked_bytes, world.plans[-1].short_bytes) == (150, 0)
    world.plans.clear()
    world.take(world.arbiter.settle(1))
    assert not world.plans, "the reading is of before: nothing more is known to be wanted"
    world.take(world.arbiter.observe(PressureLevel.CRITICAL, None, 2, spare_bytes=-30))
    assert _carry_out_shrinks(world, tenants) == [("pages", 30)]


def test_what_is_on_its_way_back_is_not_wanted_again() -> None:
    world = World.of(1000)
    _with_pages(world, 500)
    world.take(world.arbiter.observe(PressureLevel.CRITICAL, None, 0, spare_bytes=-100))
    world.take(world.arbiter.observe(PressureLevel.CRITICAL, None, 1, spare_bytes=-100))
    assert [shrink.bytes for plan in world.plans for shrink in plan.shrink] == [100]
    world.take(world.arbiter.observe(PressureLevel.CRITICAL, None, 2, spare_bytes=-120))
    assert [shrink.bytes for plan in world.plans for shrink in plan.shrink] == [100, 20]
    assert not world.exhausted


def test_a_model_on_its_way_out_is_not_made_up_for_by_pages() -> None:
    world = World.of(1000)
    _with_pages(world, 500)
    world.use(ask("see", size=100))
    (plan,) = world.arbiter.observe(PressureLevel.CRITICAL, None, 0, spare_bytes=-100).plans
    assert (len(plan.evict), plan.shrink) == (1, ())
    assert not world.arbiter.observe(PressureLevel.CRITICAL, None, 1, spare_bytes=-100).plans


def test_low_takes_no_more_than_is_wanted() -> None:
    world = World.of(1 << 30)
    tenants = _with_pages(world, 1 << 29)
    world.use(ask("see"))
    world.take(world.arbiter.observe(PressureLevel.LOW, None, 0, spare_bytes=-1000))
    assert _carry_out_shrinks(world, tenants) == [("pages", 1000)]
    world.plans.clear()
    world.wait(100)
    assert not world.plans
    assert not world.exhausted
    half = tenants["pages"].spare_bytes // 2
    world.take(world.arbiter.observe(PressureLevel.LOW, None, world.now, spare_bytes=-(1 << 29)))
    assert _carry_out_shrinks(world, tenants) == [("pages", half)]


def test_a_model_that_came_back_can_be_taken_again() -> None:
    world = World.of(1000)
    for _ in range(2):
        world.take(world.arbiter.observe(PressureLevel.NOMINAL, None, world.now))
        world.use(ask("see"))
        world.take(world.arbiter.observe(PressureLevel.LOW, None, world.now))
    assert world.gone == [("see", "pressure")] * 2


def test_two_that_overtake_each_other_by_age_come_to_their_limit_both() -> None:
    """Each is first in line for a part of every 5 s only, and neither can ever be served."""
    world = World.of(100)
    world.use(ask("text", "text-target", 55))
    world.arbiter.report(Tenant(name="pages", rung=Rung.PAGES, held_bytes=24))
    low = world.ask(ask("see:b", size=45, priority=RequestPriority.LOW))
    world.wait(1.5)
    normal = world.ask(ask("see:a", size=30))
    behind = world.ask(ask("draft", "drafter", 20, priority=RequestPriority.BATCH))
    world.wait(60)
    assert {low, normal} == set(world.refusals)
    assert behind in world.grants


def test_two_that_wait_in_turns_for_one_that_is_in_use_are_told_so() -> None:
    world = World.of(100)
    world.lease(ask("hear", "asr", 90, priority=RequestPriority.BATCH))
    low = world.ask(ask("a", MANY, 50, priority=RequestPriority.LOW))
    world.wait(1.5)
    normal = world.ask(ask("b", MANY, 50))
    world.wait(60)
    for lease in (low, normal):
        assert isinstance(world.refusals[lease], errors.DrainTimeout)


# Tenants: caches, pages, sessions.


def _carry_out_shrinks(world: World, tenants: dict[str, Tenant]) -> list[tuple[str, int]]:
    done = []
    for plan in world.plans:
        for shrink in plan.shrink:
            tenant = tenants[shrink.name]
            expired = min(tenant.expired_bytes, shrink.bytes)
            after = Tenant(
                name=tenant.name,
                rung=tenant.rung,
                held_bytes=tenant.held_bytes - shrink.bytes,
                expired_bytes=tenant.expired_bytes - expired,
                spare_bytes=tenant.spare_bytes - (shrink.bytes - expired),
            )
            tenants[shrink.name] = after
            world.arbiter.shrunk(shrink, after, world.now)
            done.append((shrink.name, shrink.bytes))
    return done


def test_caches_go_before_pages_before_sessions_before_models() -> None:
    world = World.of(1000)
    tenants = {
        "cache": Tenant(
            name="cache", rung=Rung.CACHE, held_bytes=60, expired_bytes=20, spare_bytes=40
        ),
        "pages": Tenant(name="pages", rung=Rung.PAGES, held_bytes=200, spare_bytes=100),
        "kv": Tenant(name="kv", rung=Rung.SESSIONS, held_bytes=200, spare_bytes=100),
    }
    for tenant in tenants.values():
        world.arbiter.report(tenant)
    world.use(ask("idle", MANY, 300))
    (plan,) = world.arbiter.ask(ask("new", MANY, 400), 0)[1].plans
    assert [(one.name, one.bytes) for one in plan.shrink] == [
        ("cache", 60),
        ("pages", 100),
    ]
    assert plan.evict == ()
    assert world.arbiter.snapshot().committed_bytes == 1000
    (plan,) = world.arbiter.ask(ask("more", MANY, 390), 0)[1].plans
    assert [one.name for one in plan.shrink] == ["kv"]
    assert [one.key.capability for one in plan.evict] == ["idle"]


def test_low_purges_what_expired_and_asks_pages_before_models() -> None:
    world = World.of(1000)
    tenants = {
        "cache": Tenant(
            name="cache", rung=Rung.CACHE, held_bytes=60, expired_bytes=20, spare_bytes=40
        ),
        "pages": Tenant(name="pages", rung=Rung.PAGES, held_bytes=200, spare_bytes=100),
    }
    for tenant in tenants.values():
        world.arbiter.report(tenant)
    world.use(ask("idle", MANY))
    world.take(world.arbiter.observe(PressureLevel.LOW, None, 0))
    assert _carry_out_shrinks(world, tenants) == [("cache", 20), ("pages", 100)]
    world.plans.clear()
    world.wait(5)
    assert world.gone == [("idle", "pressure")]
    world.plans.clear()
    world.take(world.arbiter.observe(PressureLevel.CRITICAL, None, world.now))
    assert _carry_out_shrinks(world, tenants) == [("cache", 40)], "critical empties live caches"


def test_a_tenant_that_gives_less_than_it_offers_is_not_asked_for_ever() -> None:
    world = World.of(300)
    stubborn = Tenant(name="pages", rung=Rung.PAGES, held_bytes=200, spare_bytes=200)
    world.arbiter.report(stubborn)
    lease, outcome = world.arbiter.ask(ask("see", size=250), 0)
    (plan,) = outcome.plans
    for shrink in plan.shrink:
        world.arbiter.shrunk(shrink, stubborn, 0)
    goes_on, outcome = world.arbiter.begin_load(plan, 0)
    assert (goes_on, outcome.plans) == (False, ())
    world.wait(11)
    assert isinstance(world.refusals[lease], errors.MemoryRefused)


def test_room_that_is_not_given_after_all_is_not_reserved_any_longer() -> None:
    """A load waits for another model to leave, and for a tenant that gives nothing. Until that
    model has left, nobody sees more committed than the budget holds."""
    world = World.of(300)
    pages = Tenant(name="pages", rung=Rung.PAGES, held_bytes=20, spare_bytes=20)
    world.arbiter.report(pages)
    world.use(ask("idle", MANY, 100))
    lease, outcome = world.arbiter.ask(ask("job", MANY, 300), 0)
    (plan,) = outcome.plans
    assert [one.key.capability for one in plan.evict] == ["idle"]
    (shrink,) = plan.shrink
    assert world.arbiter.shrunk(shrink, pages, 0).plans == ()
    seen = world.arbiter.snapshot()
    assert (seen.committed_bytes, seen.waiting) == (20, (key("job"),))
    world.take(world.arbiter.unloaded(key("idle"), 0))
    goes_on, outcome = world.arbiter.begin_load(plan, 0)
    assert (goes_on, outcome.plans) == (False, ())
    world.wait(11)
    assert isinstance(world.refusals[lease], errors.MemoryRefused)


def test_who_is_least_urgent_gives_room_back_that_is_not_given() -> None:
    world = World.of(300)
    pages = Tenant(name="pages", rung=Rung.PAGES, held_bytes=300, spare_bytes=300)
    world.arbiter.report(pages)
    urgent = ask("urgent", MANY, 100, priority=RequestPriority.URGENT)
    plans = [
        *world.arbiter.ask(ask("early", MANY, 100), 0)[1].plans,
        *world.arbiter.ask(urgent, 0)[1].plans,
        *world.arbiter.ask(ask("late", MANY, 100), 0)[1].plans,
    ]
    for given, plan in zip((100, 100, 20), plans, strict=True):
        (shrink,) = plan.shrink
        left = pages.held_bytes - given
        pages = Tenant(name="pages", rung=Rung.PAGES, held_bytes=left, spare_bytes=left)
        world.arbiter.shrunk(shrink, pages, 0)
    assert [world.arbiter.begin_load(plan, 0)[0] for plan in plans] == [True, True, False]
    assert world.arbiter.snapshot().waiting == (key("early"), key("urgent"), key("late"))


def test_a_plan_that_was_taken_back_does_not_begin_in_place_of_the_next_one() -> None:
    """Of one model: the first plan's room was not given, the second one's is still being made."""
    world = World.of(100)
    pages = Tenant(name="pages", rung=Rung.PAGES, held_bytes=50, spare_bytes=50)
    world.arbiter.report(pages)
    (first,) = world.arbiter.ask(ask("see", size=100), 0)[1].plans
    world.arbiter.shrunk(first.shrink[0], pages, 0)
    pages = Tenant(name="pages", rung=Rung.PAGES, held_bytes=40, spare_bytes=40)
    world.arbiter.report(pages)  # it could give after all
    (second,) = world.arbiter.settle(0).plans
    assert world.arbiter.begin_load(first, 0) == (False, ArbiterOutcome())
    world.arbiter.shrunk(second.shrink[0], Tenant(name="pages", rung=Rung.PAGES, held_bytes=0), 0)
    assert world.arbiter.begin_load(second, 0)[0]


def test_what_is_only_promised_is_nobodys_to_grow_into() -> None:
    world = World.of(100)
    world.arbiter.report(Tenant(name="pages", rung=Rung.PAGES, held_bytes=90, spare_bytes=90))
    lease, outcome = world.arbiter.ask(ask("see", size=40), 0)
    assert [one.bytes for plan in outcome.plans for one in plan.shrink] == [30]
    world.arbiter.withdraw(lease, 0)
    assert world.arbiter.begin_load(outcome.plans[0], 0) == (False, ArbiterOutcome())
    seen = world.arbiter.snapshot()
    assert (seen.free_bytes, seen.promised_bytes, seen.spare_bytes) == (40, 30, 10)
    assert not world.arbiter.may_grow("pages", 11)
    assert world.arbiter.may_grow("pages", 10)


# Preload, idle eviction, unloading, the end.


def test_preload_only_takes_room_that_is_free_in_calm() -> None:
    """R10."""
    world = World.of(250)
    taken, outcome = world.arbiter.preload(ask("see"), 0)
    world.take(outcome)
    assert taken
    assert world.resident == {"see"}
    assert world.arbiter.preload(ask("see"), 1)[0], "it is there already"
    assert not world.arbiter.preload(ask("see:b"), 0)[0], "its role is taken"
    assert not world.arbiter.preload(ask("big", "asr", 200), 0)[0], "it would evict"
    assert not world.arbiter.preload(ask("unknown", "asr", 0), 0)[0], "nobody knows its size"
    world.take(world.arbiter.observe(PressureLevel.LOW, None, 0))
    assert not world.arbiter.preload(ask("hear", "asr"), 0)[0], "memory is low"
    for level in (PressureLevel.LOW, PressureLevel.CRITICAL):
        world.take(world.arbiter.observe(level, None, 0))
        assert not world.arbiter.preload(ask("text", "text-target"), 0)[0], "text can wait, too"


def test_what_nobody_needs_takes_no_room_that_would_make_pressure() -> None:
    """It would be taken back at once, again and again."""
    world = World.of(1000)
    world.arbiter.report(Tenant(name="pages", rung=Rung.PAGES, held_bytes=0))
    world.take(world.arbiter.observe(PressureLevel.NOMINAL, 500, 0, spare_bytes=250))
    assert not world.arbiter.may_grow("pages", 251)
    assert world.arbiter.may_grow("pages", 100)
    assert not world.arbiter.may_grow("pages", 151)
    world.take(world.arbiter.grown("pages", 0))
    assert not world.arbiter.preload(ask("draft", "drafter", 251), 0)[0]
    assert world.arbiter.preload(ask("draft", "drafter", 100), 0)[0]
    assert not world.arbiter.preload(ask("see", size=151), 0)[0]
    assert world.arbiter.preload(ask("text", "text-target", 300), 0)[0], "text is what it is for"
    world.take(world.arbiter.observe(PressureLevel.NOMINAL, 500, 0))
    assert world.arbiter.may_grow("pages", 90)


def test_what_is_asked_for_may_make_pressure_low() -> None:
    world = World.of(1000)
    world.take(world.arbiter.observe(PressureLevel.NOMINAL, 500, 0, spare_bytes=50))
    world.lease(ask("see", size=400))


def test_an_idle_model_leaves_after_its_time_counted_from_the_end_of_its_last_use() -> None:
    """(d) S0.13 promises idle eviction, and there was none."""
    world = World.of(1000)
    wish = ask("see", warmth=Warmth(stay_warm_s=10, unload_after_s=60))
    lease = world.lease(wish)
    world.wait(100)
    world.release(lease)
    world.wait(59)
    world.use(wish)
    world.wait(59)
    assert world.resident == {"see"}
    world.wait(1)
    assert world.gone == [("see", "idle")]


def test_without_a_time_an_idle_model_stays() -> None:
    world = World.of(1000)
    world.use(ask("see"))
    world.wait(1e6)
    assert world.resident == {"see"}


def test_unloading_by_hand_is_refused_while_in_use() -> None:
    world = World.of(1000)
    lease = world.lease(ask("see"))
    with pytest.raises(errors.Conflict, match="1 leases"):
        world.arbiter.unload(key("see"), 0)
    world.release(lease)
    world.take(world.arbiter.unload(key("see"), 0))
    assert world.gone == [("see", "release")]
    with pytest.raises(errors.NotFound):
        world.arbiter.unload(key("see"), 0)


def test_the_end_refuses_who_waits_and_comes_and_takes_all_that_idles() -> None:
    world = World.of(1000)
    world.use(ask("text", "text-target"))
    world.use(ask("pinned", "asr", warmth=PINNED))
    held = world.lease(ask("see:a"))
    waits = world.ask(ask("see:b"))
    world.take(world.arbiter.stop(0))
    assert "shutting down" in str(world.refusals[waits])
    assert "shutting down" in str(world.refusals[world.ask(ask("see:a"))])
    world.take(world.arbiter.clear(0))
    assert world.resident == {"see"}
    world.release(held)
    world.take(world.arbiter.clear(0))
    assert world.resident == set()


def test_a_load_that_ends_after_the_stop_is_taken_back() -> None:
    """(d) A load finishing after shutdown leaked."""
    world = World.of(1000)
    world.loads_by_hand = True
    waits = world.ask(ask("see"))
    world.take(world.arbiter.stop(0))
    assert waits in world.refusals
    world.take(world.arbiter.loaded(key("see"), 100, 0))
    world.take(world.arbiter.clear(0))
    assert world.resident == set()
