"""When a group is compared, with what, and what follows; groups here are scripts."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import cast

import pytest

from kakeya.backends.engine.child import ChildClient
from kakeya.backends.engine.failures import GroupRefused
from kakeya.backends.ring import canary
from kakeya.backends.ring.canary import AUDIT_EVERY_S, Answer, SaidToken
from kakeya.backends.ring.canary_answers import AnswerFiles
from kakeya.backends.ring.canary_check import AGAIN_S, GroupCheck
from kakeya.core.errors import KakeyaError, MemoryRefused, PeerUnavailable
from kakeya.generation.facts import ModelFacts
from kakeya.generation.frames import Done, Frame, Progress, StopReason, TokenLogprob, Tokens
from kakeya.generation.progress import LoadPhase, LoadProgress
from kakeya.generation.request import DecodeRequest, GenerationPriority
from tests.fakes import FakeClock

FACTS = ModelFacts(
    model_id="big",
    model_path="/m",
    vocab_size=96,
    context_tokens=512,
    eos_token_ids=(1,),
    prefill_chunk_tokens=64,
    base_fingerprint="weights",
    dtype="float32",
)
RIGHT: Answer = tuple(
    SaidToken(token=number, logprob=-0.5, top=((number, -0.5), (90, -0.5004)))
    for number in range(canary.ANSWER_TOKENS)
)


def tied(place: int) -> Answer:
    wrong = SaidToken(token=90, logprob=-0.5, top=((90, -0.5), (place, -0.5001)))
    return (*RIGHT[:place], wrong, *RIGHT[place + 1 :])


def off(place: int) -> Answer:
    one = SaidToken(token=RIGHT[place].token, logprob=-0.6, top=((RIGHT[place].token, -0.6),))
    return (*RIGHT[:place], one, *RIGHT[place + 1 :])


class Group:
    """Says an answer, from the place on that a history asks for."""

    def __init__(self, *answers: Answer | KakeyaError) -> None:
        self._answers: Iterator[Answer | KakeyaError] = iter(answers)
        self._last: Answer | KakeyaError = RIGHT
        self.asked: list[DecodeRequest] = []
        self.heard: Callable[[], None] = lambda: None

    async def decode(self, request: DecodeRequest, timeout_s: float) -> AsyncGenerator[Frame, None]:
        self.asked.append(request)
        self._last = next(self._answers, self._last)
        if isinstance(self._last, KakeyaError):
            raise self._last
        yield Progress(computed_tokens=160, total_tokens=320)
        self.heard()
        for said in self._last[canary.ANSWER_TOKENS - request.max_tokens :]:
            yield Tokens(
                token_ids=(said.token,),
                logprobs=(TokenLogprob(logprob=said.logprob, top=said.top),),
            )
        yield Done(reason=StopReason.MAX_TOKENS)


class Alone:
    def __init__(self, found: tuple[ModelFacts, Answer] | KakeyaError | None) -> None:
        self._found = found
        self.asked = 0

    async def answer(
        self, tokens: int, hears: Callable[[Frame], None]
    ) -> tuple[ModelFacts, Answer] | None:
        self.asked += 1
        if isinstance(self._found, KakeyaError):
            raise self._found
        return self._found

    def weights(self) -> str:
        return "weights"


class Node:
    """The node of a group; `found` is what one process says, None = it does not fit."""

    def __init__(
        self,
        folder: Path,
        found: tuple[ModelFacts, Answer] | KakeyaError | None = (FACTS, RIGHT),
    ) -> None:
        self.clock = FakeClock()
        self.alone = Alone(found)
        self.ends = 0
        self.is_idle = True
        self.told: list[LoadProgress] = []
        self.check = GroupCheck(
            "big",
            self.alone,
            AnswerFiles(folder),
            end=self._end,
            is_idle=lambda: self.is_idle,
            clock=self.clock,
        )

    @property
    def state(self) -> object:
        return self.check.status()["state"]

    async def admit(self, group: Group, facts: ModelFacts = FACTS) -> None:
        await self.check.admit(cast("ChildClient", group), facts, self.told.append)

    async def audit(self, group: Group) -> None:
        await self.check.audit(cast("ChildClient", group), FACTS)

    def _end(self) -> None:
        self.ends += 1


async def test_a_group_is_compared_with_one_process_and_later_ones_with_its_answer(
    tmp_path: Path,
) -> None:
    for starts in (1, 2):
        node = Node(tmp_path)
        await node.admit(Group(RIGHT))
        assert (node.state, node.ends) == ("verified", 0)
        assert node.alone.asked == (1 if starts == 1 else 0)
        shares = [told.share for told in node.told if told.share is not None]
        assert {told.phase for told in node.told} == {LoadPhase.CANARY}
        assert shares == sorted(shares)
        assert shares[-1] == pytest.approx(0.5 + (160 + 64) / 384 / 2)


@pytest.mark.parametrize(
    "wrong", [off(0), off(63), (*RIGHT[:40], *RIGHT[41:], RIGHT[0]), RIGHT[:5]]
)
async def test_a_group_that_says_something_else_is_ended(tmp_path: Path, wrong: Answer) -> None:
    node = Node(tmp_path)
    with pytest.raises(GroupRefused, match="computes something else"):
        await node.admit(Group(wrong))
    assert (node.state, node.ends) == ("refused", 1)
    assert node.check.status()["code"] == "group_refused"
    await node.admit(Group(RIGHT))  # the next one may be right
    assert node.state == "verified"


async def test_behind_a_tie_the_group_is_asked_again_for_the_rest(tmp_path: Path) -> None:
    group = Group(tied(7), RIGHT)
    await (node := Node(tmp_path)).admit(group)
    assert node.state == "verified"
    assert [asked.max_tokens for asked in group.asked] == [64, 56]
    assert group.asked[1].token_ids[-8:] == tuple(range(8))  # those of the one process
    many = Group(*(tied(place) for place in range(canary.MOST_TIES + 1)))
    with pytest.raises(GroupRefused, match="parted at more than"):
        await node.admit(many)


@pytest.mark.parametrize(
    "found", [None, MemoryRefused("no room"), (replace(FACTS, base_fingerprint="x"), RIGHT)]
)
async def test_without_an_answer_to_compare_with_a_group_is_unverified_and_serves(
    tmp_path: Path, found: tuple[ModelFacts, Answer] | KakeyaError | None
) -> None:
    node, group = Node(tmp_path, found), Group(off(3))
    await node.admit(group)
    assert (node.state, node.ends, group.asked) == ("unverified", 0, [])
    await node.admit(group, replace(FACTS, context_tokens=300))
    assert "context is too short" in str(node.check.status()["reason"])


async def test_an_answer_of_other_numerics_can_only_find_a_group_right(tmp_path: Path) -> None:
    await Node(tmp_path).admit(Group(RIGHT))
    other = replace(FACTS, mlx_version="9")
    node = Node(tmp_path, None)
    await node.admit(Group(off(3)), other)
    assert (node.state, node.ends) == ("unverified", 0)
    await node.admit(Group(RIGHT), other)
    assert node.state == "verified"
    with pytest.raises(GroupRefused):  # its own answer is known, of these numerics
        await node.admit(Group(off(3)), other)


async def test_one_process_is_asked_before_the_group_takes_the_memory(tmp_path: Path) -> None:
    facts = replace(FACTS, mlx_version=version("mlx"))
    node = Node(tmp_path, (facts, RIGHT))
    for _ in range(2):
        await node.check.prepare()
        assert node.alone.asked == 1
    await node.admit(Group(RIGHT), facts)
    assert (node.state, node.alone.asked) == ("verified", 1)


async def test_an_engine_that_ends_in_the_middle_is_no_verdict(tmp_path: Path) -> None:
    node = Node(tmp_path)
    with pytest.raises(PeerUnavailable):
        await node.admit(Group(PeerUnavailable("a rank is lost")))
    assert (node.state, node.ends) == ("checking", 0)


async def test_an_idle_group_is_audited_now_and_then_and_taken_out_when_it_fails(
    tmp_path: Path,
) -> None:
    node, group = Node(tmp_path), Group(RIGHT, RIGHT, off(20))
    await node.admit(group)
    await node.audit(group)
    assert len(group.asked) == 1  # it is not time
    node.clock.advance(AUDIT_EVERY_S)
    node.is_idle = False
    await node.audit(group)
    assert len(group.asked) == 1
    node.is_idle = True
    await node.audit(group)
    assert group.asked[1].priority is GenerationPriority.SPECULATIVE
    assert "audited_at" in node.check.status()
    node.clock.advance(AUDIT_EVERY_S)
    with pytest.raises(GroupRefused):
        await node.audit(group)
    assert (node.state, node.ends) == ("refused", 1)


async def test_an_audit_ends_for_a_request_and_comes_back(tmp_path: Path) -> None:
    node, group = Node(tmp_path), Group(RIGHT)
    await node.admit(group)
    node.clock.advance(AUDIT_EVERY_S)

    def a_request_comes() -> None:
        node.is_idle = False

    group.heard = a_request_comes
    await node.audit(group)
    group.heard, node.is_idle = (lambda: None), True
    await node.audit(group)
    assert len(group.asked) == 2  # not at once
    node.clock.advance(AGAIN_S)
    await node.audit(group)
    assert len(group.asked) == 3
    assert "audited_at" in node.check.status()


async def test_an_unverified_group_has_no_audit(tmp_path: Path) -> None:
    node, group = Node(tmp_path, None), Group(RIGHT)
    await node.admit(group)
    node.clock.advance(AUDIT_EVERY_S)
    await node.audit(group)
    assert group.asked == []
