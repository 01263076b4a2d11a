"""Bytes that are no message: a clear refusal instead of the library's internal error."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

type _Handler = grpc.RpcMethodHandler[Any, Any] | None


class _Malformed(Exception):
    """In place of a message that could not be read."""


class RefuseMalformed(grpc.aio.ServerInterceptor):
    """Ends calls whose request cannot be read with INVALID_ARGUMENT; for calls of one request."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[_Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> _Handler:
        """See `grpc.aio.ServerInterceptor`."""
        handler: Any = await continuation(handler_call_details)
        if handler is None or handler.request_streaming or handler.request_deserializer is None:
            return handler
        kind = "unary_stream" if handler.response_streaming else "unary_unary"
        make = getattr(grpc, f"{kind}_rpc_method_handler")
        answer = _checked(getattr(handler, kind))
        return make(
            answer,
            request_deserializer=_reader(handler.request_deserializer),
            response_serializer=handler.response_serializer,
        )


def _reader(read: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def read_or_mark(data: bytes) -> Any:
        try:
            return read(data)
        except DecodeError as error:
            return _Malformed(str(error))

    return read_or_mark


def _checked(answer: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """The handler, a coroutine as all of ours are, behind a check of its message."""

    async def checked(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        if isinstance(request, _Malformed):
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"the request cannot be read: {request}; expected the method's message",
            )
        return await answer(request, context)

    return checked
