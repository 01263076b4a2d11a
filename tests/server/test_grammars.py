"""Grammars through the real server: with drafts, beside other requests, in two processes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import grpc
import grpc.aio
import pytest

from serving.rpc.protocol import Stub, messages

pytest.importorskip("llguidance", reason="the extra `grammar` is not installed")
pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SCHEMA = {
    "type": "object",
    "properties": {
        "n": {"type": "integer", "minimum": 0, "maximum": 999}, "s": {"enum": ["a", "bc"]},
    },
    "required": ["n", "s"],
    "additionalProperties": False,
}  # fmt: skip
PROMPT = b"def value(self):\n    return "
# Of the embedded model's tokenizer: a byte is its own id.
END, OPEN, CLOSE, SEP = range(258, 262)
THINKING = (OPEN, *b"message", SEP, *PROMPT, OPEN, *b"think", SEP, *PROMPT)
CLOSING = (CLOSE, *b"think", SEP, OPEN, *b"response", SEP)


def request(
    name: str, prompt: Sequence[int] = PROMPT, **sampling: object
) -> messages.GenerateRequest:
    params = {"temperature": 0.0, "max_tokens": 40, "seed": 3} | sampling
    return messages.GenerateRequest(
        request_id=name, tokenized=messages.TokenizedInput(input_ids=prompt),
        sampling_params=messages.SamplingParams(**params), stream=True,
    )  # fmt: skip


async def tokens(
    stub: Stub, message: messages.GenerateRequest, *, ends: str = ""
) -> list[list[int]]:
    """Tokens of all answers to a request; how they have to end."""
    ids: dict[int, list[int]] = {}
    async for reply in stub.Generate(message):
        one = reply.complete if reply.HasField("complete") else reply.chunk
        ids.setdefault(one.index, []).extend(reply.chunk.token_ids)
        if reply.HasField("complete") and ends:
            assert reply.complete.finish_reason == ends
    return [ids[index] for index in sorted(ids)]


async def answers(stub: Stub, message: messages.GenerateRequest, *, ends: str = "") -> list[bytes]:
    """Texts of all answers to a request; how they have to end."""
    every = await tokens(stub, message, ends=ends)
    return [bytes(token for token in answer if token < 256) for answer in every]


async def answer(stub: Stub, message: messages.GenerateRequest, *, ends: str = "") -> bytes:
    (only,) = await answers(stub, message, ends=ends)
    return only


async def leave(stub: Stub, message: messages.GenerateRequest) -> None:
    """Cancel a request after its first token."""
    call = stub.Generate(message)
    await anext(aiter(call))
    call.cancel()


async def ask(address: str) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        stub = Stub(channel)
        alone = await answer(stub, request("alone"))
        choice = messages.ChoiceConstraint(choices=["spam", "eggs"])
        schema, regex = json.dumps(SCHEMA), "[a-z]{4}=[0-9]{2}"
        free, chosen, matched, greedy, drawn, _ = await asyncio.gather(
            answer(stub, request("free")),
            answer(stub, request("choice", choice=choice), ends="stop"),
            answer(stub, request("regex", regex=regex), ends="stop"),
            answer(stub, request("json", json_schema=schema, max_tokens=200), ends="stop"),
            answers(
                stub,
                request("drawn", json_schema=schema, temperature=1.0, n=3, max_tokens=200),
                ends="stop",
            ),
            leave(stub, request("left", regex="[a-z]{400}", max_tokens=200)),
        )
        assert free == alone
        assert chosen in (b"spam", b"eggs")
        assert re.fullmatch(regex.encode(), matched)
        assert len(drawn) == 3
        for text in (greedy, *drawn):
            value = json.loads(text)
            assert value.keys() == {"n", "s"}
            assert 0 <= value["n"] <= 999
            assert value["s"] in ("a", "bc")
        assert await answer(stub, request("again", regex=regex)) == matched
        with pytest.raises(grpc.aio.AioRpcError, match="regex is not understood"):
            await answer(stub, request("bad", regex="("))
        assert await answer(stub, request("after")) == alone


async def ask_for_thoughts(address: str) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        stub = Stub(channel)
        known = {"regex": "[0-9]{3}", "max_tokens": 24}
        ended = {CLOSE: 100.0}  # the model would not end a thought by itself
        free, thought, closed, at_once = await asyncio.gather(
            tokens(stub, request("free", THINKING, max_tokens=24), ends="length"),
            tokens(stub, request("thought", THINKING, **known), ends="length"),
            tokens(stub, request("closed", THINKING, **known, n=2, logit_bias=ended), ends="stop"),
            tokens(stub, request("at once", THINKING, **known, grammar_from_first_token=True)),
        )
        assert thought == free
        assert len(closed) == 2
        for ids in closed:
            assert ids[: len(CLOSING)] == [*CLOSING]
            assert re.fullmatch(b"[0-9]{3}", bytes(ids[len(CLOSING) : -1]))
            assert ids[-1] == END
        assert re.fullmatch(b"[0-9]{3}", bytes(at_once[0][:-1]))


@pytest.mark.parametrize(
    "options",
    [
        ("--speculate", "dspark"),
        ("--speculate", "ngram", "--mesh", "dp2"),
        ("--processes", "2", "--mesh", "tp2"),
    ],
    ids=str,
)
def test_answers_follow_their_grammars(tmp_path: Path, options: tuple[str, ...]) -> None:
    with served(tmp_path, "--max-context", "512", *options) as address:
        asyncio.run(ask(address))


def test_thoughts_are_as_without_a_grammar_which_the_answers_follow(tmp_path: Path) -> None:
    with served(tmp_path, "--max-context", "128", "--speculate", "ngram") as address:
        asyncio.run(ask_for_thoughts(address))


@contextlib.contextmanager
def served(folder: Path, *options: str) -> Iterator[str]:
    """Address of a server with the embedded model."""
    command = [
        *(sys.executable, "scripts/serve.py", "--port", "0", "--cache-dir", str(folder)),
        *("--dtype", "float32", "--max-prefill-tokens", "64", *options),
    ]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            ready = next(line for line in process.stdout if line.startswith("ready "))
            yield ready.split()[1]
        finally:
            process.terminate()
