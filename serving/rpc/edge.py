"""The border between our errors and gRPC statuses: every call of the engine service ends here.

| Situation | Status |
|---|---|
| bad or out-of-range field, prompt too long, bytes that are no message | INVALID_ARGUMENT |
| field or feature that we do not have | UNIMPLEMENTED |
| no such thing, for instance a tokenizer | NOT_FOUND |
| duplicate live request id | ALREADY_EXISTS |
| queue full | RESOURCE_EXHAUSTED |
| starting, draining, failed | UNAVAILABLE |
| the client's deadline has passed | DEADLINE_EXCEEDED |
| events from a number that is not kept | OUT_OF_RANGE |
| a subscriber too slow for the events | DATA_LOSS |
| a bug, an engine failure | INTERNAL |

A gateway takes INTERNAL and UNAVAILABLE as failures of the server and stops using it, so the fault
of a request is never one of them. UNKNOWN, which grpc makes of an uncaught exception, it retries
(serving-api.md section 4).
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, cast

import grpc
import grpc.aio

from serving.request import RequestError, Status
from serving.rpc.logs import log_event, log_exception

# What a handler sees of its call; its messages have the types of the handler's signature.
type Context = grpc.aio.ServicerContext[Any, Any]

STATUS_CODES: Mapping[Status, grpc.StatusCode] = {
    "INVALID_ARGUMENT": grpc.StatusCode.INVALID_ARGUMENT,
    "UNIMPLEMENTED": grpc.StatusCode.UNIMPLEMENTED,
    "NOT_FOUND": grpc.StatusCode.NOT_FOUND,
    "ALREADY_EXISTS": grpc.StatusCode.ALREADY_EXISTS,
    "RESOURCE_EXHAUSTED": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "UNAVAILABLE": grpc.StatusCode.UNAVAILABLE,
    "DEADLINE_EXCEEDED": grpc.StatusCode.DEADLINE_EXCEEDED,
    "OUT_OF_RANGE": grpc.StatusCode.OUT_OF_RANGE,
    "DATA_LOSS": grpc.StatusCode.DATA_LOSS,
    "INTERNAL": grpc.StatusCode.INTERNAL,
}
# The message travels in a response header, and peers limit all headers together to 8 KiB.
MAX_MESSAGE_CHARS = 2000


def at_edge[H: Callable[..., Awaitable[Any]]](handler: H) -> H:
    """Wrap a handler: whatever it raises becomes a status, and the end of the call is logged.

    Handlers are coroutines, also those that stream: they write with `context.write`. A cancelled
    async generator would only be closed when it is collected; a coroutine is unwound at once.
    """
    method = handler.__name__

    @functools.wraps(handler)
    async def call(self: Any, request: Any, context: Context) -> Any:
        begin = time.monotonic()
        status = "OK"
        try:
            return await handler(self, request, context)
        except RequestError as error:
            status = error.status
            log_event("rpc_refused", method=method, status=status, message=error.message)
            return await _abort(context, error)
        except asyncio.CancelledError:
            status = "CANCELLED"
            raise
        except Exception as error:
            status = "INTERNAL"
            log_exception("rpc_failed", error, method=method)
            message = f"{method} failed in the server: {type(error).__name__}; see the server's log"
            return await _abort(context, RequestError("INTERNAL", message))
        finally:
            seconds = time.monotonic() - begin
            log_event("rpc", level=logging.DEBUG, method=method, status=status, seconds=seconds)

    return cast(H, call)  # the wrapper takes and returns what the handler does


async def _abort(context: Context, error: RequestError) -> Any:
    """End the call with the status of `error`. Never returns: `abort` raises."""
    message = error.message
    if len(message) > MAX_MESSAGE_CHARS:
        message = message[: MAX_MESSAGE_CHARS - 3] + "..."
    await context.abort(STATUS_CODES[error.status], message)
