"""How figures are written for people."""

from __future__ import annotations

from kakeya.core.units import ordinal, printable


def test_places_in_a_line_are_written_as_people_do() -> None:
    places = {
        1: "1st",
        2: "2nd",
        3: "3rd",
        4: "4th",
        11: "11th",
        12: "12th",
        21: "21st",
        113: "113th",
    }
    assert {place: ordinal(place) for place in places} == places


def test_what_a_peer_said_moves_no_cursor() -> None:
    assert printable("caf\u00e9 \x1b[2J\r\n\u202e") == "caf\u00e9 ?[2J???"
