"""The words for what a request waits."""

from __future__ import annotations

import pytest

from kakeya.generation.waiting import RequestWait, WaitReason, WaitTeller


@pytest.mark.parametrize(
    ("wait", "says"),
    [
        (
            RequestWait(reason=WaitReason.MEMORY, model_id="m", position=2, seconds=12.4),
            "2nd for memory, m, about 12 s",
        ),
        (RequestWait(reason=WaitReason.MEMORY, model_id="m", position=1), "1st for memory, m"),
        (
            RequestWait(reason=WaitReason.LOAD, model_id="m", progress="41 %", seconds=3.0),
            "loading m, 41 %, about 3 s",
        ),
        (
            RequestWait(reason=WaitReason.PLACE, model_id="m", position=3, seconds=0.4),
            "3rd for a place, m",
        ),
        (
            RequestWait(reason=WaitReason.PROMPT, model_id="m", seconds=9),
            "reading the prompt, m, about 9 s",
        ),
    ],
)
def test_a_wait_names_its_thing_its_place_and_a_time_that_counts(
    wait: RequestWait, says: str
) -> None:
    assert wait.describe() == says
    assert wait.as_json()["says"] == says


def test_a_teller_asks_the_part_that_has_the_request() -> None:
    teller = WaitTeller(lambda: None)
    assert teller.describe() == ""
    for reason in WaitReason:
        wait = RequestWait(reason=reason, model_id="m", position=1)
        teller.ask = lambda wait=wait: wait
        assert "m" in teller.describe()
