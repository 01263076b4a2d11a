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
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, NoReturn

from serving.counts import ReplicaCounts
from serving.grammars import GrammarMatcher, Grammars
from serving.page_table import InUse
from serving.plan import Output
from serving.profiler import Profiler, ProfilerStateError
from serving.request import Request, RequestError
from serving.rpc import convert, loads, protocol
from serving.rpc.bundle import Bundle, bundle_pieces
from serving.rpc.edge import Context, at_edge
from serving.rpc.kv_events import KvPublisher
from serving.rpc.lifecycle import Lifecycle, Served
from serving.rpc.logs import log_event
from serving.rpc.metrics import Metrics, RequestMetrics
from serving.rpc.model_info import ModelInfo
from serving.rpc.protocol import common, messages
from serving.rpc.replies import Choice, check_size
from serving.rpc.streams import OutputBridge, OutputStream, next_outputs
from serving.stopping import StopMatcher
from serving.tokenizer import Tokenizer

if TYPE_CHECKING:
    from serving.rpc.spans import CallTrace, Traces

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
    """An open call of `Generate`.

    Attributes:
      streams: of each answer, by the id of its request in the engine.
      arrived: of all streams.
      trace: of the call, if there is one.
    """

    streams: dict[str, OutputStream]
    arrived: asyncio.Event
    trace: CallTrace | None = None
    is_submitted: bool = False


class EngineService(protocol.Servicer):
    """`vllm.grpc.engine.VllmEngine`.

    Args:
      tokenizer, bundle: None when the model folder has none.
      draw_seed: a fresh uint32 for a request without a seed.
      traces: of calls of `Generate`, if they are asked for.

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
        traces: Traces | None = None,
    ):
        self._config, self._info, self._lifecycle = config, info, lifecycle
        self._tokenizer, self._bundle, self._draw_seed = tokenizer, bundle, draw_seed
        self._grammars = Grammars(tokenizer, info.vocab_size) if tokenizer is not None else None
        self.metrics = Metrics(lifecycle, traces)
        self._traces = traces
        self._bridge = OutputBridge(asyncio.get_running_loop())
        self._publisher = KvPublisher(config.num_replicas, config.unit_tokens)
        self._calls: dict[str, _Call] = {}
        self._live_ids: set[str] = set()  # of requests in the engine, one for each answer
        self._start_s = time.monotonic()
        self._rates = [loads.RateMeter(self._start_s) for _ in range(config.num_replicas)]
        self._last_request_time = 0.0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def num_open(self) -> int:
        """Open calls of `Generate`."""
        return len(self._calls)

    def attach(self, served: Served) -> None:
        """Follow an engine's caches. To be called before the engine is started."""
        served.engine.watch_caches(self._publisher.post)

    def end_subscriptions(self) -> None:
        """End all subscriptions: an open one would hold up the end of the server."""
        self._publisher.end()

    async def wait_idle(self) -> None:
        """Wait until no call of `Generate` is open."""
        await self._idle.wait()

    def end_all(self, error: RequestError) -> None:
        """End all open streams with an error, without the engine."""
        for call in self._calls.values():
            for request_id, stream in call.streams.items():
                stream.deliver(_aborted(request_id)._replace(finish_reason="error", error=error))

    @at_edge
    async def Generate(self, request: messages.GenerateRequest, context: Context) -> None:
        """Stream the answer to one prompt, or send it whole."""
        self._last_request_time = time.time()
        request_id = request.request_id or uuid.uuid4().hex
        with self.metrics.request() as measured, self._traced(request_id, context) as trace:
            await self._generate(request, request_id, context, measured, trace)

    def _traced(
        self, request_id: str, context: Context
    ) -> contextlib.AbstractContextManager[CallTrace | None]:
        if self._traces is None:
            return contextlib.nullcontext()
        return self._traces.call(request_id, context.invocation_metadata() or ())

    async def _generate(
        self,
        request: messages.GenerateRequest,
        request_id: str,
        context: Context,
        measured: RequestMetrics,
        trace: CallTrace | None,
    ) -> None:
        served = self._lifecycle.require_served()
        convert.check_fields(request)
        try:
            with self._open(served, request_id, request.sampling_params) as call:
                call.trace = trace
                parsed = await self._parse(served, call, request)
                await self._submit(served, call, parsed)
                # Headers go out with the first message: what is refused is refused before it.
                choices = [Choice(index, one, request.stream) for index, one in enumerate(parsed)]
                output = await _forward(call, choices, context, measured)
        except asyncio.CancelledError:
            seconds = time.monotonic() - measured.begin_s
            log_event("request_cancelled", request_id=request_id, seconds=seconds)
            raise
        log_event(
            "request",
            request_id=request_id,
            finish_reason=output.finish_reason,
            prompt_tokens=output.prompt_tokens,
            completion_tokens=sum(choice.num_tokens for choice in choices),
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
            self._lifecycle.served.engine.abort(id for c in calls.values() for id in c.streams)
        for call in calls.values():
            if not call.is_submitted:  # the engine does not know it yet
                for request_id, stream in call.streams.items():
                    stream.deliver(_aborted(request_id))
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
            for rank, (counts, rate) in enumerate(self._read_loads(served)):
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
    ) -> None:
        """Stream what the prefix caches hold, and the loads of the replicas."""
        served = self._lifecycle.require_served()

        def read_loads(is_whole: bool) -> list[common.EngineLoad]:
            silence_s = served.engine.step_age_s()
            return [
                loads.engine_load(
                    served, counts, tokens_per_s=rate, silence_s=silence_s, is_whole=is_whole
                )
                for counts, rate in self._read_loads(served)
            ]

        await self._publisher.serve(request, context, read_loads)

    @at_edge
    async def Embed(self, request: messages.EmbedRequest, context: Context) -> NoReturn:
        """Not there: the model generates."""
        raise _unsupported("Embed", "the model generates text and has no embedding output")

    @at_edge
    async def StartProfile(
        self, request: common.StartProfileRequest, context: Context
    ) -> common.ProfileResponse:
        """Trace steps of the engine with XLA's profiler."""
        profiler = self._require_profiler()
        convert.check_profile_fields(request)
        try:
            profile = profiler.start(
                output_dir=request.output_dir,
                start_step=request.start_step,
                num_steps=request.num_steps if request.HasField("num_steps") else None,
                with_python=request.with_stack,
            )
        except ProfilerStateError as error:
            return common.ProfileResponse(success=False, message=str(error))
        return common.ProfileResponse(success=True, message=f"writes to {profile.folder}")

    @at_edge
    async def StopProfile(
        self, request: common.StopProfileRequest, context: Context
    ) -> common.ProfileResponse:
        """End the trace and write it."""
        profiler = self._require_profiler()
        try:
            folder = await asyncio.to_thread(profiler.stop)
        except ProfilerStateError as error:
            return common.ProfileResponse(success=False, message=str(error))
        message = "no step was traced" if folder is None else f"written to {folder}"
        return common.ProfileResponse(success=folder is not None, message=message)

    def _read_loads(self, served: Served) -> list[tuple[ReplicaCounts, float]]:
        """Counts of each replica, and the tokens that it generates a second."""
        now_s = time.monotonic()
        parts = served.engine.counts().replicas
        return [
            (counts, rate.read(counts.generated_tokens, now_s))
            for counts, rate in zip(parts, self._rates, strict=True)
        ]

    def _require_profiler(self) -> Profiler:
        profiler = self._lifecycle.require_served().profiler
        if profiler is None:
            raise RequestError("UNIMPLEMENTED", "profiles are not supported: nothing to trace")
        return profiler

    @contextlib.contextmanager
    def _open(
        self, served: Served, request_id: str, params: messages.SamplingParams
    ) -> Generator[_Call]:
        """Own a request id while its call is open.

        Raises:
          RequestError: the id is live (KF-V01), the engine could not take one more (KF-V07), or
            there are too many answers to give.
        """
        limits = served.limits
        limit = self._config.num_replicas * limits.max_rows + limits.max_waiting
        num_choices = convert.num_choices(params, most=limit)
        ids = [request_id, *(f"{request_id}#{index}" for index in range(1, num_choices))]
        if not self._live_ids.isdisjoint(ids):
            raise RequestError(
                "ALREADY_EXISTS",
                f"request_id is in use: got {request_id!r}; expected one that no live request has",
            )
        if self.num_open >= limit:
            raise RequestError(
                "RESOURCE_EXHAUSTED",
                f"the server is full: got {self.num_open} open requests; "
                f"expected fewer than {limit}; retry later",
            )
        engine, arrived = served.engine, asyncio.Event()
        streams = {
            id: OutputStream(
                max_tokens=self._config.output_buffer_tokens,
                pause=functools.partial(engine.pause, id),
                resume=functools.partial(engine.resume, id),
                arrived=arrived,
            )
            for id in ids
        }
        call = self._calls[request_id] = _Call(streams, arrived)
        self._live_ids.update(ids)
        self._idle.clear()
        try:
            yield call
        finally:
            del self._calls[request_id]
            self._live_ids.difference_update(ids)
            if not self._calls:
                self._idle.set()
            engine.abort(ids)

    async def _parse(
        self, served: Served, call: _Call, request: messages.GenerateRequest
    ) -> list[Request]:
        """The request of each answer."""
        limits, params = served.limits, request.sampling_params
        read_prompt = functools.partial(
            convert.prompt_ids,
            request,
            tokenizer=self._tokenizer,
            max_tokens=limits.max_context_tokens - 1,
            num_kept=convert.num_kept(params, max_request_tokens=limits.max_request_tokens),
        )
        is_long = len(request.text) > _MAX_INLINE_CHARS
        prompt = await asyncio.to_thread(read_prompt) if is_long else read_prompt()
        sampling = convert.sampling_params(
            params,
            default_temperature=self._info.default_temperature,
            vocab_size=limits.vocab_size,
            max_new_tokens=limits.max_new_tokens(len(prompt)),
            draw_seed=self._draw_seed,
            has_tokenizer=self._tokenizer is not None,
        )
        replica = request.data_parallel_rank if request.HasField("data_parallel_rank") else None
        requests = [
            Request(
                request_id=id,
                prompt=prompt,
                sampling=of_choice,
                eos_token_ids=self._info.eos_token_ids,
                replica=replica,
            )
            for id, of_choice in zip(
                call.streams, convert.siblings(sampling, len(call.streams)), strict=True
            )
        ]
        check_size(requests[0], is_streamed=request.stream, vocab_size=limits.vocab_size)
        return requests

    async def _submit(self, served: Served, call: _Call, requests: Sequence[Request]) -> None:
        """Wait until the engine has accepted all requests, unless they were aborted before.

        Raises:
          RequestError: the engine refused one, or its grammar is not understood.
        """
        grammars = [await self._grammar(request) for request in requests]
        if any(stream.has_ended for stream in call.streams.values()):
            return
        call.is_submitted = True
        on_admitted = None
        if call.trace is not None:
            call.trace.submitted(requests)
            on_admitted = call.trace.admitted
        accepted: list[Future[None]] = []
        for request, stream, grammar in zip(requests, call.streams.values(), grammars, strict=True):
            on_output = functools.partial(self._bridge.post, stream)
            matcher = None
            if request.sampling.stop and self._tokenizer is not None:
                matcher = StopMatcher(self._tokenizer, request.sampling)
            accepted.append(
                served.engine.submit(
                    request, on_output, matcher=matcher, grammar=grammar, on_admitted=on_admitted
                )
            )
        for future in accepted:
            await asyncio.wrap_future(future)

    async def _grammar(self, request: Request) -> GrammarMatcher | None:
        """What follows the grammar of a request; compiled in a thread of its own."""
        sampling = request.sampling
        if sampling.grammar is None or self._grammars is None:
            return None
        return await asyncio.to_thread(
            self._grammars.matcher,
            sampling.grammar,
            request.eos_token_ids,
            () if sampling.grammar_from_first_token else request.prompt,
        )


async def _forward(
    call: _Call, choices: Sequence[Choice], context: Context, measured: RequestMetrics
) -> Output:
    """Send outputs to the client as they come, or each answer at its end; return the last one.

    Raises:
      RequestError: a request ended with an error.
    """
    num_open, streams = len(choices), tuple(call.streams.values())
    while True:
        for index, output in await next_outputs(streams, call.arrived):
            measured.passed(output)
            if call.trace is not None:
                call.trace.passed(output)
            if output.error is not None:
                raise RequestError(output.error.status, output.error.message)
            for message in choices[index].replies(output):
                await context.write(message)
            num_open -= output.finish_reason is not None
            if not num_open:
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
