"""What became of recent requests, so that one can be explained: `kakeya explain`.

A record is written when a generation ends, of the first answer to its request. Records are kept in
memory alone: the last `MOST_RECORDS` of them, and at most `MOST_TOKENS` tokens of prompts and
answers. They hold the prompts of clients: who may see one is checked where it is asked for.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from kakeya.backends.relay.backend import Finished
from kakeya.core.figures import Json
from kakeya.core.units import pack_ids
from kakeya.dispatch.clients import ID_CHARS
from kakeya.dispatch.routing.decision import RouteDecision
from kakeya.dispatch.tasks import TaskChoice
from kakeya.generation.frames import Usage
from kakeya.text.cuts_of_chat import common_tokens

MOST_RECORDS = 256
MOST_TOLD = 40
"""Requests in a list of the last ones."""
MOST_TOKENS = 1 << 20
"""4 MB of ids."""
TOKEN_BYTES = 4


@dataclass(slots=True, kw_only=True, eq=False)
class RequestRecord:
    """One generation. Times are seconds since the request began; None = it did not come so far.

    `owner` is its client, or the machine of a nameless one. `conversation` is the key of its KV, ""
    = none. `task` chose the model, None = the request names it. `defaults` are what it did not say,
    and the tables of the file that do. `cuts` are the prompt's, for a look at its KV. `prefill_s`
    is the engine's account, None where a stop string ended the answer, as is `usage`. `ended_at` is
    the wall clock. `relay` names the backend that answered, "" = an engine did; `told` is that
    backend's account, as ids are known of engines alone. `node` is the label of the peer that
    answered, "" = this node did. `routes` are the choices of a node, each but the first after a
    loss; () = no other node has the model.
    """

    request_id: str
    owner: str
    model_id: str
    model_path: str
    block_tokens: int
    conversation: str
    moved: tuple[str, ...]
    ready_s: float
    task: TaskChoice | None = None
    defaults: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    prepared_s: float = 0.0
    first_token_s: float | None = None
    ended_s: float = 0.0
    prefill_s: float | None = None
    prompt: bytes = b""
    answer: bytes = b""
    cuts: tuple[int, ...] = ()
    cached_tokens: int = 0
    finish_reason: str = ""
    ended_at: float = 0.0
    usage: Usage | None = None
    relay: str = ""
    told: Finished | None = None
    node: str = ""
    routes: tuple[RouteDecision, ...] = ()

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return self.told.prompt_tokens if self.told else len(self.prompt) // TOKEN_BYTES

    @property
    def completion_tokens(self) -> int:
        """Tokens of the answer."""
        return self.told.completion_tokens if self.told else len(self.answer) // TOKEN_BYTES

    def brief(self) -> Json:
        """What a list of requests tells of it. Speeds are tokens per second."""
        first_s = self.first_token_s
        decode_s = 0.0 if first_s is None else self.ended_s - first_s
        if self.usage is not None:  # the engine's account: a peer's answer may come in one piece
            decode_s = self.usage.total_s - self.usage.prefill_s
        return {
            "id": self.request_id,
            "ended_at": round(self.ended_at, 1),
            "client": self.owner,
            "conversation": self.conversation,
            "model": self.model_id,
            "task": self.task and self.task.task,
            "node": self.routes[-1].node_id if self.routes else "",
            "backend": self.relay,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "completion_tokens": self.completion_tokens,
            "first_token_s": first_s and round(first_s, 3),
            "total_s": round(self.ended_s, 3),
            "tokens_per_second": round((self.completion_tokens - 1) / decode_s, 1)
            if decode_s > 0 and self.completion_tokens > 1
            else None,
            "forwards": self.usage and self.usage.forwards,
            "drafted": self.usage and self.usage.verified,
            "accepted": self.usage and self.usage.accepted,
            "finish_reason": self.finish_reason,
        }

    @property
    def history(self) -> bytes:
        """The prompt and its answer, packed: what may be in the cache behind it."""
        return self.prompt + self.answer


class RecentRequests:
    """The records of the last requests, by id."""

    def __init__(self) -> None:
        self._records: OrderedDict[str, RequestRecord] = OrderedDict()
        self._bytes = 0

    def add(self, record: RequestRecord, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """Keep the record of a request that has ended."""
        record.prompt, record.answer = pack_ids(prompt), pack_ids(answer)
        self._records[record.request_id[-ID_CHARS:]] = record
        self._bytes += len(record.prompt) + len(record.answer)
        while len(self._records) > MOST_RECORDS or (
            self._bytes > MOST_TOKENS * TOKEN_BYTES and len(self._records) > 1
        ):
            _, old = self._records.popitem(last=False)
            self._bytes -= len(old.prompt) + len(old.answer)

    def brief(self, most: int = MOST_TOLD) -> list[Json]:
        """What is told of the last requests, the newest first."""
        return [one.brief() for one in islice(reversed(self._records.values()), most)]

    def find(self, request_id: str) -> RequestRecord | None:
        """The record of a request, by its id with any prefix."""
        return self._records.get(request_id[-ID_CHARS:])

    def nearest(self, record: RequestRecord) -> tuple[RequestRecord, int] | None:
        """The earlier request of the same client and model to compare a request with, and how many
        tokens both begin with: the last of its conversation, or else the most alike."""
        earlier: list[RequestRecord] = []
        for one in self._records.values():
            if one is record:
                break
            if (one.owner, one.model_id) == (record.owner, record.model_id):
                earlier.append(one)
        if record.conversation:
            same = [one for one in earlier if one.conversation == record.conversation]
            earlier = same[-1:] or earlier
        alike = [(one, common_tokens(record.prompt, one.history)) for one in reversed(earlier)]
        return max(alike, key=lambda pair: pair[1], default=None)
