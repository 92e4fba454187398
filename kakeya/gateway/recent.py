"""What became of recent requests, so that one can be explained: `kakeya explain`.

A record is written when a generation ends, of the first answer to its request. Records are kept in
memory alone: the last `MOST_RECORDS` of them, and at most `MOST_TOKENS` tokens of prompts and
answers. They hold the prompts of clients: who may see one is checked where it is asked for.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kakeya.backends.relay.backend import Finished
from kakeya.core.units import pack_ids
from kakeya.dispatch.clients import ID_CHARS
from kakeya.dispatch.routing.decision import RouteDecision
from kakeya.dispatch.tasks import TaskChoice
from kakeya.text.cuts_of_chat import common_tokens

MOST_RECORDS = 256
MOST_TOKENS = 1 << 20
"""4 MB of ids."""
TOKEN_BYTES = 4


@dataclass(slots=True, kw_only=True, eq=False)
class RequestRecord:
    """One generation. Times are seconds since the request began; None = it did not come so far.

    `owner` is its client, or the machine of a nameless one. `conversation` is the key of its KV, ""
    = none. `task` chose the model, None = the request names it. `defaults` are what it did not say,
    and the tables of the file that do. `prefill_s` is the engine's account, None where a stop
    string ended the answer. `relay` names the backend that answered, "" = an engine did; `told` is
    that backend's account, as ids are known of engines alone. `routes` are the choices of a node,
    each but the first after a loss; () = no other node has the model.
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
    cached_tokens: int = 0
    finish_reason: str = ""
    relay: str = ""
    told: Finished | None = None
    routes: tuple[RouteDecision, ...] = ()

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return self.told.prompt_tokens if self.told else len(self.prompt) // TOKEN_BYTES

    @property
    def completion_tokens(self) -> int:
        """Tokens of the answer."""
        return self.told.completion_tokens if self.told else len(self.answer) // TOKEN_BYTES

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
