"""Random and mutated requests: never an internal error, and nothing of them stays."""

from __future__ import annotations

import asyncio
import collections
import random
import string
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.descriptor import FieldDescriptor

from serving.page_table import CachePolicy
from serving.rpc.protocol import SERVICE_NAME, common, messages
from tests.fakes import VOCAB_SIZE, fake_request, solo_tokens
from tests.server.harness import (
    PROMPT,
    Harness,
    collect,
    fake_load,
    request,
    serving,
    write_model_folder,
)

AT_ONCE = 16
MOST_REPLIES = 8  # before the client leaves
EXPECTED = {
    "OK", "CANCELLED", "INVALID_ARGUMENT", "UNIMPLEMENTED", "RESOURCE_EXHAUSTED", "ALREADY_EXISTS",
}  # fmt: skip
INTEGERS = (0, 1, 2, 3, 5, 7, 63, 64, 65, VOCAB_SIZE - 1, VOCAB_SIZE, 258, 2**31 - 1)
UNSIGNED = (*INTEGERS, 2**32 - 1)
SIGNED = (*INTEGERS, -1, -2, -(2**31))
FLOATS = (0.0, -0.0, 0.5, 1.0, 2.0, -1.0, -2.0, 1e-45, 3e38, 100.0, float("nan"), float("inf"),
          float("-inf"))  # fmt: skip
STRINGS = ("", "a", "ab", "\n", "\x00", "é\U0001f600", "{}", "[", "stop", "x" * 5000)
KINDS = FieldDescriptor


def value_of(field: FieldDescriptor, rng: random.Random, depth: int) -> Any:
    """A value of a scalar field."""
    if field.cpp_type in (KINDS.CPPTYPE_UINT32, KINDS.CPPTYPE_UINT64):
        return rng.choice(UNSIGNED)
    if field.cpp_type in (KINDS.CPPTYPE_INT32, KINDS.CPPTYPE_INT64, KINDS.CPPTYPE_ENUM):
        return rng.choice(SIGNED)
    if field.cpp_type in (KINDS.CPPTYPE_FLOAT, KINDS.CPPTYPE_DOUBLE):
        return rng.choice(FLOATS)
    if field.cpp_type == KINDS.CPPTYPE_BOOL:
        return rng.random() < 0.5
    text = rng.choice((*STRINGS, "".join(rng.choices(string.printable, k=rng.randrange(20)))))
    return text.encode() if field.type == KINDS.TYPE_BYTES else text


def set_field(message: Any, field: FieldDescriptor, rng: random.Random, depth: int) -> None:
    """Give a field a random value."""
    here = getattr(message, field.name)
    count = rng.choice((1, 1, 2, 3, 70))
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        key, value = (field.message_type.fields_by_name[name] for name in ("key", "value"))
        for _ in range(count):
            if value.message_type is None:
                here[value_of(key, rng, depth)] = value_of(value, rng, depth)
            else:
                fill(here[value_of(key, rng, depth)], rng, depth + 1)
    elif field.message_type is not None and field.is_repeated:
        for _ in range(count):
            fill(here.add(), rng, depth + 1)
    elif field.message_type is not None:
        here.SetInParent()
        fill(here, rng, depth + 1)
    elif field.is_repeated:
        here.extend(value_of(field, rng, depth) for _ in range(count))
    else:
        setattr(message, field.name, value_of(field, rng, depth))


def fill(message: Any, rng: random.Random, depth: int = 0) -> None:
    """Set some fields of a message and of those in it."""
    for field in message.DESCRIPTOR.fields:
        if depth < 4 and rng.random() < 0.25:
            set_field(message, field, rng, depth)


def random_request(rng: random.Random) -> bytes:
    """A message of random fields, a good one with some fields changed, or one of broken bytes."""
    how = rng.random()
    good = request(
        "f", tuple(rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(1, 20))),
        temperature=rng.choice((0.0, 1.0)), max_tokens=rng.randrange(1, 9),
        stream=rng.random() < 0.8,
    )  # fmt: skip
    if how < 0.2:
        good = messages.GenerateRequest()
        fill(good, rng)
    elif how < 0.9:
        for _ in range(rng.randrange(3)):
            part: Any = good if rng.random() < 0.3 else good.sampling_params
            set_field(part, rng.choice(part.DESCRIPTOR.fields), rng, 0)
    if rng.random() < 0.9:  # else all requests at once have one id
        good.request_id = f"f{rng.getrandbits(64):x}"
    data = bytearray(good.SerializeToString())
    if how >= 0.8:
        for _ in range(rng.randrange(1, 4)):
            place = rng.randrange(len(data))
            data[place : place + rng.randrange(2)] = rng.randbytes(rng.randrange(3))
    return bytes(data)


async def outcome(harness: Harness, data: bytes) -> str:
    """Send bytes as a request; the name of the status that came."""
    call = harness.channel.unary_stream(f"/{SERVICE_NAME}/Generate")(data)
    try:
        async with asyncio.timeout(20):
            replies = 0
            async for _ in call:
                replies += 1
                if replies == MOST_REPLIES:
                    call.cancel()
    except grpc.aio.AioRpcError as error:
        if error.code().name not in EXPECTED:
            return f"{error.code().name}: {error.details()} of {data!r}"
        return error.code().name
    except asyncio.CancelledError:
        return "CANCELLED"
    return "OK"


@pytest.mark.parametrize(
    ("count", "seed"), [(250, 0), pytest.param(10_000, 1, marks=pytest.mark.slow)]
)
async def test_random_requests_get_a_clear_status_and_leave_nothing(
    count: int, seed: int, tmp_path: Path
) -> None:
    rng = random.Random(seed)
    load = fake_load(policy=CachePolicy(unit_tokens=2), num_pages=200)
    async with serving(load, folder=write_model_folder(tmp_path)) as harness:
        outcomes: collections.Counter[str] = collections.Counter()
        for first in range(0, count, AT_ONCE):
            batch = [random_request(rng) for _ in range(min(AT_ONCE, count - first))]
            outcomes.update(await asyncio.gather(*(outcome(harness, data) for data in batch)))
        assert set(outcomes) <= EXPECTED, sorted(set(outcomes) - EXPECTED)[:3]
        assert outcomes["OK"] > count // 10
        assert outcomes["INVALID_ARGUMENT"] > count // 10

        await harness.until_idle()
        assert harness.lifecycle.is_serving
        reply = await harness.stub.FlushCache(common.FlushCacheRequest())
        assert reply.success, reply.message
        prompt = fake_request("solo", prompt=PROMPT, max_tokens=4)
        answer = await collect(harness.stub.Generate(request(temperature=0.0)))
        assert answer.token_ids == tuple(solo_tokens(prompt))
