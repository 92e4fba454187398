from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kakeya.adapters.batch import AGE_S, MAX_ROWS, AdapterBatch, BatchFormer
from kakeya.core.errors import InvalidArgument
from tests.laws import laws_of

KEYS = ("a", "b", "c", "d", "e")


def filled(**waiting: int) -> BatchFormer[int]:
    former: BatchFormer[int] = BatchFormer()
    for key, count in waiting.items():
        for number in range(count):
            former.add(key, number, 0.0)
    return former


def keys(batch: AdapterBatch[int]) -> list[str]:
    return list(dict.fromkeys(key for key, _ in batch.rows))


def test_the_busiest_adapter_goes_first_and_the_rest_waits() -> None:
    former = filled(a=2, b=5, here=3, c=1)
    batch = former.form(0.0, places=1, resident={"here"})
    assert keys(batch) == ["b", "here"]
    assert Counter(key for key, _ in batch.rows) == {"b": 5, "here": 3}
    assert former.order(0.0) == ("a", "c")
    assert len(former) == 3


def test_what_is_in_a_slot_takes_no_place() -> None:
    batch = filled(a=1, b=2, c=3).form(0.0, places=0, resident={"a", "b"})
    assert keys(batch) == ["b", "a"]


def test_a_batch_is_capped_and_keeps_the_order_within_an_adapter() -> None:
    former = filled(a=MAX_ROWS + 44)
    assert former.form(0.0, places=1).rows == tuple(("a", n) for n in range(MAX_ROWS))
    assert former.form(0.0, places=1).rows == tuple(
        ("a", n) for n in range(MAX_ROWS, MAX_ROWS + 44)
    )
    assert former.order(0.0) == ()


def test_a_rare_adapter_overtakes_a_busy_one_that_came_later() -> None:
    former: BatchFormer[str] = BatchFormer()
    former.add("rare", "it", 0.0)
    for number in range(300):
        former.add("busy", f"{number}", AGE_S)
    assert former.order(AGE_S - 0.1)[0] == "busy"
    assert former.order(AGE_S)[0] == "rare"


def test_who_comes_back_keeps_the_place_and_the_age() -> None:
    former = filled(a=3)
    back = [number for _, number in former.form(0.0, places=1).rows]
    former.add("a", 9, AGE_S)
    for number in back:
        former.add("a", number, 0.0)
    assert former.oldest() == 0.0
    former.add("b", 4, AGE_S - 0.1)
    assert former.order(AGE_S)[0] == "a"
    assert [number for _, number in former.form(AGE_S, places=1).rows] == [0, 1, 2, 9]


def test_who_left_is_not_served_and_leaves_no_empty_key() -> None:
    former: BatchFormer[object] = BatchFormer()
    stays, leaves = object(), object()
    former.add("a", leaves, 0.0)
    former.add("b", stays, 0.0)
    assert former.remove("a", leaves)
    assert not former.remove("a", leaves)
    assert former.order(0.0) == ("b",)
    assert former.form(0.0, places=9).rows == (("b", stays),)


def test_a_batch_of_nothing_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="0 rows"):
        BatchFormer(max_rows=0)


class Line(RuleBasedStateMachine):
    """Whatever happens, each request is in one place, batches are capped, keys are not empty."""

    def __init__(self) -> None:
        super().__init__()
        self.former: BatchFormer[int] = BatchFormer(max_rows=4, age_s=1.0)
        self.now = 0.0
        self.waiting: dict[int, str] = {}
        self.came: dict[int, float] = {}
        self.added = 0

    @rule(key=st.sampled_from(KEYS), pause=st.floats(0, 0.7))
    def add(self, key: str, pause: float) -> None:
        self.now += pause
        self.former.add(key, self.added, self.now)
        self.waiting[self.added] = key
        self.came[self.added] = self.now
        self.added += 1

    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        if self.waiting:
            number = data.draw(st.sampled_from(sorted(self.waiting)))
            assert self.former.remove(self.waiting.pop(number), number)

    @rule(
        places=st.integers(0, 3),
        resident=st.sets(st.sampled_from(KEYS)),
        pause=st.floats(0, 2),
        comes_back=st.booleans(),
    )
    def form(self, places: int, resident: set[str], pause: float, comes_back: bool) -> None:
        self.now += pause
        batch = self.former.form(self.now, places=places, resident=resident)
        assert len(batch.rows) <= 4
        assert len(set(keys(batch)) - resident) <= places
        for key, number in batch.rows:
            assert self.waiting.pop(number) == key  # once, and under its own key
        if len(batch.rows) < 4 and places >= len(KEYS):
            assert not self.waiting
        for key, number in batch.rows if comes_back else ():
            self.former.add(key, number, self.came[number])
            self.waiting[number] = key

    @invariant()
    def nothing_is_lost_and_no_key_is_empty(self) -> None:
        assert len(self.former) == len(self.waiting)
        assert set(self.former.order(self.now)) == set(self.waiting.values())
        assert self.former.oldest() == min(map(self.came.__getitem__, self.waiting), default=None)
        for but in KEYS:
            others = (self.came[one] for one, key in self.waiting.items() if key != but)
            assert self.former.oldest(but=but) == min(others, default=None)


TestLine = laws_of(Line, cases=80, part=4)


@settings(max_examples=60, deadline=None)
@given(
    arrivals=st.lists(
        st.lists(st.tuples(st.sampled_from(KEYS[:-1]), st.integers(1, 9)), max_size=3), max_size=40
    ),
    age_s=st.floats(0.5, 5.0),
)
def test_nobody_is_passed_over_for_ever(
    arrivals: list[list[tuple[str, int]]], age_s: float
) -> None:
    """One request of its own adapter, among any others, with one row served in each second.

    What came before it, or within `age_s` (and the rounding of it) after it, may be served first;
    nothing else.
    """
    former: BatchFormer[str] = BatchFormer(max_rows=1, age_s=age_s)
    before = 0
    at_s, is_served = float(len(arrivals) // 2), False
    served = 0
    for second in range(1000):
        now = float(second)
        for key, count in arrivals[second] if second < len(arrivals) else ():
            for _ in range(count):
                former.add(key, "other", now)
            before += count if now < at_s + age_s + 1.0 else 0
        if now == at_s:
            former.add("e", "mine", now)
        batch = former.form(now, places=1)
        if ("e", "mine") in batch.rows:
            is_served = True
            break
        served += len(batch.rows)
    assert is_served
    assert served <= before
