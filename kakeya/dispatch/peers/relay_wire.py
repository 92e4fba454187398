"""Whole requests, the parts of their answers and images as messages of RelayService, and back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields
from typing import Literal, TypeVar

from kakeya.backends.relay.backend import Finished
from kakeya.backends.request import (
    ChatRequest,
    CompletionRequest,
    GenerationParams,
    Request,
    SamplingWish,
    ToolChoice,
)
from kakeya.core.errors import InvalidArgument, PeerProtocol
from kakeya.core.units import MIB, pack_ids
from kakeya.dispatch.peers.wire import priority_from_wire
from kakeya.generation.engine_wire import ids_from_wire
from kakeya.generation.image import ImageRequest
from kakeya.text.chat import Chat
from kakeya.text.tools.answer import FinishReason, Part, Said, Thought, ToolCall
from kakeya.v1 import relay_pb2 as pb

PIECE_BYTES = MIB
"""Of a text or an image: a message has room for 4 MiB."""
_TOOL_MODES: dict[str, Literal["auto", "none", "required"]] = {
    "auto": "auto",
    "none": "none",
    "required": "required",
}
_REASONS: dict[str, FinishReason] = {
    "stop": "stop",
    "length": "length",
    "tool_calls": "tool_calls",
}
_BIAS = "logit_bias"
_WISHES = [one.name for one in fields(SamplingWish) if one.name != _BIAS]
Kind = TypeVar("Kind", list[object], dict[str, object])


def request_to_wire(asked: Request, client: str) -> pb.RelayedRequest:
    """The message of a request. What belongs to the node that got it is left out: how many answers,
    the keys of the conversation, and what it says of the time afterwards."""
    params = asked.params
    message = pb.RelayedRequest(
        model_id=params.model,
        client=client,
        max_tokens=params.max_tokens or 0,
        sampling=_sampling_to_wire(params.sampling),
        stop=params.stop,
        draft_policy=params.draft_policy,
        deadline_seconds=params.deadline_s or 0.0,
        priority=params.priority,
        user=params.user,
        top_logprobs=params.top_logprobs,
        stream=params.stream,
    )
    if isinstance(asked, ChatRequest):
        message.chat.CopyFrom(_chat_to_wire(asked))
    else:
        message.completion.prompts.extend(map(_prompt_to_wire, asked.prompts))
    return message


def request_from_wire(message: pb.RelayedRequest) -> Request:
    """The request in a message. Raises InvalidArgument for what is none."""
    params = GenerationParams(
        model=message.model_id,
        max_tokens=message.max_tokens or None,
        sampling=_sampling_from_wire(message.sampling),
        stop=tuple(message.stop),
        stream=message.stream,
        draft_policy=message.draft_policy,
        deadline_s=message.deadline_seconds if message.deadline_seconds > 0 else None,  # nor NaN
        priority=priority_from_wire(message.priority),
        user=message.user,
        top_logprobs=message.top_logprobs if message.HasField("top_logprobs") else None,
    )
    if message.HasField("chat"):
        return _chat_from_wire(message.chat, params)
    prompts = tuple(map(_prompt_from_wire, message.completion.prompts))
    if not prompts:
        raise InvalidArgument("prompt is missing; give a text or token ids", param="prompt")
    return CompletionRequest(params=params, prompts=prompts)


def _prompt_to_wire(prompt: str | tuple[int, ...]) -> pb.RelayedPrompt:
    if isinstance(prompt, str):
        return pb.RelayedPrompt(text=_bytes(prompt))
    return pb.RelayedPrompt(token_ids_le32=pack_ids(prompt))


def _prompt_from_wire(message: pb.RelayedPrompt) -> str | tuple[int, ...]:
    if message.WhichOneof("prompt") == "token_ids_le32":
        return tuple(ids_from_wire(message.token_ids_le32))
    return _text(message.text)


def _sampling_to_wire(wish: SamplingWish) -> pb.RelayedSampling:
    given = {name: getattr(wish, name) for name in _WISHES}
    return pb.RelayedSampling(**given, logit_bias=dict(wish.logit_bias or ()))


def _sampling_from_wire(message: pb.RelayedSampling) -> SamplingWish:
    given = {name: getattr(message, name) for name in _WISHES if message.HasField(name)}  # type: ignore[arg-type]
    bias = tuple(sorted(message.logit_bias.items()))
    return SamplingWish(**given, logit_bias=bias or None)


def _chat_to_wire(asked: ChatRequest) -> pb.RelayedChat:
    chat, choice = asked.chat, asked.tool_choice
    return pb.RelayedChat(
        messages_json=_json(chat.messages),
        tools_json=_json(chat.tools),
        variables_json=_json(chat.kwargs),
        continues_last=chat.continues_last,
        has_plain_tools=chat.plain_tools,
        tool_choice=choice.mode,
        tool_names=choice.names,
        is_parallel=choice.is_parallel,
        schema_json=b"" if asked.answer_schema is None else _json(asked.answer_schema),
        schema_at=asked.answer_schema_at,
    )


def _chat_from_wire(message: pb.RelayedChat, params: GenerationParams) -> ChatRequest:
    schema = message.schema_json
    messages = _objects(message.messages_json, "messages")
    if not messages or not all(isinstance(one.get("role"), str) for one in messages):
        raise InvalidArgument("messages: at least one is needed, and each has a role")
    mode = _TOOL_MODES.get(message.tool_choice)
    if mode is None:
        raise InvalidArgument(f"tool_choice is {message.tool_choice[:80]!r}; this node knows none")
    return ChatRequest(
        params=params,
        chat=Chat(
            messages=messages,
            tools=_objects(message.tools_json, "tools"),
            kwargs=_read(message.variables_json, dict, "variables"),
            continues_last=message.continues_last,
            plain_tools=message.has_plain_tools,
        ),
        tool_choice=ToolChoice(
            mode=mode, names=tuple(message.tool_names), is_parallel=message.is_parallel
        ),
        answer_schema=_read(schema, dict, "schema") if schema else None,
        answer_schema_at=message.schema_at,
    )


def part_to_wire(part: Part | Finished) -> Iterator[pb.RelayedPart]:
    """The messages of a part: a long text takes several."""
    match part:
        case Said():
            yield from (pb.RelayedPart(said=piece) for piece in _pieces(_bytes(part.text)))
        case Thought():
            yield from (pb.RelayedPart(thought=piece) for piece in _pieces(_bytes(part.text)))
        case ToolCall():
            yield pb.RelayedPart(
                call=pb.RelayedCall(
                    index=part.index,
                    name=_bytes(part.name),
                    arguments=_bytes(part.arguments),
                    call_id=_bytes(part.call_id),
                )
            )
        case Finished():
            yield pb.RelayedPart(
                end=pb.RelayedEnd(
                    reason=part.reason,
                    prompt_tokens=part.prompt_tokens,
                    completion_tokens=part.completion_tokens,
                    cached_tokens=part.cached_tokens,
                    reasoning_tokens=part.reasoning_tokens,
                    stop_string=_bytes(part.stop_string),
                )
            )


def part_from_wire(message: pb.RelayedPart) -> Part | Finished | None:
    """The part in a message; None for a sign of life, or a part that this build does not know."""
    match message.WhichOneof("part"):
        case "said":
            return Said(_text(message.said))
        case "thought":
            return Thought(_text(message.thought))
        case "call":
            call = message.call
            return ToolCall(
                call.index, _text(call.name), _text(call.arguments), _text(call.call_id)
            )
        case "end":
            end = message.end
            return Finished(
                reason=_REASONS.get(end.reason, "stop"),
                prompt_tokens=end.prompt_tokens,
                completion_tokens=end.completion_tokens,
                cached_tokens=end.cached_tokens,
                reasoning_tokens=end.reasoning_tokens,
                stop_string=_text(end.stop_string),
            )
        case _:
            return None


def images_to_wire(model_id: str, request: ImageRequest, client: str) -> pb.DrawImagesRequest:
    """The message of a request for images."""
    width, height = request.size or (0, 0)
    return pb.DrawImagesRequest(
        model_id=model_id,
        client=client,
        prompt=_bytes(request.prompt),
        seed=request.seed,
        count=request.count,
        width=width,
        height=height,
        steps=request.steps or 0,
        priority=request.priority,
        stay_warm_seconds=request.stay_warm_s,
    )


def images_from_wire(message: pb.DrawImagesRequest) -> ImageRequest:
    """The request for images in a message. Raises InvalidArgument for what is none."""
    has_size = bool(message.width or message.height)
    return ImageRequest(
        prompt=_text(message.prompt),
        seed=message.seed,
        count=message.count,
        size=(message.width, message.height) if has_size else None,
        steps=message.steps or None,
        priority=priority_from_wire(message.priority),
        stay_warm_s=max(0.0, message.stay_warm_seconds),
    )


def _pieces(data: bytes) -> Iterator[bytes]:
    """A text in pieces that are whole characters each, but for halves that came so."""
    while len(data) > PIECE_BYTES:
        end = PIECE_BYTES
        while data[end] & 0xC0 == 0x80:
            end -= 1
        yield data[:end]
        data = data[end:]
    yield data


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _text(data: bytes) -> str:
    try:
        return data.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError as broken:
        raise PeerProtocol(f"a text of a peer is no UTF-8: {broken}") from broken


def _json(value: object) -> bytes:
    return _bytes(json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=dict))


def _objects(data: bytes, name: str) -> tuple[dict[str, object], ...]:
    found = _read(data, list, name)
    objects = tuple(one for one in found if isinstance(one, dict))
    if len(objects) != len(found):
        raise InvalidArgument(f"{name}: a list of objects is needed")
    return objects


def _read(data: bytes, kind: type[Kind], name: str) -> Kind:
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as wrong:
        raise InvalidArgument(f"{name} is no JSON: {wrong}") from None
    if not isinstance(found, kind):
        raise InvalidArgument(f"{name} is {type(found).__name__}; {kind.__name__} is needed")
    return found
