"""The engine service: one coroutine an RPC, all on one event loop.

A call of `Generate` owns its request: it registers the id, hands the request to the engine,
forwards outputs, and on every way out (finished, cancelled, disconnected, refused, failed) aborts
it in the engine, which for a finished request does nothing. The engine's inbox keeps the order, so
an id can be used again as soon as its call has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import time
import uuid
from collections.abc import Callable, Generator
from typing import NoReturn

from serving.page_table import InUse
from serving.plan import Output
from serving.request import Request, RequestError
from serving.rpc import convert, loads, protocol
from serving.rpc.bundle import Bundle, bundle_pieces
from serving.rpc.edge import Context, at_edge
from serving.rpc.lifecycle import Lifecycle, Served
from serving.rpc.logs import log_event
from serving.rpc.metrics import Metrics, RequestMetrics
from serving.rpc.model_info import ModelInfo
from serving.rpc.protocol import common, messages
from serving.rpc.streams import OutputBridge, OutputStream
from serving.tokenizer import Tokenizer

# A text of this length is tokenized in about a millisecond; longer ones leave the event loop.
_MAX_INLINE_CHARS = 8192
_FLUSH_RETRY_S = 0.05


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ServiceConfig:
    """Constants of the service.

    Attributes:
      dtype: of activations and of the MLA cache, as it is reported.
      output_buffer_tokens: tokens that wait for a slow client before its request is paused.
      num_replicas: attention replicas, one a `dp` rank.
      max_rows: requests that each of them runs at once.
      unit_tokens: prefixes are shared in multiples of it.
    """

    dtype: str
    max_rows: int
    unit_tokens: int
    num_replicas: int = 1
    output_buffer_tokens: int = 256


@dataclasses.dataclass(slots=True)
class _Call:
    """An open call of `Generate`."""

    stream: OutputStream
    is_submitted: bool = False


class EngineService(protocol.Servicer):
    """`vllm.grpc.engine.VllmEngine`.

    Args:
      tokenizer, bundle: None when the model folder has none.
      draw_seed: a fresh uint32 for a request without a seed.

    Attributes:
      metrics: of the calls, and of the engine.
    """

    def __init__(
        self,
        config: ServiceConfig,
        info: ModelInfo,
        lifecycle: Lifecycle,
        *,
        tokenizer: Tokenizer | None,
        bundle: Bundle | None,
        draw_seed: Callable[[], int],
    ):
        self._config, self._info, self._lifecycle = config, info, lifecycle
        self._tokenizer, self._bundle, self._draw_seed = tokenizer, bundle, draw_seed
        self.metrics = Metrics(lifecycle)
        self._bridge = OutputBridge(asyncio.get_running_loop())
        self._calls: dict[str, _Call] = {}
        self._start_s = time.monotonic()
        self._rates = [loads.RateMeter(self._start_s) for _ in range(config.num_replicas)]
        self._last_request_time = 0.0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def num_open(self) -> int:
        """Open calls of `Generate`."""
        return len(self._calls)

    async def wait_idle(self) -> None:
        """Wait until no call of `Generate` is open."""
        await self._idle.wait()

    def end_all(self, error: RequestError) -> None:
        """End all open streams with an error, without the engine."""
        for request_id, call in self._calls.items():
            call.stream.deliver(_aborted(request_id)._replace(finish_reason="error", error=error))

    @at_edge
    async def Generate(self, request: messages.GenerateRequest, context: Context) -> None:
        """Stream the answer to one prompt, or send it whole."""
        self._last_request_time = time.time()
        with self.metrics.request() as measured:
            await self._generate(request, context, measured)

    async def _generate(
        self, request: messages.GenerateRequest, context: Context, measured: RequestMetrics
    ) -> None:
        served = self._lifecycle.require_served()
        convert.check_fields(request)
        request_id = request.request_id or uuid.uuid4().hex
        try:
            with self._open(served, request_id) as call:
                parsed = await self._parse(served, request_id, request)
                await self._submit(served, call, parsed)
                # Headers go out with the first message: what is refused is refused before it.
                output = await _forward(call.stream, context, measured, is_streamed=request.stream)
        except asyncio.CancelledError:
            seconds = time.monotonic() - measured.begin_s
            log_event("request_cancelled", request_id=request_id, seconds=seconds)
            raise
        log_event(
            "request",
            request_id=request_id,
            finish_reason=output.finish_reason,
            prompt_tokens=output.prompt_tokens,
            completion_tokens=output.completion_tokens,
            cached_tokens=output.cached_tokens,
            seconds=time.monotonic() - measured.begin_s,
        )

    @at_edge
    async def Abort(
        self, request: messages.AbortRequest, context: Context
    ) -> messages.AbortResponse:
        """End requests with reason `abort`. Unknown and finished ids are fine (KF-V03)."""
        calls = {id: self._calls[id] for id in request.request_ids if id in self._calls}
        if self._lifecycle.served is not None:
            self._lifecycle.served.engine.abort(calls)
        for request_id, call in calls.items():
            if not call.is_submitted:  # the engine does not know it yet
                call.stream.deliver(_aborted(request_id))
        return messages.AbortResponse()

    @at_edge
    async def HealthCheck(
        self, request: messages.HealthCheckRequest, context: Context
    ) -> messages.HealthCheckResponse:
        """Tell whether new requests are taken."""
        return messages.HealthCheckResponse(
            healthy=self._lifecycle.is_serving, message=self._lifecycle.message
        )

    @at_edge
    async def GetModelInfo(
        self, request: messages.GetModelInfoRequest, context: Context
    ) -> messages.GetModelInfoResponse:
        """Describe the model; works before its weights are loaded."""
        return self._info.message()

    @at_edge
    async def GetServerInfo(
        self, request: messages.GetServerInfoRequest, context: Context
    ) -> messages.GetServerInfoResponse:
        """Describe the server."""
        return messages.GetServerInfoResponse(
            active_requests=self.num_open,
            is_paused=False,
            last_receive_timestamp=self._last_request_time,
            uptime_seconds=time.monotonic() - self._start_s,
            server_type="k3jax",
            data_parallel_size=self._config.num_replicas,
            kv_cache_dtype=self._config.dtype,
            block_size=self._config.unit_tokens,
            model_dtype=self._config.dtype,
            max_num_seqs=self._config.max_rows,
        )

    @at_edge
    async def GetLoads(
        self, request: messages.GetLoadsRequest, context: Context
    ) -> messages.GetLoadsResponse:
        """Report the load of every `dp` rank, or of the one that is asked for."""
        served, reports = self._lifecycle.served, list[messages.SchedulerLoad]()
        if served is not None:
            now_s = time.monotonic()
            for rank, counts in enumerate(served.engine.counts().replicas):
                rate = self._rates[rank].read(counts.generated_tokens, now_s)
                if not request.HasField("dp_rank") or request.dp_rank == rank:
                    reports.append(
                        loads.load_message(served, counts, dp_rank=rank, tokens_per_s=rate)
                    )
        return loads.loads_message(reports, num_replicas=self._config.num_replicas)

    @at_edge
    async def GetTokenizer(self, request: common.GetTokenizerRequest, context: Context) -> None:
        """Stream the tokenizer bundle; works before the weights are loaded."""
        if self._bundle is None:
            raise RequestError(
                "NOT_FOUND",
                f"there is no tokenizer: the folder of {self._info.name} has none; send token ids",
            )
        for piece in bundle_pieces(self._bundle):
            await context.write(piece)

    @at_edge
    async def FlushCache(
        self, request: common.FlushCacheRequest, context: Context
    ) -> common.FlushCacheResponse:
        """Forget all prefixes. Waits up to `timeout_s` until no request holds pages."""
        end_s = time.monotonic() + request.timeout_s
        engine = self._lifecycle.require_served().engine
        while True:
            try:
                await asyncio.wrap_future(engine.flush())
                return common.FlushCacheResponse(success=True, message="all prefixes are forgotten")
            except InUse as error:
                if not time.monotonic() < end_s:
                    return common.FlushCacheResponse(success=False, message=str(error))
            await asyncio.sleep(_FLUSH_RETRY_S)

    @at_edge
    async def SubscribeKvEvents(
        self, request: common.SubscribeKvEventsRequest, context: Context
    ) -> NoReturn:
        """Not there: which prefixes are kept is not published."""
        raise _unsupported("SubscribeKvEvents", "this server does not publish its cache")

    @at_edge
    async def Embed(self, request: messages.EmbedRequest, context: Context) -> NoReturn:
        """Not there: the model generates."""
        raise _unsupported("Embed", "the model generates text and has no embedding output")

    @at_edge
    async def StartProfile(self, request: common.StartProfileRequest, context: Context) -> NoReturn:
        """Not there: profiles are taken with a script."""
        raise _unsupported("StartProfile", "profiles are taken with scripts/trace.py")

    @at_edge
    async def StopProfile(self, request: common.StopProfileRequest, context: Context) -> NoReturn:
        """Not there: profiles are taken with a script."""
        raise _unsupported("StopProfile", "profiles are taken with scripts/trace.py")

    @contextlib.contextmanager
    def _open(self, served: Served, request_id: str) -> Generator[_Call]:
        """Own a request id while its call is open.

        Raises:
          RequestError: the id is live (KF-V01), or the engine could not take one more (KF-V07).
        """
        if request_id in self._calls:
            raise RequestError(
                "ALREADY_EXISTS",
                f"request_id is in use: got {request_id!r}; expected one that no live request has",
            )
        limits = served.limits
        limit = self._config.num_replicas * limits.max_rows + limits.max_waiting
        if self.num_open >= limit:
            raise RequestError(
                "RESOURCE_EXHAUSTED",
                f"the server is full: got {self.num_open} open requests; "
                f"expected fewer than {limit}; retry later",
            )
        engine = served.engine
        stream = OutputStream(
            max_tokens=self._config.output_buffer_tokens,
            pause=functools.partial(engine.pause, request_id),
            resume=functools.partial(engine.resume, request_id),
        )
        call = self._calls[request_id] = _Call(stream)
        self._idle.clear()
        try:
            yield call
        finally:
            del self._calls[request_id]
            if not self._calls:
                self._idle.set()
            engine.abort((request_id,))

    async def _parse(
        self, served: Served, request_id: str, request: messages.GenerateRequest
    ) -> Request:
        limits = served.limits
        read_prompt = functools.partial(
            convert.prompt_ids,
            request,
            tokenizer=self._tokenizer,
            max_tokens=limits.max_context_tokens - 1,
        )
        is_long = len(request.text) > _MAX_INLINE_CHARS
        prompt = await asyncio.to_thread(read_prompt) if is_long else read_prompt()
        return Request(
            request_id=request_id,
            prompt=prompt,
            sampling=convert.sampling_params(
                request.sampling_params,
                default_temperature=self._info.default_temperature,
                vocab_size=limits.vocab_size,
                max_new_tokens=limits.max_new_tokens(len(prompt)),
                draw_seed=self._draw_seed,
            ),
            eos_token_ids=self._info.eos_token_ids,
            replica=(
                request.data_parallel_rank if request.HasField("data_parallel_rank") else None
            ),
        )

    async def _submit(self, served: Served, call: _Call, request: Request) -> None:
        """Wait until the engine has accepted a request, unless it was aborted before.

        Raises:
          RequestError: the engine refused it.
        """
        if not call.stream.has_ended:
            call.is_submitted = True
            on_output = functools.partial(self._bridge.post, call.stream)
            await asyncio.wrap_future(served.engine.submit(request, on_output))


async def _forward(
    stream: OutputStream, context: Context, measured: RequestMetrics, *, is_streamed: bool
) -> Output:
    """Send outputs to the client as they come, or all at the end; return the last one.

    Raises:
      RequestError: the request ended with an error.
    """
    whole: list[int] = []
    while True:
        output = await stream.next()
        measured.passed(output)
        if not is_streamed:
            whole += output.token_ids
        elif output.token_ids:
            await context.write(convert.chunk_message(output))
        if output.error is not None:
            raise RequestError(output.error.status, output.error.message)
        if output.finish_reason is not None:
            await context.write(convert.complete_message(output, tuple(whole)))
            return output


def _aborted(request_id: str) -> Output:
    """The last output of a request that the engine never saw."""
    return Output(
        request_id=request_id,
        token_ids=(),
        finish_reason="abort",
        prompt_tokens=0,
        completion_tokens=0,
    )


def _unsupported(method: str, reason: str) -> RequestError:
    return RequestError("UNIMPLEMENTED", f"{method} is not supported: {reason}")
