"""Figures as nested JSON, and counted durations."""

from __future__ import annotations

from enum import StrEnum

from kakeya.core.figures import Durations, as_json, counter, gauge, histogram


class Place(StrEnum):
    DISK = "disk"
    PAGES = "pages"


def test_a_figure_with_a_key_is_in_json_and_one_without_is_not() -> None:
    told = as_json((gauge("waiting", "", 2, "queue.waiting"), counter("waits", "", 3)))
    assert told == {"queue": {"waiting": 2}}


def test_each_label_has_its_path_though_it_has_dots() -> None:
    blocks = gauge("blocks{place}", "", {Place.DISK: 1, Place.PAGES: 2}, "{}.blocks")
    held = gauge("bytes{holder}", "", {"train 0.5": 7}, "held.{}")
    assert as_json((blocks, held)) == {
        "disk": {"blocks": 1},
        "pages": {"blocks": 2},
        "held": {"train 0.5": 7},
    }


def test_labels_without_a_path_stay_out_of_json() -> None:
    events = counter("events{event}", "", {"hit": 1, "late": 2}, {"hit": "hits"})
    assert as_json((events,)) == {"hits": 1}
    assert events.values == {("hit",): 1, ("late",): 2}


def test_a_table_without_values_is_there_and_empty() -> None:
    assert as_json((counter("dropped{fault}", "", dict[str, int](), "dropped.{}"),)) == {
        "dropped": {}
    }


def test_facts_lie_beside_figures() -> None:
    told = as_json((gauge("bytes", "", 5, "pages.bytes"),), {"pages.problem": "", "models": []})
    assert told == {"pages": {"bytes": 5, "problem": ""}, "models": []}


def test_several_labels_are_in_the_order_of_their_names() -> None:
    made = gauge("decodes{model,state}", "Decodes", {("tiny", "running"): 1})
    assert (made.name, made.by) == ("decodes", ("model", "state"))


def test_durations_are_counted_up_to_each_bound() -> None:
    times = Durations((0.1, 1.0))
    for seconds in (0.05, 0.1, 0.5, 9.0):
        times.add(seconds)
    before = times.copy()
    times.add(2.0)
    assert before.buckets() == [("0.1", 2), ("1.0", 3), ("+Inf", 4)]
    assert (before.total, before.sum_s) == (4, 9.65)
    assert as_json((histogram("load_seconds", "", times),)) == {}
