"""The requests in flight that a node tells of, where a prompt like theirs is to be routed."""

from __future__ import annotations

from collections.abc import Sequence

from kakeya.backends.prompts_in_flight import PromptsInFlight
from kakeya.generation.continuation import Continuation
from kakeya.generation.facts import PromptsAlike
from kakeya.generation.frames import Tokens
from kakeya.generation.request import DecodeRequest


class Generation:
    """One in flight."""

    def __init__(self, prompts: PromptsInFlight, token_ids: Sequence[int]) -> None:
        self.is_held = True
        self.job = Continuation(DecodeRequest(token_ids=token_ids, max_tokens=9), 0.0)
        prompts.add(self, token_ids)


def test_whole_blocks_are_coming_of_what_is_not_computed_yet() -> None:
    prompts = PromptsInFlight()
    asked = [1] * 100 + [2] * 50
    one = Generation(prompts, [1] * 100 + [3] * 9)
    other = Generation(prompts, [1] * 70 + [4] * 90)
    assert prompts.alike(asked, 64) == PromptsAlike(requests=1, tokens=64)
    assert prompts.alike(asked, 32) == PromptsAlike(requests=1, tokens=96)
    assert prompts.alike(asked, 0) == PromptsAlike(requests=1, tokens=0)
    one.job.take(Tokens(token_ids=(7,)), 0.0)
    assert prompts.alike(asked, 32) == PromptsAlike(requests=1, tokens=64)
    one.is_held = False
    assert prompts.alike(asked, 32) == PromptsAlike(requests=0, tokens=64)
    del other
    assert prompts.alike(asked, 32) == PromptsAlike()


def test_other_prompts_have_nothing_in_common() -> None:
    prompts = PromptsInFlight()
    kept = Generation(prompts, [9, *[1] * 200])
    assert kept.is_held
    assert prompts.alike([1] * 200, 32) == prompts.alike([], 32) == PromptsAlike()
