"""A real gRPC server on a free port, with a real engine on a fake device, in this event loop."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import itertools
import json
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from serving.counts import Counts
from serving.engine import Engine
from serving.page_table import CachePolicy, empty_table
from serving.plan import StepResult
from serving.profiler import ProfiledExecutor, Profiler
from serving.rpc.bundle import build_bundle
from serving.rpc.lifecycle import Lifecycle, Served
from serving.rpc.model_info import ModelInfo
from serving.rpc.protocol import Stub, messages
from serving.rpc.service import EngineService, ServiceConfig
from serving.server import OnFailure, Server, ServerConfig
from serving.tokenizer import load_folder
from tests.fakes import (
    EOS,
    VOCAB_SIZE,
    FakeDevices,
    FakeExecutor,
    fake_geometry,
    fake_limits,
)

DEADLINE_S = 20.0  # of everything that a test waits for
PROMPT = (5, 6, 7)


class SlowExecutor(FakeExecutor):
    """A device whose steps take time, so that a request can be caught while it runs."""

    def collect(self, handle: int) -> StepResult:
        time.sleep(0.002)
        return super().collect(handle)


@dataclasses.dataclass
class Harness:
    """A server with its client; `served` is there once the model is loaded."""

    address: str
    stub: Stub
    channel: grpc.aio.Channel
    server: Server
    service: EngineService
    lifecycle: Lifecycle
    running: asyncio.Task[None]

    @property
    def engine(self) -> Engine[Any]:
        assert self.lifecycle.served is not None
        return self.lifecycle.served.engine

    def counts(self) -> Counts:
        return self.engine.counts()

    async def until(self, condition: Callable[[], bool], within_s: float = DEADLINE_S) -> None:
        """Wait for a condition; fail after `within_s`."""
        end_s = time.monotonic() + within_s
        while not condition():
            assert time.monotonic() < end_s, "the condition did not come true in time"
            await asyncio.sleep(0.002)

    async def until_idle(self, within_s: float = DEADLINE_S) -> None:
        """Wait until nothing is open and every page is free."""
        await self.until(self.is_idle, within_s)

    def is_idle(self) -> bool:
        counts = self.counts()
        return (
            counts.running == counts.waiting == self.service.num_open == 0
            and counts.free_pages == counts.total_pages
        )


def request(
    request_id: str = "a",
    prompt: tuple[int, ...] = PROMPT,
    *,
    stream: bool = True,
    **sampling: Any,
) -> messages.GenerateRequest:
    """A request; `seed` is 0 and `max_tokens` is 4 unless given, None leaves a field out."""
    fields = {"seed": 0, "max_tokens": 4} | sampling
    return messages.GenerateRequest(
        request_id=request_id,
        tokenized=messages.TokenizedInput(input_ids=prompt),
        sampling_params=messages.SamplingParams(
            **{name: value for name, value in fields.items() if value is not None}
        ),
        stream=stream,
    )


@dataclasses.dataclass
class Answer:
    """All messages of one call."""

    chunks: list[messages.GenerateStreamChunk]
    complete: messages.GenerateComplete | None

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(id for chunk in self.chunks for id in chunk.token_ids)


async def collect(call: grpc.aio.UnaryStreamCall[Any, Any]) -> Answer:
    """Read a call to its end."""
    answer = Answer([], None)
    async with asyncio.timeout(DEADLINE_S):
        async for reply in call:
            assert answer.complete is None, "a message follows the complete one"
            if reply.HasField("chunk"):
                answer.chunks.append(reply.chunk)
            else:
                answer.complete = reply.complete
    return answer


async def status_of(call: grpc.aio.UnaryStreamCall[Any, Any]) -> tuple[str, str, int]:
    """Read a call that must fail: name of its status, its message, and the replies before it."""
    num_replies = 0
    try:
        async with asyncio.timeout(DEADLINE_S):
            async for _ in call:
                num_replies += 1
    except grpc.aio.AioRpcError as error:
        return error.code().name, error.details() or "", num_replies
    raise AssertionError("the call succeeded")


def write_model_folder(folder: Path) -> Path:
    """A model folder with a byte tokenizer and configurations, without weights."""
    lines = [f"{base64.b64encode(bytes([rank])).decode()} {rank}\n" for rank in range(256)]
    (folder / "tiktoken.model").write_text("".join(lines))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"added_tokens_decoder": {"258": {"content": "<|end_of_msg|>"}}})
    )
    (folder / "config.json").write_text(json.dumps({"model_type": "kimi_k3"}))
    return folder


def model_info(**changes: Any) -> ModelInfo:
    """What the server tells of the fake model."""
    values: dict[str, Any] = {
        "name": "fake",
        "folder": "/models/fake",
        "model_type": "kimi_k3",
        "architectures": ("KimiK3ForConditionalGeneration",),
        "vocab_size": VOCAB_SIZE,
        "bos_token_id": 3,
        "pad_token_id": None,
        "eos_token_ids": (EOS,),
        "max_context_tokens": 64,
        "has_tokenizer": True,
        "sampling_defaults": {"temperature": 0.7},
    }
    return ModelInfo(**values | changes)


def fake_load(
    executor: FakeExecutor | None = None,
    *,
    page_tokens: int = 4,
    num_pages: int = 100,
    num_replicas: int = 1,
    policy: CachePolicy | None = None,
    profiler: Profiler | None = None,
    **limits: int,
) -> Callable[[OnFailure], Served]:
    """A load that takes no time. `limits` are those of `fake_limits`; the default `policy` is to
    reuse nothing. `executor` is the first replica's."""
    geometry = fake_geometry(page_tokens=page_tokens)
    limits.setdefault("max_waiting_tokens", max(1000, limits.get("max_context_tokens", 0)))
    bounds = fake_limits(geometry, num_pages=num_pages, **limits)
    fresh = [
        FakeExecutor(geometry, num_pages=num_pages, max_rows=bounds.max_rows)
        for _ in range(num_replicas)
    ]
    devices = FakeDevices(executor or fresh[0], *fresh[1:])

    def load(on_failure: OnFailure) -> Served:
        table = empty_table(geometry, num_pages, policy)
        profiled = ProfiledExecutor(devices, profiler) if profiler else devices
        engine = Engine(profiled, bounds, [table] * num_replicas, on_failure=on_failure)
        return Served(
            engine=engine, limits=bounds, page_tokens=geometry.page_tokens, profiler=profiler
        )

    return load


@contextlib.asynccontextmanager
async def serving(
    load: Callable[[OnFailure], Served] | None = None,
    *,
    folder: Path | None = None,
    info: ModelInfo | None = None,
    port: int = 0,
    drain_s: float = 5.0,
    output_buffer_tokens: int = 256,
    num_replicas: int = 1,
    wait_ready: bool = True,
    channel_options: tuple[tuple[str, int], ...] = (),
    draw_seed: Callable[[], int] | None = None,
    traces: Any = None,
    **config: Any,
) -> AsyncIterator[Harness]:
    """Run a server; on the way out it is stopped, and its own errors are the test's to look at.

    Args:
      folder: of the tokenizer.
      info: what the server tells of the model; the fake one's if it is left out.
      traces: of `serving.rpc.spans`.
      config: other values of `ServerConfig`.
    """
    lifecycle = Lifecycle()
    service = EngineService(
        ServiceConfig(
            dtype="float32",
            num_replicas=num_replicas,
            max_rows=4,
            unit_tokens=2,
            output_buffer_tokens=output_buffer_tokens,
        ),
        info or model_info(has_tokenizer=folder is not None),
        lifecycle,
        tokenizer=load_folder(folder) if folder else None,
        bundle=build_bundle(folder) if folder else None,
        draw_seed=draw_seed or itertools.count(1000).__next__,
        traces=traces,
    )
    server = Server(ServerConfig(port=port, drain_s=drain_s, **config), service, lifecycle)
    address = await server.open()
    running = asyncio.create_task(server.run(load or fake_load()))
    async with grpc.aio.insecure_channel(address, options=channel_options) as channel:
        harness = Harness(address, Stub(channel), channel, server, service, lifecycle, running)
        try:
            if wait_ready:
                await harness.until(lambda: lifecycle.is_serving or running.done())
            yield harness
        finally:
            server.stop()
            server.stop()
            async with asyncio.timeout(DEADLINE_S):
                await asyncio.gather(running, return_exceptions=True)
