"""POST /v1/embeddings: OpenAI's request and answer.

    honoured     model; input: a text, a list of texts, token ids, or a list of lists of token ids;
                 encoding_format "float" or "base64"; dimensions where the model allows them; user,
                 safety_identifier
    extensions   truncate: true cuts off what is too long, which is refused otherwise
    refused      everything else: 400, code unsupported_parameter

Token ids are the model's own, special ones included; no token is added to them.
"""

from __future__ import annotations

import asyncio
import base64
import sys
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import cast

from starlette.types import Receive, Scope, Send

from kakeya.core.clock import Clock
from kakeya.core.errors import InvalidArgument
from kakeya.gateway.coordinator_fields import read_with_fields
from kakeya.gateway.embeddings import Embedded, EmbeddingInput, Embeddings
from kakeya.gateway.http.body import refuse, text
from kakeya.gateway.http.connection import Connection
from kakeya.gateway.http.edge import send_json
from kakeya.gateway.http.fields import (
    choice_field,
    flag_field,
    integer_field,
    refuse_unknown,
    table,
    value_field,
)
from kakeya.gateway.openai.generation_params import MODEL, MOST_INT
from kakeya.gateway.openai.reply import compact
from kakeya.gateway.openai.share_params import USERS, read_user, share_of
from kakeya.generation.request import GenerationPriority
from kakeya.generation.waiting import WaitTeller

MAX_INPUTS = 2048
_OFFLOAD_NUMBERS = 16_384
"""More numbers are written in a thread: about 10 ms of work."""
_WANTED = (
    "a text, a list of texts, a list of token ids, or a list of such lists; none of them empty"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingRequest:
    """A body of POST /v1/embeddings. `is_list` tells how errors name an input."""

    model: str
    inputs: tuple[EmbeddingInput, ...]
    is_list: bool
    form: str = "float"
    size: int | None = None
    truncates: bool = False
    user: str = ""

    def name(self, index: int) -> str:
        """The name of an input."""
        return f"input[{index}]" if self.is_list else "input"


def parse_embedding(body: Mapping[str, object]) -> EmbeddingRequest:
    """Read a request. Raises InvalidArgument or Unsupported naming the parameter."""
    refuse_unknown(body, EMBEDDING, {})
    is_list, inputs = _INPUT.read(body)
    return EmbeddingRequest(
        model=MODEL.read(body),
        inputs=inputs,
        is_list=is_list,
        form=_FORM.read(body) or "float",
        size=_SIZE.read(body),
        truncates=_TRUNCATES.read(body),
        user=read_user(body),
    )


def _input(value: object, name: str) -> EmbeddingInput:
    if isinstance(value, str) and value:
        return text(value, name)
    if not isinstance(value, list) or not value:
        refuse(name, value, _WANTED)
    for index, entry in enumerate(value):
        if type(entry) is not int or not 0 <= entry < 2**32:
            refuse(f"{name}[{index}]", entry, "a token id")
    return tuple(value)


def embedding_body(asked: EmbeddingRequest, made: Embedded) -> bytes:
    """The answer."""
    write = numbers_of if asked.form == "float" else _base64
    return compact(
        {
            "object": "list",
            "data": [
                {"object": "embedding", "index": index, "embedding": write(vector)}
                for index, vector in enumerate(made.vectors)
            ],
            "model": made.model_id,
            "usage": {"prompt_tokens": made.tokens, "total_tokens": made.tokens},
        }
    )


EmbeddingParser = Callable[[Mapping[str, object]], EmbeddingRequest]
EmbeddingWriter = Callable[[EmbeddingRequest, Embedded], bytes]


def _parse_inputs(given: object) -> tuple[bool, tuple[EmbeddingInput, ...]]:
    """Whether there is a list of inputs, and all of them."""
    is_list = isinstance(given, list) and bool(given) and type(given[0]) is not int
    inputs = cast("list[object]", given) if is_list else [given]
    if len(inputs) > MAX_INPUTS:
        raise InvalidArgument(
            f"input holds {len(inputs)} inputs; give at most {MAX_INPUTS} in a request",
            param="input",
        )
    names = (f"input[{index}]" if is_list else "input" for index in range(len(inputs)))
    return is_list, tuple(map(_input, inputs, names))


_ID = {"type": "integer", "minimum": 0, "maximum": 2**32 - 1}
_ONE = [{"type": "string", "minLength": 1}, {"type": "array", "minItems": 1, "items": _ID}]
_MANY = {"type": "array", "minItems": 1, "maxItems": MAX_INPUTS, "items": {"anyOf": _ONE}}
_INPUT = value_field("input", _parse_inputs, {"anyOf": [*_ONE, _MANY]}, is_required=True)
_FORM = choice_field("encoding_format", ("float", "base64"))
_SIZE, _TRUNCATES = integer_field("dimensions", 1, MOST_INT), flag_field("truncate")
EMBEDDING = table(MODEL, _INPUT, _FORM, _SIZE, _TRUNCATES, *USERS)


class EmbeddingRoute:
    """The ASGI application behind the path."""

    def __init__(
        self,
        embeddings: Embeddings,
        clock: Clock,
        parse: EmbeddingParser = parse_embedding,
        write: EmbeddingWriter = embedding_body,
    ) -> None:
        """`parse` and `write` are of a dialect: this one or another."""
        self._embeddings = embeddings
        self._clock = clock
        self._parse = parse
        self._write = write

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        embeddings = self._embeddings

        asked, fields = await read_with_fields(scope, receive, embeddings.limits, self._parse)
        caller = fields.named(scope, has_priority=True)
        name, profile = embeddings.meant(asked.model, caller, scope)
        priority = fields.urgency(scope)
        if priority is None:
            priority = profile.spec.priority
        model = embeddings.find(name)
        share = share_of(caller, scope)
        with embeddings.admitted(share, asked.user):
            async with Connection(
                receive,
                send,
                clock=self._clock,
                limits=embeddings.limits,
                wait=WaitTeller(model.waits_for),
            ) as client:
                made = await embeddings.embed(
                    model,
                    asked.inputs,
                    size=asked.size,
                    truncates=asked.truncates,
                    names=asked.name,
                    share=share,
                    user=asked.user,
                    priority=GenerationPriority.NORMAL if priority is None else priority,
                )
                if sum(map(len, made.vectors)) > 4 * _OFFLOAD_NUMBERS:
                    answer = await asyncio.to_thread(self._write, asked, made)
                else:
                    answer = self._write(asked, made)
                client.finish()
        await send_json(send, 200, answer)


def numbers_of(vector: bytes) -> list[float]:
    """The numbers of a vector: the shortest decimals that give the same float32: nine digits."""
    numbers = array("f", vector)
    if sys.byteorder == "big":
        numbers.byteswap()
    return [float(f"{number:.9g}") for number in numbers]


def _base64(vector: bytes) -> str:
    return base64.b64encode(vector).decode("ascii")
