"""The registry: merge laws, the own card, expiry, memory, limits (S4.7 to S4.10, S4.27)."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kakeya.core.errors import InvalidArgument
from kakeya.fleet.cards.cards import CardFault, Offer
from kakeya.fleet.view.registry import REMEMBER_S, CapabilityRegistry
from kakeya.v1 import distributed_pb2 as pb
from tests.fleet.nodes import NOW, at, make_registry, make_wire, verifier
from tests.laws import law

wires = st.builds(
    make_wire,
    st.sampled_from(["a", "b", "c", "d", ""]),
    at=st.sampled_from([NOW, NOW - 1, NOW - 121, NOW + 61, math.nan, math.inf, NOW + 59.5]),
    incarnation=st.sampled_from([0, 1, 2]),
    platform=st.sampled_from(["", "x", "y"]),
    address=st.sampled_from(["h:1", "h:2"]),
    ttl_s=st.sampled_from([120.0, 10.0, 0.0]),
) | st.binary(max_size=6)


def _view(registry: CapabilityRegistry) -> list[bytes]:
    return [card.wire for card in registry.snapshot(mono=0)]


# --- laws of the merge


@given(batch=st.lists(wires, max_size=25), seed=st.integers(0, 2**16))
@law(2500, part=15)
def test_merges_commute_associate_and_repeat_without_effect(batch: list[bytes], seed: int) -> None:
    """RELIABILITY row 16: any order, split and repetition, ties included, gives one view."""
    straight = make_registry()
    straight.merge(batch, **at(NOW))
    rng = random.Random(seed)
    shuffled = batch + rng.choices(batch, k=len(batch)) if batch else []
    rng.shuffle(shuffled)
    split = make_registry()
    while shuffled:
        step = rng.randint(1, 5)
        split.merge(shuffled[:step], **at(NOW))
        del shuffled[:step]
    assert _view(split) == _view(straight)
    assert split.merge(_view(straight), **at(NOW)).changed == ()


@given(batch=st.lists(wires, max_size=25))
@law(500)
def test_views_hold_valid_cards_only_and_the_own_card_first(batch: list[bytes]) -> None:
    registry = make_registry()
    own = registry.own.wire
    registry.merge(batch, **at(NOW))
    me, *peers = registry.snapshot(mono=0)
    assert me.wire == own
    assert [card.node_id for card in peers] == sorted(card.node_id for card in peers)
    assert all(not card.is_expired(NOW) and math.isfinite(card.announced_at) for card in peers)


@given(left=st.lists(wires, max_size=12), middle=st.lists(wires, max_size=12), last=st.lists(wires))
@law(300)
def test_replicas_that_exchange_views_agree(
    left: list[bytes], middle: list[bytes], last: list[bytes]
) -> None:
    replicas = [make_registry(f"r{i}") for i in range(3)]
    for replica, batch in zip(replicas, (left, middle, last), strict=True):
        replica.merge(batch, **at(NOW))
    for _ in range(2):
        for one in replicas:
            for other in replicas:
                if one is not other:
                    one.merge(_view(other), **at(NOW))
    assert len({frozenset(_view(replica)) for replica in replicas}) == 1


def test_two_hundred_cards_with_equal_stamps_give_one_view_in_any_order() -> None:
    cards = [make_wire(f"n{i % 40}", platform=str(i), at=NOW) for i in range(200)]
    views = set()
    for seed in range(50):
        random.Random(seed).shuffle(cards)
        registry = make_registry()
        registry.merge(cards, **at(NOW))
        views.add(tuple(_view(registry)))
    assert len(views) == 1


def test_merge_is_last_writer_wins() -> None:
    registry = make_registry()
    registry.merge([make_wire(at=NOW, platform="old")], **at(NOW))
    report = registry.merge([make_wire(at=NOW + 1, platform="new")], **at(NOW))
    assert report.changed == ("peer",)
    assert registry.merge([make_wire(at=NOW, platform="old")], **at(NOW)).changed == ()
    assert registry.get("peer", mono=0).platform == "new"


def test_a_restarted_owner_with_an_older_clock_wins_by_its_incarnation() -> None:
    registry = make_registry()
    registry.merge([make_wire(at=NOW, incarnation=4)], **at(NOW))
    registry.merge([make_wire(at=NOW - 50, incarnation=5, platform="new life")], **at(NOW))
    assert registry.get("peer", mono=0).platform == "new life"


def test_merge_counts_the_changed() -> None:
    registry = make_registry()
    report = registry.merge([make_wire("a"), make_wire("b"), make_wire("a")], **at(NOW))
    assert report.changed == ("a", "b")
    assert report.dropped == {}


# --- poisoned batches


def _typed(**fields: object) -> bytes:
    good = {"node_id": "bad", "announced_at_unix": NOW, "ttl_seconds": 120.0}
    return pb.NodeCapability(**(good | fields)).SerializeToString()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("bad", "fault"),
    [
        (_typed(announced_at_unix=math.nan), CardFault.BAD_STAMP),
        (_typed(announced_at_unix=math.inf), CardFault.BAD_STAMP),
        (_typed(announced_at_unix=-math.inf), CardFault.BAD_STAMP),
        (_typed(announced_at_unix=NOW + 1e9), CardFault.FUTURE),
        (_typed(ttl_seconds=math.nan), CardFault.BAD_TTL),
        (_typed(ttl_seconds=math.inf), CardFault.BAD_TTL),
        (_typed(ttl_seconds=-math.inf), CardFault.BAD_TTL),
        (_typed(node_id=""), CardFault.BAD_ID),
        (_typed(node_id="x" * 300), CardFault.BAD_ID),
        (_typed(node_id="../x"), CardFault.BAD_ID),
        (b"\x0a\x03\xff\xfe\xfd", CardFault.MALFORMED),
        (_typed(platform="x" * 9 * 1024), CardFault.OVERSIZE),
    ],
)
def test_one_bad_card_costs_only_itself(bad: bytes, fault: CardFault) -> None:
    """RELIABILITY row 17: 99 good cards around each kind of bad one."""
    registry = make_registry()
    cards = [make_wire(f"n{i}") for i in range(99)]
    report = registry.merge([*cards[:50], bad, *cards[50:]], **at(NOW))
    assert len(report.changed) == 99
    assert report.dropped == {fault: 1}
    assert len(registry.snapshot(mono=0)) == 100


@pytest.mark.parametrize(
    ("ttl_s", "kept_s", "clamped"),
    [
        (0, 10, 1),
        (-5, 10, 1),
        (9.9, 10, 1),
        (10, 10, 0),
        (600, 600, 0),
        (601, 600, 1),
        (1e9, 600, 1),
    ],
)
def test_a_ttl_out_of_bounds_is_moved_into_them_and_counted(
    ttl_s: float, kept_s: float, clamped: int
) -> None:
    registry, wire = make_registry(), _typed(ttl_seconds=ttl_s)
    report = registry.merge([wire], **at(NOW))
    assert (report.changed, report.dropped, report.clamped) == (("bad",), {}, clamped)
    assert registry.merge([wire], **at(NOW + 1)).clamped == 0
    card = registry.get("bad", mono=0)
    assert card is not None
    assert (card.ttl_s, card.wire) == (kept_s, wire)
    assert registry.get("bad", mono=kept_s) is not None
    assert registry.get("bad", mono=kept_s + 0.1) is None


@pytest.mark.parametrize("ttl_s", [0.0, 9.9, 600.1, math.nan, math.inf])
def test_an_own_offer_with_a_ttl_out_of_bounds_is_refused(ttl_s: float) -> None:
    registry = make_registry()
    with pytest.raises(InvalidArgument, match="bad_ttl"):
        registry.announce(replace(registry.offer, ttl_s=ttl_s), **at(NOW))


def test_an_unknown_role_is_kept_and_ignored() -> None:
    wire = _typed(models=[pb.ModelCapability(model_id="m", role=99)])  # type: ignore[arg-type]
    registry = make_registry()
    assert registry.merge([wire], **at(NOW)).changed == ("bad",)
    card = registry.get("bad", mono=0)
    assert card.wire == wire
    assert card.offers(1) == card.offers(2) == ()


def test_at_the_limit_strangers_are_refused_and_members_are_renewed() -> None:
    registry = make_registry(limit=4)
    registry.merge([make_wire(name) for name in "abc"], **at(NOW))
    report = registry.merge([make_wire("d"), make_wire("a", at=NOW + 1)], **at(NOW))
    assert report.dropped == {CardFault.REGISTRY_FULL: 1}
    assert report.changed == ("a",)
    registry.expire(**at(NOW + 120.5))
    assert registry.merge([make_wire("d", at=NOW + 121)], **at(NOW + 121)).changed == ("d",)


# --- the own card


def test_never_overwrites_own_card() -> None:
    registry = make_registry()
    registry.merge([make_wire("me", at=NOW + 30, incarnation=9, platform="not me")], **at(NOW))
    own = registry.own
    assert (own.platform, own.incarnation) == ("", 10)
    assert registry.snapshot(mono=0)[0] == own
    assert registry.get("me", mono=0) == own


def test_the_own_card_is_there_from_the_start_and_never_expires() -> None:
    registry = make_registry()
    assert registry.own.announced_at == NOW
    assert registry.get("me", mono=1e6) == registry.own
    assert registry.snapshot(mono=1e6) == (registry.own,)


def test_own_stamps_only_grow_and_keep_pace_when_the_wall_clock_is_set_back() -> None:
    registry = make_registry(now=NOW, mono=100.0)
    first = registry.restamp(now=NOW, mono=100.0).announced_at
    assert first > NOW
    back = registry.restamp(now=NOW - 3600, mono=130.0).announced_at
    assert back == pytest.approx(NOW + 30, abs=0.1)
    assert registry.restamp(now=NOW + 99, mono=131.0).announced_at == NOW + 99


def test_an_earlier_life_with_a_later_stamp_is_jumped_above() -> None:
    """RELIABILITY row 15: state lost, clock an hour back; peers must take the new card."""
    late = NOW - 3600
    registry = make_registry(now=late, incarnation=1)
    earlier = make_wire("me", at=NOW, incarnation=7, address="me:50051")
    report = registry.merge([earlier], now=late, mono=0.0)
    assert report.has_jumped
    assert report.conflicts == ()
    assert registry.incarnation == 8
    own = registry.restamp(now=late, mono=1.0)
    peer = make_registry("peer")
    peer.merge([earlier], **at(NOW))
    assert peer.merge([own.wire], **at(NOW)).changed == ("me",)
    assert not peer.get("me", mono=30).is_expired(NOW + 30)


def test_an_echo_of_this_life_changes_nothing() -> None:
    registry = make_registry()
    echo = registry.own.wire
    registry.restamp(now=NOW + 1, mono=1.0)
    report = registry.merge([echo], **at(NOW + 1))
    assert (report.has_own, report.has_jumped, report.conflicts) == (True, False, ())
    assert registry.incarnation == 1


def test_another_node_with_our_id_is_a_conflict_and_no_reason_to_jump() -> None:
    registry = make_registry(now=NOW)
    report = registry.merge(
        [make_wire("me", at=NOW + 5, incarnation=3, address="x:1")], **at(NOW + 5)
    )
    assert report.conflicts == ("x:1",)
    assert not report.has_jumped
    assert registry.incarnation == 1


def test_an_earlier_life_at_another_address_is_no_conflict() -> None:
    registry = make_registry(now=NOW, incarnation=1)
    report = registry.merge([make_wire("me", at=NOW - 5, incarnation=3, address="x:1")], **at(NOW))
    assert report.conflicts == ()
    assert registry.incarnation == 4


@pytest.mark.parametrize("stamp", [math.nan, math.inf, -math.inf, 1e300])
def test_absurd_cards_with_our_id_do_not_move_our_stamp(stamp: float) -> None:
    registry = make_registry()
    registry.merge([make_wire("me", at=stamp, incarnation=2**60, address="me:50051")], **at(NOW))
    registry.merge([make_wire("me", at=stamp, incarnation=3, address="me:50051")], **at(NOW))
    assert registry.restamp(now=NOW + 10, mono=1.0).announced_at == NOW + 10


def test_stamps_that_ran_ahead_begin_anew_once_peers_refuse_them() -> None:
    """RELIABILITY row 11: the clock was a year ahead and has been repaired."""
    registry = make_registry(now=NOW + 3e7)
    assert registry.restamp(now=NOW, mono=5.0).announced_at > NOW + 3e7
    assert registry.accept_refusal(now=NOW, mono=6.0)
    assert registry.own.announced_at == NOW
    assert registry.own.incarnation == 2
    assert not registry.accept_refusal(now=NOW, mono=7.0)


def test_announce_replaces_what_is_offered() -> None:
    registry = make_registry()
    offer = Offer(grpc_address="me:50051", models=(verifier("m", 12.0),))
    card = registry.announce(offer, now=NOW + 1, mono=1.0)
    assert registry.own == card
    assert card.models == (verifier("m", 12.0),)
    assert registry.offer == offer


def test_a_farewell_has_no_models_and_is_gone_in_ten_seconds() -> None:
    registry = make_registry(models=[verifier("m")])
    card = registry.farewell(now=NOW + 1, mono=1.0)
    peer = make_registry("peer")
    peer.merge([card.wire], **at(NOW + 1))
    assert peer.get("me", mono=11).models == ()
    assert peer.get("me", mono=11.1) is None


@pytest.mark.parametrize("node_id", ["", "a/b", "x" * 257, "a\x00", "\udcff"])
def test_a_bad_own_id_is_refused(node_id: str) -> None:
    with pytest.raises(InvalidArgument, match="node id"):
        make_registry(node_id)


@pytest.mark.parametrize("ttl_s", [0.0, -1.0, 9.9, 601.0, math.nan])
def test_a_bad_own_ttl_is_refused(ttl_s: float) -> None:
    with pytest.raises(InvalidArgument, match="bad_ttl"):
        CapabilityRegistry("me", Offer(ttl_s=ttl_s), now=NOW, mono=0.0)


def test_an_offer_that_peers_would_drop_is_refused_and_changes_nothing() -> None:
    registry = make_registry()
    own = registry.own
    with pytest.raises(InvalidArgument, match="oversize"):
        registry.announce(Offer(platform="x" * 9000), now=NOW + 1, mono=1.0)
    assert registry.own == own


# --- expiry and memory


def test_queries_change_nothing_and_never_show_the_expired() -> None:
    registry = make_registry()
    registry.merge([make_wire("a", ttl_s=10), make_wire("b")], **at(NOW))
    assert [card.node_id for card in registry.snapshot(mono=10)] == ["me", "a", "b"]
    assert [card.node_id for card in registry.snapshot(mono=10.5)] == ["me", "b"]
    assert registry.get("a", mono=10.5) is None
    assert len(registry) == 3
    assert registry.get("a", mono=10) is not None


def test_expired_cards_are_not_merged() -> None:
    registry = make_registry()
    assert registry.merge([make_wire(at=NOW - 121)], **at(NOW)).dropped == {CardFault.EXPIRED: 1}


def test_expire_drops_and_remembers_the_address_for_a_day() -> None:
    registry = make_registry()
    registry.merge([make_wire("a", address="10.0.0.1:5")], **at(NOW))
    gone_at = NOW + 121
    assert registry.expire(**at(gone_at)) == ("a",)
    assert registry.expire(**at(gone_at)) == ()
    assert len(registry.snapshot(mono=gone_at - NOW)) == 1
    assert registry.remembered_addresses(NOW + REMEMBER_S) == ("10.0.0.1:5",)
    assert registry.remembered_addresses(NOW + REMEMBER_S + 1) == ()
    registry.expire(**at(NOW + REMEMBER_S + 1))
    assert registry.remembered_addresses(gone_at) == ()


def test_a_peer_that_returns_is_no_longer_remembered_as_lost() -> None:
    registry = make_registry()
    registry.merge([make_wire("a")], **at(NOW))
    registry.expire(**at(NOW + 121))
    registry.merge([make_wire("a", at=NOW + 121)], **at(NOW + 121))
    assert registry.remembered_addresses(NOW + 121) == ()
    assert registry.get("a", mono=121) is not None


def test_addresses_that_cannot_be_dialled_are_no_targets() -> None:
    registry = make_registry()
    registry.merge(
        [make_wire("a", address="unix:/tmp/x"), make_wire("b", address="b:1")], **at(NOW)
    )
    registry.expire(**at(NOW + 121))
    assert registry.remembered_addresses(NOW + 121) == ("b:1",)


# --- suspicion


def test_a_failed_peer_is_suspect_by_id_and_by_address() -> None:
    registry = make_registry()
    registry.merge([make_wire("a", address="a:1")], **at(NOW))
    registry.mark_failed("a", mono=0)
    assert registry.is_suspect("a")
    assert registry.is_suspect("a:1")
    assert registry.suspects() == {"a"}
    registry.mark_alive("a:1")
    assert registry.suspects() == frozenset()


def test_one_missed_deadline_is_forgiven_and_two_in_a_row_are_not() -> None:
    registry = make_registry()
    registry.merge([make_wire("a", address="a:1")], **at(NOW))
    registry.mark_missed("a:1", mono=0)
    registry.mark_alive("a")
    registry.mark_missed("a", mono=0)
    assert not registry.is_suspect("a")
    registry.mark_missed("a:1", mono=0)
    assert registry.is_suspect("a")


def test_only_a_card_stamped_after_the_failure_clears_a_suspect() -> None:
    registry = make_registry()
    registry.merge([make_wire("a", at=NOW)], **at(NOW))
    registry.mark_failed("a", mono=20)
    registry.merge([make_wire("a", at=NOW + 15)], **at(NOW + 21))  # came round a longer way
    assert registry.is_suspect("a")
    registry.merge([make_wire("a", at=NOW + 22)], **at(NOW + 23))
    assert not registry.is_suspect("a")


def test_a_restart_clears_a_suspect_whatever_its_clock_says() -> None:
    registry = make_registry()
    registry.merge([make_wire("a", at=NOW, incarnation=1)], **at(NOW))
    registry.mark_failed("a", mono=20)
    registry.merge([make_wire("a", at=NOW - 30, incarnation=2)], **at(NOW + 21))
    assert not registry.is_suspect("a")


def test_being_asked_who_one_is_makes_a_new_card_only_when_the_stamp_is_old() -> None:
    registry = make_registry("me")
    first = registry.describe(now=NOW, mono=0.0)
    for second in range(1, 60):
        assert registry.describe(now=NOW + second, mono=float(second)) is first
    assert registry.describe(now=NOW + 61, mono=61.0).announced_at == NOW + 61
    plain = make_wire("old", at=NOW + 61, is_plain=True)
    registry.merge([plain], now=NOW + 61, mono=61.0)
    assert registry.describe(now=NOW + 70, mono=70.0).announced_at == NOW + 70
