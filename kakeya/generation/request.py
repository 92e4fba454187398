"""The parameters of one generation. Token ids only: text and templates live above."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Literal

from kakeya.core.errors import InvalidArgument
from kakeya.generation.kv import LOGIT_BYTES, NO_HOLDER, NO_KV, KvExchange, KvHolder, KvOffer
from kakeya.generation.retention import BlockClass, Retention
from kakeya.generation.waiting import WaitTeller

MAX_PROMPT_TOKENS = 128 * 1024
"""Of one call: the most that is checked, copied and computed at one go."""
COLDEST = 1e-30
"""Below it logits / T would overflow float32; long before, the noise has no weight any more."""

MOST_PENALTY = 2
"""Of presence and frequency, as OpenAI bounds them."""
MOST_BIAS = 100
MOST_TOP_LOGPROBS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How a token is selected. Temperature 0 is greedy; the seed then has no effect.

    The same seed gives the same tokens with or without drafts and after a failover, because noise
    is keyed by (seed, position). `top_p` 1, `top_k` 0 and `min_p` 0 keep the whole vocabulary;
    `min_p` drops the tokens less likely than this part of the most likely one.

    `presence_penalty` is subtracted from the logit of each generated token, `frequency_penalty` as
    often as the token was generated. `repetition_penalty` divides a positive logit of a token of
    the prompt or the answer, and multiplies a negative one. `logit_bias` is added: (token id, bias)
    for each token that has one. The order is in `kakeya.decoding.processors`. Raises
    InvalidArgument that names a field out of its range.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        for name, value, is_right, right in (
            (
                "temperature",
                self.temperature,
                0 <= self.temperature < math.inf,
                "finite and not below 0",
            ),
            ("top_p", self.top_p, 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("min_p", self.min_p, 0 <= self.min_p <= 1, "in 0..1 (0 drops no token)"),
            (
                "presence_penalty",
                self.presence_penalty,
                -MOST_PENALTY <= self.presence_penalty <= MOST_PENALTY,
                f"in -{MOST_PENALTY}..{MOST_PENALTY} (0 = none)",
            ),
            (
                "frequency_penalty",
                self.frequency_penalty,
                -MOST_PENALTY <= self.frequency_penalty <= MOST_PENALTY,
                f"in -{MOST_PENALTY}..{MOST_PENALTY} (0 = none)",
            ),
            (
                "repetition_penalty",
                self.repetition_penalty,
                0 < self.repetition_penalty < math.inf,
                "finite and above 0 (1 = none)",
            ),
        ):
            if not is_right:
                raise InvalidArgument(f"{name} is {value:g}, it must be {right}", param=name)
        self._check_bias()

    def _check_bias(self) -> None:
        for token_id, bias in self.logit_bias:
            if token_id < 0 or not -MOST_BIAS <= bias <= MOST_BIAS:
                raise InvalidArgument(
                    f"logit_bias of token {token_id} is {bias:g}: ids are not below 0, and a bias "
                    f"must be in -{MOST_BIAS}..{MOST_BIAS}",
                    param="logit_bias",
                )
        if len({token_id for token_id, _ in self.logit_bias}) < len(self.logit_bias):
            raise InvalidArgument("logit_bias names a token twice", param="logit_bias")

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always selected."""
        return self.temperature < COLDEST


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSource:
    """A source of drafts: the n-gram index of the engine itself, or a peer's ProposerService.

    `server_name` is the name that the peer's certificate must carry; "" = a plain connection.
    """

    kind: Literal["ngram", "remote"]
    address: str = ""
    model_id: str = ""
    extended: bool = False
    server_name: str = ""

    @property
    def name(self) -> str:
        """`ngram`, or MODEL@HOST:PORT."""
        return "ngram" if self.kind == "ngram" else f"{self.model_id}@{self.address}"


class GenerationPriority(IntEnum):
    """Urgency of a generation; a more urgent one goes first, and may interrupt a less urgent."""

    URGENT = 0
    HIGH = 1
    NORMAL = 2
    LOW = 3
    BATCH = 4
    SPECULATIVE = 5
    """Work that no caller waits for: prefixes that are warmed ahead."""

    @property
    def block_class(self) -> BlockClass:
        """The class of the blocks that its requests compute."""
        return _BLOCK_CLASSES.get(self, BlockClass.USER)


_BLOCK_CLASSES = {
    GenerationPriority.BATCH: BlockClass.BATCH,
    GenerationPriority.SPECULATIVE: BlockClass.SPECULATIVE,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeRequest:
    """One generation: the whole history, where to stop, how to select, where to get drafts.

    `kv_key` names the KV to continue from and to keep afterwards; "" keeps nothing. `adapter_id`
    names a loaded adapter; "" is the model alone. `deadline_s` is how long the caller waits for the
    first token, None = no deadline, or the first token is there: a request is refused at once when
    its model would load for longer. With `max_tokens` 0 the history is only prefilled, all but its
    last token, for `kv`, which carries blocks of KV between the node's pages and its engine.
    `client` and `user` name the caller and its user, for fair shares; a smaller `priority` is more
    urgent. `frame_s` is how long tokens may wait for later tokens to travel with, except the first
    and the last; 0 = the engine's own time. At `cuts`, in order, other prompts are likely to part
    from the history. Blocks are kept for `kv_retention`; `kv_holder` may have the missing ones.

    The answer follows `grammar`, a text as llguidance takes it; "" = any answer. Where it may not
    go on, the generation stops with STOP_TOKEN. Of `token_ids` the first `prompt_tokens` are the
    prompt, 0 = all; the others are the answer so far, which grammar and penalties take for
    generated. `top_logprobs` asks for the log probability of each token, and of so many of the most
    likely ones at its place; None = for none. Where `draft_sources` is not empty, the tokens that
    the grammar forces are drafted too; `draft_policy` is what chose them, "" = as `auto`. The model
    stays warm for `stay_warm_s` after it at least. `wait` tells the caller for what it waits.
    """

    token_ids: Sequence[int]
    max_tokens: int
    stop_token_ids: frozenset[int] = frozenset()
    sampling: Sampling = Sampling()
    draft_sources: tuple[DraftSource, ...] = ()
    draft_policy: str = ""
    kv_key: str = ""
    adapter_id: str = ""
    deadline_s: float | None = None
    client: str = ""
    user: str = ""
    priority: GenerationPriority = GenerationPriority.NORMAL
    frame_s: float = 0.0
    kv: KvExchange | None = None
    cuts: tuple[int, ...] = ()
    kv_retention: Retention = Retention.LONG
    grammar: str = ""
    prompt_tokens: int = 0
    top_logprobs: int | None = None
    stay_warm_s: float = 0.0
    wait: WaitTeller | None = None
    kv_holder: KvHolder = NO_HOLDER

    def after(self, elapsed_s: float) -> DecodeRequest:
        """The same request `elapsed_s` later, with the rest of its deadline."""
        if self.deadline_s is None:
            return self
        return replace(self, deadline_s=max(0.0, self.deadline_s - elapsed_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeJob(DecodeRequest):
    """A request as an engine gets it: with the KV of `offer`, and the agent's numbers for it.

    The blocks of the offer stay pinned until the first frame. `park_id` names the generation to
    LendPages, 0 = no pages are ever lent for its KV. `after_load` is the number of the adapter load
    that the generation begins behind, 0 = none. `kv`, `kv_retention`, `stay_warm_s`,
    `wait` and `kv_holder` stay in the agent.
    """

    offer: KvOffer = NO_KV
    park_id: int = 0
    after_load: int = 0

    def check(self, vocab_size: int, context_tokens: int) -> None:
        """Raise InvalidArgument for a job that a model of these bounds cannot take."""
        if not self.token_ids:
            raise InvalidArgument("the history is empty; give at least one token")
        if self.max_tokens < 0:
            raise InvalidArgument(f"max_tokens is {self.max_tokens}; 0 = only prefill")
        if len(self.token_ids) >= context_tokens:
            raise InvalidArgument(
                f"the history has {len(self.token_ids)} tokens, the model's context is "
                f"{context_tokens}; leave room for at least one new token"
            )
        largest = max(self.token_ids)
        if largest >= vocab_size or min(self.token_ids) < 0:
            raise InvalidArgument(f"token id {largest} is outside the vocabulary of {vocab_size}")
        for token_id, _ in self.sampling.logit_bias:
            if token_id >= vocab_size:
                raise InvalidArgument(
                    f"logit_bias names token id {token_id}, outside the vocabulary of {vocab_size}",
                    param="logit_bias",
                )
        if not 0 <= self.prompt_tokens <= len(self.token_ids):
            raise InvalidArgument(
                f"prompt_tokens is {self.prompt_tokens}, of a history of {len(self.token_ids)}"
            )
        if not 0 <= (self.top_logprobs or 0) <= MOST_TOP_LOGPROBS:
            raise InvalidArgument(
                f"top_logprobs is {self.top_logprobs}, it must be in 0..{MOST_TOP_LOGPROBS}",
                param="top_logprobs",
            )
        if len(self.offer.logits) not in (0, LOGIT_BYTES * vocab_size):
            raise InvalidArgument(
                f"the logits have {len(self.offer.logits)} bytes, those of a vocabulary of "
                f"{vocab_size} have {LOGIT_BYTES * vocab_size}"
            )
