"""The canary of a ring group: what the group says behind a fixed prompt, and whether one process
says the same. Pure.

A faulty link may change sums in silence, often only behind the first piece of a prompt. So the
prompt has more than two pieces, and both are compared token by token, each with its log
probability:

    tokens             are the same, or two equally likely ones have changed places (a *tie*); then
                       the group is asked again, with the token of the one process, for the rest
    log probabilities  of the most likely tokens at all places lie together, on average. A fault of
                       1 % in all sums often changes no token at all, and moves these two hundred
                       times further than the order of a split does
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kakeya.generation.facts import ModelFacts
from kakeya.generation.frames import Tokens
from kakeya.generation.request import DecodeRequest, GenerationPriority

ANSWER_TOKENS = 64
TOP = 8
"""The most likely tokens that are told at each place: a tie is between two of them."""
MOST_TIES = 12
"""More than so many in an answer are no chance: random weights in 4 bits gave 7."""
AUDIT_EVERY_S = 6 * 3600.0
PROMPT_TOKENS = 320
_PERIOD = 97
"""The prompt repeats so many ids: models continue that, and few of their tokens are ties."""
_BOUNDS = {"float32": (2e-3, 3e-5), "float16": (0.05, 0.03), "bfloat16": (0.3, 0.12)}
_COARSE = (0.6, 0.25)
"""Bounds of ties and of the distance by the type of the weights, and those of quantized 16 bits.

`python -m benchmarks.ring_canary order` measures both sides. In 32 bits split sums move the
distance by 0.000003, a fault of 1 % in them by 0.00015 and 0.005 (two models). In bfloat16 they
move it by 0.03 and 0.05, and by 0.15 quantized to 4 bits, since sums are rounded to 8 bits; what
that hides cannot be told. There a sum that lacks 2 % of its places moves it by 0.18, 0.57 and 0.63,
and one of which a rank has only its own part by 0.77 to 1.5. Ties were 0.06 wide, quantized 0.44.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Numerics:
    """What computed an answer. Those of others may differ in more than the order of sums."""

    device: str
    dtype: str
    quantization: str
    mlx: str

    @classmethod
    def of(cls, facts: ModelFacts) -> Numerics:
        """Those of an engine."""
        return cls(
            device=facts.device,
            dtype=facts.dtype,
            quantization=facts.quantization,
            mlx=facts.mlx_version,
        )

    @property
    def _bounds(self) -> tuple[float, float]:
        is_coarse = self.quantization and self.dtype != "float32"
        return _COARSE if is_coarse else _BOUNDS.get(self.dtype, _COARSE)

    @property
    def tie_bound(self) -> float:
        """The most by which a side may prefer its own token of two that tie."""
        return self._bounds[0]

    @property
    def distance_bound(self) -> float:
        """The most that log probabilities may lie apart on average."""
        return self._bounds[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class SaidToken:
    """A token, its log probability, and the most likely tokens at its place with theirs."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]

    def logprob_of(self, token: int) -> float | None:
        """Of a token at this place; None = it is not among the most likely ones."""
        return self.logprob if token == self.token else dict(self.top).get(token)

    def lead_over(self, token: int) -> float | None:
        """By how much the token was likelier than another one; None = by too much to tell."""
        other = self.logprob_of(token)
        return None if other is None else self.logprob - other


Answer = tuple[SaidToken, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Equal:
    """All tokens are equal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tie:
    """Equal up to two tokens that are equally likely, at `place` of the answer."""

    place: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Different:
    """The group computes something else; `reason` completes "it"."""

    reason: str


Outcome = Equal | Tie | Different


def prompt_tokens(facts: ModelFacts) -> int:
    """The length of the prompt for a group; 0 = its context is too short for one."""
    wanted = max(PROMPT_TOKENS, 2 * facts.prefill_chunk_tokens + _PERIOD)
    fits = wanted + ANSWER_TOKENS < (facts.longest_tokens or facts.context_tokens)
    return wanted if fits else 0


def is_long_enough(tokens: int, facts: ModelFacts) -> bool:
    """Whether a prompt of an earlier answer has more than two pieces of a group too."""
    return tokens > 2 * facts.prefill_chunk_tokens


def prompt(vocab_size: int, tokens: int) -> tuple[int, ...]:
    """The same ids each time, of all parts of the vocabulary."""
    state, ids = 27, []
    for _ in range(_PERIOD):
        state = (state * 1103515245 + 12345) % 2**31
        ids.append((state >> 8) % vocab_size)
    return tuple(ids[place % _PERIOD] for place in range(tokens))


def request(history: Sequence[int], tokens: int, *, is_audit: bool = False) -> DecodeRequest:
    """Ask for the most likely tokens behind a history, whatever they are: no token ends it."""
    return DecodeRequest(
        token_ids=tuple(history),
        max_tokens=tokens,
        top_logprobs=TOP,
        priority=GenerationPriority.SPECULATIVE if is_audit else GenerationPriority.LOW,
    )


def said_by(frame: Tokens) -> Answer:
    """The tokens of a frame."""
    pairs = zip(frame.token_ids, frame.logprobs, strict=True)
    return tuple(SaidToken(token=token, logprob=one.logprob, top=one.top) for token, one in pairs)


def compare(wanted: Answer, said: Answer, numerics: Numerics, start: int = 0) -> Outcome:
    """Compare the tokens that a group said from a place on, behind the wanted ones, with the wanted
    ones there. A tie: each side prefers its own token by at most the bound."""
    if len(said) != len(wanted) - start:
        return Different(reason=f"said {len(said)} tokens in place of {len(wanted) - start}")
    for place, (one, other) in enumerate(zip(wanted[start:], said, strict=True), start):
        if one.token == other.token:
            continue
        leads = one.lead_over(other.token), other.lead_over(one.token)
        if all(lead is not None and lead <= numerics.tie_bound for lead in leads):
            return Tie(place=place)
        return Different(
            reason=f"said {other.token} and not {one.token} at token {place + 1} of "
            f"{len(wanted)}, and they are no tie: one process is surer of its own by "
            f"{_told(leads[0])}, the group by {_told(leads[1])}, and up to "
            f"{numerics.tie_bound:g} is a tie"
        )
    return Equal()


def distance(wanted: Answer, said: Answer) -> float:
    """How far the log probabilities of the most likely tokens lie apart, on average."""
    found = [_apart(one, other) for one, other in zip(wanted, said, strict=True)]
    return sum(found) / max(1, len(found))


def judge_distance(apart: float, numerics: Numerics) -> Different | None:
    """Whether answers of equal tokens lie too far apart; None = they do not."""
    if apart <= numerics.distance_bound:
        return None
    return Different(  # or it is no number
        reason=f"gave the most likely tokens log probabilities that are {apart:.3g} apart on "
        f"average; up to {numerics.distance_bound:g} is the order of sums"
    )


def _apart(one: SaidToken, other: SaidToken) -> float:
    """Of a token that the other side did not tell, the least that it can be."""
    least = min((logprob for _, logprob in other.top), default=other.logprob)
    found = []
    for token, logprob in one.top:
        its = other.logprob_of(token)
        found.append(abs(logprob - its) if its is not None else max(0.0, logprob - least))
    return sum(found) / max(1, len(found))


def _told(lead: float | None) -> str:
    return "more than can be told" if lead is None else f"{lead:.4f}"
