"""gRPC method handlers behind a gate: the gate decides first, then the request is parsed.

A refused call thus costs no parsing, and bytes that are not a message end as INVALID_ARGUMENT
instead of a Python error. Each wrapper has the kind of the handler that it wraps (a coroutine that
writes, a generator that yields), so that a cancelled call ends the frame that does the work.
Handlers that stream both ways write their answers.
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
"""Ends a call, or returns a context that is held open as long as the call lasts."""


def guarded(handler: Handler, gate: Gate) -> Handler:
    """Put a handler behind a gate."""
    if handler.request_streaming:
        return _streamed(handler, gate)
    if handler.response_streaming:
        return _streaming(handler, gate)
    answer: Any = handler.unary_unary  # the stubs only know handlers that block
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
    """Wrap a handler of streamed requests, which gRPC parses one by one for the handler."""
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
            wrong = InvalidArgument(f"the {len(request)} bytes of the request are not a message")
        await abort(context, wrong)
        raise wrong

    return parse
