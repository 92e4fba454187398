"""What a decision is made on: a request, and a node that could serve it, with figures of its model.

Figures come from a node's card, or from its answer where it was asked; 0 = not measured, where
nothing else is said.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from kakeya.generation.facts import ModelState
from kakeya.generation.request import GenerationPriority

UNKNOWN_OUTPUT_TOKENS = 256
"""The length that is expected of an answer of which nothing is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedRequest:
    """A request as routing sees it.

    `output_tokens` is the length that is expected of the answer. `deadline_s` is how long the
    caller waits for the first token, None = as long as it takes. `conversation` is its key, ""
    = none, and `last_node` is the node that served it last. `blocks` are the names of the prompt's
    whole blocks of `block_tokens` tokens, each of which names its whole prefix: requests that have
    one in common share what is computed of it. `kv_bytes_per_token` is the size of the KV that
    nodes carry to each other, 0 = they carry none.
    """

    prompt_tokens: int
    output_tokens: int = UNKNOWN_OUTPUT_TOKENS
    priority: GenerationPriority = GenerationPriority.NORMAL
    deadline_s: float | None = None
    conversation: str = ""
    last_node: str = ""
    blocks: tuple[bytes, ...] = ()
    block_tokens: int = 0
    kv_bytes_per_token: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSpeed:
    """How fast a node computes the model.

    Prompts are computed one after the other, in pieces of `piece_tokens`, with a step of all rows
    that decode between two pieces; 0 = with none. `decode_tokens_per_s` is of one row alone. Each
    row more makes a step longer by `row_cost` of that: 0 = rows cost nothing, 1 = they take turns.
    At most `max_rows` decode at the same time.
    """

    prefill_tokens_per_s: float = 0.0
    decode_tokens_per_s: float = 0.0
    row_cost: float = 0.25
    piece_tokens: int = 512
    max_rows: int = 8

    def or_as(self, prefill_tokens_per_s: float, decode_tokens_per_s: float) -> NodeSpeed:
        """The same with these rates in place of those that are not measured."""
        if self.prefill_tokens_per_s and self.decode_tokens_per_s:
            return self
        return replace(
            self,
            prefill_tokens_per_s=self.prefill_tokens_per_s or prefill_tokens_per_s,
            decode_tokens_per_s=self.decode_tokens_per_s or decode_tokens_per_s,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuedWork:
    """What the model has to do on a node before and beside a new request.

    `prompt_tokens` are still to be computed before its prompt: those of the `prompts` that wait or
    are computed, and go first. `rows` has for each answer that decodes how many tokens are expected
    to follow; 0 = not known. `prompts_per_s` is how many prompts came to the node lately, and
    `busy_share` the share of the time in which it computed one, 0..1.
    """

    prompt_tokens: int = 0
    prompts: int = 0
    rows: tuple[int, ...] = ()
    prompts_per_s: float = 0.0
    busy_share: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLink:
    """The way to a node: seconds for a round trip, and bytes per second; 0 = as good as none."""

    round_trip_s: float = 0.0
    bytes_per_s: float = 0.0

    def seconds(self, size_bytes: float) -> float:
        """Until so many bytes were sent, and the first byte of an answer is back."""
        return self.round_trip_s + (size_bytes / self.bytes_per_s if self.bytes_per_s else 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteCandidate:
    """A node that has the model, with figures that are `age_s` old.

    The model is ready in `load_s`, of a READY one 0. Of the prompt, `warm_tokens` leading tokens
    need not be computed there; they are there in `warm_s` (read from disk). Others can fetch the KV
    of the first `held_tokens`: that of more is still to be computed. `kv_rates` are the bytes/s
    with which KV comes there from other nodes, by node id; from those that it leaves out none does.
    `sharers` is how many requests in flight there have most of the prompt in common with it.
    `unfit` says why the node cannot serve the request at all; "" = it can.
    """

    node_id: str
    is_local: bool = False
    state: ModelState = ModelState.READY
    load_s: float = 0.0
    speed: NodeSpeed = NodeSpeed()
    work: QueuedWork = QueuedWork()
    link: NodeLink = NodeLink()
    warm_tokens: int = 0
    warm_s: float = 0.0
    held_tokens: int = 0
    kv_rates: Mapping[str, float] = field(default_factory=dict)
    sharers: int = 0
    age_s: float = 0.0
    unfit: str = ""
