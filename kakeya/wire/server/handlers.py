"""gRPC method handlers behind a gate: the gate is asked first, then the request is parsed.

A refused caller thus costs no parsing, and bytes that are no message end as INVALID_ARGUMENT
instead of a Python error. Each wrapped handler is of the kind that it wraps (a coroutine that
writes, a generator that yields), so that a cancelled call still ends the very frame that works.
What streams both ways is written.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager, aclosing
from typing import Any, TypeAlias

import grpc
import grpc.aio

from kakeya.core.errors import InvalidArgument
from kakeya.wire.status import abort

Context = grpc.aio.ServicerContext[Any, Any]
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Gate = Callable[[Context], Awaitable[AbstractContextManager[object]]]
"""Ends a call, or returns what is held open as long as it lasts."""


def guarded(handler: Handler, gate: Gate) -> Handler:
    """The same handler behind a gate."""
    if handler.request_streaming:
        return _streamed(handler, gate)
    if handler.response_streaming:
        return _streaming(handler, gate)
    answer: Any = handler.unary_unary  # the stubs know only of handlers that block
    parse = _parser(handler)

    async def unary(request: bytes, context: Context) -> object:
        with await gate(context):
            return await answer(await parse(request, context), context)

    made: Any = unary
    return grpc.unary_unary_rpc_method_handler(
        made, response_serializer=handler.response_serializer
    )


def _streaming(handler: Handler, gate: Gate) -> Handler:
    produce: Any = handler.unary_stream
    parse = _parser(handler)

    async def written(request: bytes, context: Context) -> None:
        with await gate(context):
            await produce(await parse(request, context), context)

    async def yielded(request: bytes, context: Context) -> AsyncGenerator[object, None]:
        with await gate(context):
            async with aclosing(produce(await parse(request, context), context)) as responses:
                async for response in responses:
                    yield response

    made: Any = yielded if inspect.isasyncgenfunction(produce) else written
    return grpc.unary_stream_rpc_method_handler(
        made, response_serializer=handler.response_serializer
    )


def _streamed(handler: Handler, gate: Gate) -> Handler:
    """Requests that stream are parsed by gRPC, one by one, as the handler asks for them."""
    work: Any = handler.stream_stream if handler.response_streaming else handler.stream_unary

    async def collected(requests: AsyncIterator[object], context: Context) -> object:
        with await gate(context):
            return await work(requests, context)

    made: Any = collected
    kind = (
        grpc.stream_stream_rpc_method_handler
        if handler.response_streaming
        else grpc.stream_unary_rpc_method_handler
    )
    return kind(
        made,
        request_deserializer=handler.request_deserializer,
        response_serializer=handler.response_serializer,
    )


def _parser(handler: Handler) -> Callable[[bytes, Context], Awaitable[object]]:
    deserialize: Callable[[bytes], object] | None = handler.request_deserializer

    async def parse(request: bytes, context: Context) -> object:
        if deserialize is None:
            return request
        try:
            return deserialize(request)
        except Exception:  # noqa: BLE001 - what protobuf raises differs between its builds
            wrong = InvalidArgument(f"the {len(request)} bytes of the request are no message")
        await abort(context, wrong)
        raise wrong

    return parse
