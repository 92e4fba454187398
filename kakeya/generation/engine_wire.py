"""The values of a generation as messages of EngineService, and back: for the agent and its engines,
and for nodes that answer each other's requests.

A `_Pair` joins a value and its message by the names of their fields. So a new field is added to the
value and to engine.proto, and needs a line here only if the message has it by another name or in
another form. Fields that this build does not know are passed over.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import fields
from types import MappingProxyType
from typing import Any, Generic, TypeAlias, TypeVar

from google.protobuf.message import Message

from kakeya.core.errors import InvalidArgument, PeerProtocol
from kakeya.core.units import pack_ids, unpack_ids
from kakeya.generation.facts import EngineStats, Footprint, ModelFacts
from kakeya.generation.frames import (
    Done,
    EngineFrame,
    HistoryLogits,
    KvExported,
    KvImported,
    KvPark,
    KvWant,
    Progress,
    QueuePlace,
    SourceUsage,
    StopReason,
    TokenLogprob,
    Tokens,
    Usage,
)
from kakeya.generation.kv import KvOffer, KvPages, PageRef
from kakeya.generation.request import (
    DecodeJob,
    DecodeRequest,
    DraftSource,
    GenerationPriority,
    Sampling,
)
from kakeya.v1 import engine_pb2 as pb

_Value = TypeVar("_Value")
_Wire = TypeVar("_Wire", bound=Message)
_Form: TypeAlias = tuple[Callable[[Any], object], Callable[[Any], object]]
"""A field's way to the wire, and from it."""
_AT_ONCE_S = 1e-6
"""A deadline that is over: 0 would say that there is none."""
_NONE: Mapping[str, Any] = MappingProxyType({})


class _Pair(Generic[_Value, _Wire]):
    """A dataclass and the message that has its fields, but for those `apart`.

    A field has the same name and form in both, if `renamed` and `forms` do not say otherwise.
    Raises KeyError for a field that the message lacks.
    """

    def __init__(
        self,
        value: type[_Value],
        message: type[_Wire],
        *,
        renamed: Mapping[str, str] = _NONE,
        forms: Mapping[str, _Form] = _NONE,
        apart: Collection[str] = (),
    ) -> None:
        self._value: Callable[..., _Value] = value
        self._message: Callable[..., _Wire] = message
        self._fields: list[tuple[str, str, Callable[[Any], object], Callable[[Any], object]]] = []
        for name in (field.name for field in fields(value) if field.name not in apart):  # type: ignore[arg-type]
            theirs = message.DESCRIPTOR.fields_by_name[renamed.get(name, name)]
            form = forms.get(name, _REPEATED if theirs.is_repeated else _PLAIN)
            self._fields.append((name, theirs.name, *form))

    def fill(self, value: object) -> dict[str, Any]:
        """The fields of the message."""
        return {theirs: to_wire(getattr(value, ours)) for ours, theirs, to_wire, _ in self._fields}

    def read(self, message: Message) -> dict[str, Any]:
        """The fields of the value."""
        return {
            ours: of_wire(getattr(message, theirs)) for ours, theirs, _, of_wire in self._fields
        }

    def to_wire(self, value: _Value) -> _Wire:
        """The message of a value."""
        return self._message(**self.fill(value))

    def from_wire(self, message: _Wire) -> _Value:
        """The value of a message."""
        return self._value(**self.read(message))


def _same(value: object) -> object:
    return value


def _or(default: object) -> _Form:
    """Where 0 on the wire stands for a field that was not set."""
    return _same, lambda value: value or default


def _each(pair: _Pair[Any, Any]) -> _Form:
    """Of a field with several values of a pair."""
    return (
        lambda values: map(pair.to_wire, values),
        lambda messages: tuple(map(pair.from_wire, messages)),
    )


def ids_from_wire(packed: bytes) -> list[int]:
    """Token ids of 4 bytes each. Raises InvalidArgument for torn ones."""
    try:
        return unpack_ids(packed)
    except ValueError:
        raise InvalidArgument(
            f"token ids take 4 bytes each; {len(packed)} bytes is no multiple of 4"
        ) from None


_PLAIN: _Form = _same, _same
_REPEATED: _Form = _same, tuple
_DRAFT_KINDS = {"ngram": pb.DraftSource.KIND_NGRAM, "remote": pb.DraftSource.KIND_REMOTE}

# The values, each after those that it holds

_PAGE_REF = _Pair(PageRef, pb.PageRef)
_KV_PAGES = _Pair(KvPages, pb.KvBlock, forms={"pages": (_PAGE_REF.to_wire, _PAGE_REF.from_wire)})
_OFFER = _Pair(
    KvOffer,
    pb.DecodeRequest,
    renamed={
        "blocks": "kv_blocks",
        "exports": "kv_exports",
        "logits": "logits_le_f32",
        "free_bytes": "kv_free_bytes",
    },
    forms={"blocks": _each(_KV_PAGES), "exports": _each(_KV_PAGES)},
)
_SAMPLING = _Pair(
    Sampling,
    pb.DecodeRequest,
    forms={
        "top_p": _or(1.0),
        "repetition_penalty": _or(1.0),
        "logit_bias": (
            lambda pairs: [pb.LogitBias(token_id=token_id, bias=bias) for token_id, bias in pairs],
            lambda messages: tuple((each.token_id, each.bias) for each in messages),
        ),
    },
)
_SOURCE = _Pair(
    DraftSource,
    pb.DraftSource,
    forms={
        "kind": (
            _DRAFT_KINDS.__getitem__,
            lambda kind: "ngram" if kind == pb.DraftSource.KIND_NGRAM else "remote",
        )
    },
)
_REQUEST = _Pair(
    DecodeRequest,
    pb.DecodeRequest,
    renamed={
        "token_ids": "token_ids_le32",
        "deadline_s": "deadline_seconds",
        "frame_s": "frame_ms",
        "top_logprobs": "logprobs",
    },
    forms={
        "token_ids": (pack_ids, ids_from_wire),
        "stop_token_ids": (sorted, frozenset),
        "draft_sources": _each(_SOURCE),
        "priority": (int, lambda raw: GenerationPriority(min(raw, max(GenerationPriority)))),
        "deadline_s": (
            lambda seconds: 0.0 if seconds is None else max(_AT_ONCE_S, seconds),
            lambda seconds: seconds or None,
        ),
        "frame_s": (lambda seconds: round(1000 * seconds), lambda ms: ms / 1000),
        "top_logprobs": (
            lambda count: 0 if count is None else 1 + count,
            lambda raw: raw - 1 if raw else None,
        ),
    },
    apart={"sampling", "draft_policy", "kv", "kv_retention", "stay_warm_s", "wait", "kv_holder"},
)
_USAGE = _Pair(
    Usage,
    pb.DecodeDone,
    renamed={"prefill_s": "prefill_seconds", "total_s": "total_seconds"},
    forms={"sources": _each(_Pair(SourceUsage, pb.SourceStats))},
)
_PROGRESS = _Pair(Progress, pb.PrefillProgress)
_WANT = _Pair(KvWant, pb.KvWant)
_PLACE = _Pair(QueuePlace, pb.QueuePlace)
_REASONS = {
    StopReason.MAX_TOKENS: pb.DecodeDone.REASON_MAX_TOKENS,
    StopReason.STOP_TOKEN: pb.DecodeDone.REASON_STOP_TOKEN,
    StopReason.CONTEXT_FULL: pb.DecodeDone.REASON_CONTEXT_FULL,
}
_STOP_REASONS = {wire: reason for reason, wire in _REASONS.items()}
_FACTS = _Pair(
    ModelFacts,
    pb.DescribeResponse,
    renamed={"load_s": "load_seconds", "forward_costs_s": "forward_costs_seconds"},
    forms={
        "forward_costs_s": (_same, dict),
        "batch_rows": _or(1),
        "prefill_grid": (
            lambda grid: [pb.GridPiece(position=start, tokens=size) for start, size in grid],
            lambda pieces: tuple((piece.position, piece.tokens) for piece in pieces),
        ),
    },
)
_FOOTPRINT = _Pair(Footprint, pb.Footprint)
_STATS = _Pair(
    EngineStats,
    pb.StatsResponse,
    forms={"kv_bytes_by_key": (_same, dict)},
    apart={"footprint"},
)
page_ref_to_wire, page_ref_from_wire = _PAGE_REF.to_wire, _PAGE_REF.from_wire
footprint_to_wire, footprint_from_wire = _FOOTPRINT.to_wire, _FOOTPRINT.from_wire
facts_to_wire, facts_from_wire = _FACTS.to_wire, _FACTS.from_wire


def job_to_wire(
    request: DecodeRequest, offer: KvOffer, park_id: int = 0, after_load: int = 0
) -> pb.DecodeRequest:
    """The message of a request with the KV offered to its engine; numbers as in `DecodeJob`."""
    shared = _REQUEST.fill(request) | _SAMPLING.fill(request.sampling) | _OFFER.fill(offer)
    return pb.DecodeRequest(**shared, park_id=park_id, after_load=after_load)


def request_from_wire(message: pb.DecodeRequest) -> DecodeRequest:
    """The request in a message, without what is meant for an engine alone. Raises InvalidArgument
    for torn token ids."""
    return DecodeRequest(**_REQUEST.read(message), sampling=_SAMPLING.from_wire(message))


def job_from_wire(message: pb.DecodeRequest) -> DecodeJob:
    """The job of an engine. Raises InvalidArgument for torn token ids."""
    return DecodeJob(
        **_REQUEST.read(message),
        sampling=_SAMPLING.from_wire(message),
        offer=_OFFER.from_wire(message),
        park_id=message.park_id,
        after_load=message.after_load,
    )


def stats_to_wire(stats: EngineStats) -> pb.StatsResponse:
    """The message of an engine's live numbers."""
    footprint = None if stats.footprint is None else footprint_to_wire(stats.footprint)
    return pb.StatsResponse(**_STATS.fill(stats), footprint=footprint)


def stats_from_wire(message: pb.StatsResponse) -> EngineStats:
    """Live numbers of an engine."""
    has_footprint = message.HasField("footprint")
    footprint = footprint_from_wire(message.footprint) if has_footprint else None
    return EngineStats(**_STATS.read(message), footprint=footprint)


def frames_to_wire(frames: Sequence[EngineFrame]) -> pb.DecodeResponse:
    """One message of at least one frame, in order."""
    first, *following = map(_frame_to_wire, frames)
    first.following.extend(following)
    return first


def frames_from_wire(message: pb.DecodeResponse) -> Iterator[EngineFrame]:
    """The frames of one message, in order, without the empty ones.

    Raises PeerProtocol for an unknown end.
    """
    for response in (message, *message.following):
        frame = _frame_from_wire(response)
        if frame is not None:
            yield frame


def _frame_to_wire(frame: EngineFrame) -> pb.DecodeResponse:
    match frame:
        case Tokens():
            return pb.DecodeResponse(tokens=_tokens_to_wire(frame))
        case Progress():
            return pb.DecodeResponse(progress=_PROGRESS.to_wire(frame))
        case KvImported():
            return pb.DecodeResponse(imported=pb.KvImported(tokens=frame.tokens))
        case KvExported():
            return pb.DecodeResponse(exported=pb.KvExported(index=frame.index, tokens=frame.tokens))
        case KvPark():
            return pb.DecodeResponse(park=pb.KvPark(lengths=frame.lengths, number=frame.number))
        case KvWant():
            return pb.DecodeResponse(want=_WANT.to_wire(frame))
        case QueuePlace():
            return pb.DecodeResponse(place=_PLACE.to_wire(frame))
        case HistoryLogits():
            return pb.DecodeResponse(logits=pb.HistoryLogits(le_f32=frame.logits))
        case Done():
            done = pb.DecodeDone(**_USAGE.fill(frame.usage), reason=_REASONS[frame.reason])
            return pb.DecodeResponse(done=done)


def _frame_from_wire(response: pb.DecodeResponse) -> EngineFrame | None:
    match response.WhichOneof("frame"):
        case "tokens":
            tokens = response.tokens
            if tokens.logprobs:
                return _tokens_from_wire(tokens)
            return Tokens(token_ids=tuple(tokens.token_ids)) if tokens.token_ids else None
        case "progress":
            return _PROGRESS.from_wire(response.progress)
        case "imported":
            return KvImported(tokens=response.imported.tokens)
        case "exported":
            return KvExported(index=response.exported.index, tokens=response.exported.tokens)
        case "park":
            return KvPark(lengths=tuple(response.park.lengths), number=response.park.number)
        case "want":
            return _WANT.from_wire(response.want)
        case "place":
            return _PLACE.from_wire(response.place)
        case "logits":
            return HistoryLogits(logits=response.logits.le_f32)
        case "done":
            return _done_from_wire(response.done)
        case None:
            return None


def _tokens_to_wire(frame: Tokens) -> pb.CommittedTokens:
    message = pb.CommittedTokens(token_ids=frame.token_ids)
    for each in frame.logprobs:
        ids, values = zip(*each.top, strict=True) if each.top else ((), ())
        message.logprobs.add(logprob=each.logprob, top_ids=ids, top_logprobs=values)
    return message


def _tokens_from_wire(message: pb.CommittedTokens) -> Tokens:
    logprobs = tuple(
        TokenLogprob(
            logprob=each.logprob, top=tuple(zip(each.top_ids, each.top_logprobs, strict=True))
        )
        for each in message.logprobs
    )
    return Tokens(token_ids=tuple(message.token_ids), logprobs=logprobs)


def _done_from_wire(message: pb.DecodeDone) -> Done:
    reason = _STOP_REASONS.get(message.reason)
    if reason is None:
        raise PeerProtocol(f"the engine ended a decode with the unknown reason {message.reason}")
    return Done(reason=reason, usage=_USAGE.from_wire(message))
