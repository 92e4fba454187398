from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kakeya.dispatch.watch.sections import AGE_STEPS_S, changed, sections_of

SECTIONS = st.dictionaries(st.sampled_from("abcd"), st.integers(0, 3), max_size=4)


def test_what_only_ages_does_not_change() -> None:
    def status(age_s: float, free: int) -> dict[str, object]:
        return {
            "node": {"uptime_s": age_s, "label": "mini-1"},
            "memory": {"available_bytes": free, "last_evictions": [{"why": "x", "age_s": age_s}]},
            "rings": {"led": [{"name": "big", "seconds": age_s}]},
            "fleet": {"gossip": {"rounds": age_s}, "nodes": [{"skew_s": age_s / 100}]},
        }

    before = sections_of(status(31.0, 8_000_000_000))
    assert changed(before, sections_of(status(59.9, 8_010_000_000))) == {}
    assert before["node"] == {"uptime_s": 30, "label": "mini-1"}
    assert changed(before, sections_of(status(60.0, 8_000_000_000))).keys() == {
        "node",
        "memory",
        "rings",
    }


@given(st.floats(0, 1e7))
def test_an_age_is_told_as_a_step_that_it_has_passed(age_s: float) -> None:
    told = sections_of({"one": {"age_s": age_s}})["one"]
    assert isinstance(told, dict)
    assert told["age_s"] in AGE_STEPS_S
    assert told["age_s"] <= age_s


@given(SECTIONS, SECTIONS)
def test_changes_lead_from_one_state_to_the_other(before, after) -> None:
    """What a page does with them: a section that is gone is None."""
    merged = {**before, **changed(before, after)}
    assert {name: one for name, one in merged.items() if one is not None} == after
