"""An open load: requests arrive at times of their own, whether earlier ones have ended or not."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Iterator

import grpc
import grpc.aio
import numpy as np

from serving.rpc.protocol import Stub, messages


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """What clients send.

    Attributes:
      prompt_tokens, new_tokens: least and most of a request; drawn evenly.
      shared_tokens: at the start of every prompt, the same ones; at least one other follows.
      cancel_share: requests whose client leaves after half of its tokens.
      vocab: token ids below this are drawn.
    """

    prompt_tokens: tuple[int, int]
    new_tokens: tuple[int, int]
    shared_tokens: int = 0
    cancel_share: float = 0.0
    vocab: int = 256
    seed: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arrival:
    """One request of a load.

    Attributes:
      at_s: when it is sent, after the start.
      cancel_after: tokens after which its client leaves; None reads all.
    """

    at_s: float
    prompt: tuple[int, ...]
    new_tokens: int
    cancel_after: int | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample:
    """How a request fared. Times count from the moment it was due, late sending included.

    Attributes:
      status: `OK`, `CANCELLED` by its own client, or the status it ended with.
      first_token_s, end_s: None if that did not come.
      tokens: that came.
    """

    at_s: float
    status: str
    prompt_tokens: int
    cached_tokens: int
    tokens: int
    first_token_s: float | None
    end_s: float | None

    @property
    def token_s(self) -> float | None:
        """Mean time of a token behind the first."""
        if self.first_token_s is None or self.end_s is None or self.tokens < 2:
            return None
        return (self.end_s - self.first_token_s) / (self.tokens - 1)


def arrivals(workload: Workload, rate: float, duration_s: float) -> Iterator[Arrival]:
    """A Poisson process of `rate` requests a second; the same seed gives the same load."""
    rng = np.random.default_rng([workload.seed, round(rate * 1000)])
    shared = np.random.default_rng(workload.seed).integers(
        0, workload.vocab, workload.shared_tokens
    )
    at_s = 0.0
    while (at_s := at_s + rng.exponential(1 / rate)) < duration_s:
        length, new = (
            int(rng.integers(low, high + 1))
            for low, high in (workload.prompt_tokens, workload.new_tokens)
        )
        own = rng.integers(0, workload.vocab, max(1, length - len(shared)))
        leaves = rng.random() < workload.cancel_share
        yield Arrival(
            at_s=at_s,
            prompt=(*shared.tolist(), *own.tolist()),
            new_tokens=new,
            cancel_after=max(1, new // 2) if leaves else None,
        )


async def run(address: str, load: list[Arrival], name: str) -> list[Sample]:
    """Send a load to a server and wait for the end of every request.

    Args:
      name: begins all request ids.
    """
    async with grpc.aio.insecure_channel(
        address, options=(("grpc.max_receive_message_length", -1),)
    ) as channel:
        stub, begin_s = Stub(channel), time.monotonic()

        async def one(index: int, arrival: Arrival) -> Sample:
            await asyncio.sleep(begin_s + arrival.at_s - time.monotonic())
            return await _ask(stub, f"{name}-{index}", arrival, begin_s + arrival.at_s)

        return await asyncio.gather(*(one(i, arrival) for i, arrival in enumerate(load)))


async def _ask(stub: Stub, request_id: str, arrival: Arrival, due_s: float) -> Sample:
    call = stub.Generate(
        messages.GenerateRequest(
            request_id=request_id,
            tokenized=messages.TokenizedInput(input_ids=arrival.prompt),
            sampling_params=messages.SamplingParams(
                temperature=0.0, max_tokens=arrival.new_tokens, ignore_eos=True
            ),
            stream=True,
        )
    )
    status, tokens, cached, first_s, end_s = "OK", 0, 0, None, None
    try:
        async for reply in call:
            if reply.HasField("complete"):
                cached, end_s = reply.complete.cached_tokens, time.monotonic() - due_s
                continue
            first_s = first_s or time.monotonic() - due_s
            tokens += len(reply.chunk.token_ids)
            if arrival.cancel_after is not None and tokens >= arrival.cancel_after:
                call.cancel()
                status = "CANCELLED"
                break
    except grpc.aio.AioRpcError as error:
        status = error.code().name
    return Sample(
        at_s=arrival.at_s,
        status=status,
        prompt_tokens=len(arrival.prompt),
        cached_tokens=cached,
        tokens=tokens,
        first_token_s=first_s,
        end_s=end_s,
    )
